"""Units that stand still for a while and go on: nobody is out for what all do, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from cellgate.proxy.admin.views import unit_view
from cellgate.router.nouns import Verdict
from tests.scenarios.harness import Stage, promise_s
from tests.scenarios.users import Users
from tests.sim.engine import CANARY, Engine
from tests.sim.http_server import Request
from tests.sim.hurt import go_on, stop, stop_core
from tests.sim.odd import CUT, KINDS, Asked, Odd
from tests.sim.timing import Timing
from tests.sim.world import played

STEPS = Timing(step_s=0.05)
SLOW = Timing(step_s=0.08, prefill_s=0.8)


async def pause(engine: Engine, seconds: float, *, whole: bool = False) -> None:
    """Stop its core, or (`whole`) the front end as well, and let it go on."""
    stop(engine, 0) if whole else stop_core(engine)
    await asyncio.sleep(seconds)
    go_on(engine)


@pytest.mark.parametrize("pause_s", [2.5, 4.0, 7.0])
@pytest.mark.parametrize("options", [{}, {"is_blind": True}], ids=str)
@played(lambda options: Stage(units=1, timing=STEPS, **options), given=("options",))
async def test_the_only_unit_may_stand_still_for_seconds(stage: Stage, pause_s: float) -> None:
    streams = stage.crowd(5, max_tokens=100)
    whole = stage.crowd(5, max_tokens=100, stream=False)
    await asyncio.sleep(1.0)
    pausing = asyncio.ensure_future(pause(stage.engines["a"], pause_s))
    await asyncio.sleep(1.5)
    late = stage.crowd(2, max_tokens=10)
    await pausing
    visits = [*await streams, *await whole, *await late]
    assert all(visit.is_answered for visit in visits)
    assert not [each for each in stage.shots() if "-> down" in each]


@pytest.mark.parametrize("whole", [False, True], ids=["core", "whole"])
@pytest.mark.parametrize("options", [{}, {"is_blind": True}], ids=str)
@played(lambda options: Stage(units=3, timing=STEPS, **options), given=("options",))
async def test_pauses_that_all_have_in_turn_are_nobodys_fault(stage: Stage, whole: bool) -> None:
    users = Users(stage, 9)
    await asyncio.sleep(5.0)
    for _ in range(3):
        for engine in stage.engines.values():
            await pause(engine, 2.5, whole=whole)
            await asyncio.sleep(4.0)
    await users.leave()
    assert all(visit.is_answered for visit in users.visits)
    assert not [each for each in stage.shots() if "-> down" in each]
    assert extra(stage) <= 0.02 * len(users.visits)


@pytest.mark.parametrize("seconds", [4.0, 6.0])
@pytest.mark.parametrize("options", [{}, {"is_blind": True}], ids=str)
@played(lambda options: Stage(units=3, timing=STEPS, **options), given=("options",))
async def test_when_all_stand_still_at_once_nobody_does_better(stage: Stage, seconds: float) -> None:
    users = Users(stage, 9)
    await asyncio.sleep(5.0)
    for _ in range(3):
        await asyncio.gather(*(pause(engine, seconds) for engine in stage.engines.values()))
        await asyncio.sleep(8.0)
    await users.leave()
    assert all(visit.is_answered for visit in users.visits)
    assert not [each for each in stage.shots() if "-> down" in each]
    assert extra(stage) <= 0.02 * len(users.visits)


@pytest.mark.parametrize("units", [1, 3])
@played(lambda units: Stage(units=units, timing=STEPS), given=("units",))
async def test_when_all_stand_still_for_so_long_that_they_are_out_their_requests_wait(stage: Stage) -> None:
    """Nobody is sent to another unit that stands still as well; who comes meanwhile waits, too."""
    streams = stage.crowd(6, max_tokens=100)
    whole = stage.crowd(6, max_tokens=100, stream=False)
    await asyncio.sleep(1.0)
    pausing = asyncio.gather(*(pause(engine, 20.0) for engine in stage.engines.values()))
    await stage.until(lambda: not any(state.is_usable() for state in stage.gate.board), 18.0)
    assert "requests stay there" in unit_view(stage.gate.board.units["a"], stage.now)["reason"]
    late = stage.crowd(2, max_tokens=10)
    await pausing
    visits = [*await streams, *await whole, *await late]
    assert all(visit.is_answered for visit in visits)
    assert extra(stage) == 0
    assert not stage.gate.containment.counts["deaths"]


WAIT_S = 10.0


def slowly(chance: float, rng: Random, wait_s: float = WAIT_S) -> Callable[[Request], Odd | None]:
    """Some answers, canaries' as well, begin after `wait_s`; nothing tells them from others."""

    def oddly(request: Request) -> Odd | None:
        is_slow = request.path.startswith("/v1/chat") and rng.random() < chance
        asked = Asked(b'"stream":true' in request.body, 20, rng)
        return replace(KINDS["long"](asked), head_s=wait_s) if is_slow else None

    return oddly


@pytest.mark.parametrize("seed", [1, 8])
@played(lambda seed: Stage(seed, units=3, timing=STEPS, is_blind=True), given=("seed",))
async def test_first_tokens_that_take_long_by_chance_are_nobodys_fault(stage: Stage) -> None:
    stage.liars.update(stage.engines)
    for engine in stage.engines.values():
        engine.behaviour.oddly = slowly(0.35, stage.rng)
    users = Users(stage, 9)
    await asyncio.sleep(60.0)
    await users.leave()
    assert all(visit.is_answered for visit in users.visits)
    assert not [each for each in stage.shots() if "-> down" in each]
    assert extra(stage) <= 0.02 * len(users.visits)


@pytest.mark.parametrize("seed", [0, 5, 20])
@played(lambda seed: Stage(seed, units=2, timing=STEPS, is_blind=True), given=("seed",))
async def test_canaries_that_take_long_beside_requests_that_all_wait_are_nobodys_fault(stage: Stage) -> None:
    """As the load begins nothing is known yet: neither of waits nor of canaries."""
    stage.liars.update(stage.engines)
    for engine in stage.engines.values():
        engine.behaviour.oddly = slowly(0.4, stage.rng, 20.0)
    users = Users(stage, 4)
    await asyncio.sleep(25.0)
    await users.leave()
    assert all(visit.is_answered for visit in users.visits)
    assert not [each for each in stage.shots() if "-> down" in each]
    assert extra(stage) == 0


@pytest.mark.parametrize("options", [{}, {"is_blind": True}], ids=str)
@played(lambda options: Stage(units=6, timing=STEPS, **options), given=("options",))
async def test_units_without_work_that_stand_still_with_all_that_have_some_stay(stage: Stage) -> None:
    """They are asked, because the others are silent."""
    await asyncio.sleep(30.0)
    users = Users(stage, 2)
    await asyncio.sleep(5.0)
    await asyncio.gather(*(pause(engine, 6.0) for engine in stage.engines.values()))
    await users.leave()
    assert all(visit.is_answered for visit in users.visits)
    assert not [each for each in stage.shots() if "-> down" in each]


FOUND_S = 40.0
"""1.5 times the longest wait, and two canaries that wait half as long."""


@played(lambda: Stage(6, units=3, timing=STEPS, is_blind=True))
async def test_one_that_hangs_among_those_is_found_though_its_small_prompts_took_long(stage: Stage) -> None:
    stage.promise_s = FOUND_S
    stage.liars.update(stage.engines)
    for engine in stage.engines.values():
        engine.behaviour.oddly = slowly(0.35, stage.rng)
    users = Users(stage, 9)
    await asyncio.sleep(30.0)
    stop(stage.engines["b"], 0)
    await stage.until(lambda: stage.verdict("b") is Verdict.DOWN, FOUND_S)
    go_on(stage.engines["b"])
    await users.leave()
    assert all(visit.is_answered for visit in users.visits)
    assert not [each for each in stage.shots() if "-> down" in each and not each.startswith("b: ")]


@pytest.mark.parametrize("seed", [0, 3])
@played(lambda seed: Stage(seed, units=3, timing=STEPS, is_blind=True), given=("seed",))
async def test_canaries_that_take_long_by_chance_take_nobody_out_before_there_is_load(stage: Stage) -> None:
    """Nothing is known yet, and nothing else tells who works."""
    stage.liars.update(stage.engines)
    for engine in stage.engines.values():
        engine.behaviour.oddly = slowly(0.3, stage.rng)
    await asyncio.sleep(60.0)
    assert not [each for each in stage.shots() if "-> down" in each]


@pytest.mark.parametrize("at_s", [0.5, 5.0, 60.0])
@pytest.mark.parametrize("units", [1, 3])
@played(lambda units: Stage(2, units=units, timing=STEPS, is_blind=True), given=("units",))
async def test_a_unit_that_hangs_before_it_had_any_request_is_found_as_soon_as_promised(
    stage: Stage, at_s: float
) -> None:
    await asyncio.sleep(at_s)
    stop_core(stage.engines["a"])
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, promise_s(STEPS, is_blind=True))
    go_on(stage.engines["a"])


@pytest.mark.parametrize("chance", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("kind", ["reset", "500"])
@played(lambda: Stage(2, units=3))
async def test_connections_that_all_close_and_errors_of_all_are_no_suspicion(
    stage: Stage, kind: str, chance: float
) -> None:
    """A canary looks at the unit each time; nearly always it has worked for others since the last one."""
    stage.liars.update(stage.engines)
    for engine in stage.engines.values():
        engine.behaviour.oddly = failing(kind, chance, stage.rng)
    users = Users(stage, 12)
    await asyncio.sleep(30.0)
    await users.leave()
    answered = sum(visit.is_answered for visit in users.visits)
    assert answered >= 0.9 * (1.0 - chance**3) * len(users.visits) or kind == "500"
    assert stage.shots() == []


def failing(kind: str, chance: float, rng: Random) -> Callable[[Request], Odd | None]:
    """Some requests fail, but not canaries."""

    def oddly(request: Request) -> Odd | None:
        is_canary = request.headers.get("x-request-id", "").startswith(CANARY)
        is_hit = request.path.startswith("/v1/chat") and not is_canary and rng.random() < chance
        return CUT[kind](Asked(False, 0, rng)) if is_hit else None

    return oddly


def closes(engine: Engine) -> None:
    engine.close_listener()


def refuses(engine: Engine) -> None:
    engine.behaviour.error_rate, engine.behaviour.error_status = 1.0, 500


@pytest.mark.parametrize("drain", [closes, refuses])
@pytest.mark.parametrize("units", [1, 2])
@pytest.mark.parametrize("options", [{}, {"is_blind": True}], ids=str)
@played(lambda units, options: Stage(units=units, timing=SLOW, **options), given=("units", "options"))
async def test_an_engine_that_drains_keeps_what_it_has_and_gets_nothing_new(
    stage: Stage, units: int, drain: Callable[[Engine], None]
) -> None:
    """Streams, whole answers, and prompts that are not computed yet."""
    crowds = [stage.crowd(4, max_tokens=160), stage.crowd(4, max_tokens=160, stream=False)]
    await asyncio.sleep(1.0)
    crowds.append(stage.crowd(2, max_tokens=40))
    await asyncio.sleep(0.1)
    engine = stage.engines["a"]
    drain(engine)
    began_at = stage.now
    while stage.now < began_at + 6.0:
        await asyncio.sleep(0.3)
        if units > 1:
            assert (await stage.ask(max_tokens=2)).unit == "b"
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, 3.0)
    view = unit_view(stage.gate.board.units["a"], stage.now)
    assert view["draining"], view
    assert "it takes no new requests" in view["reason"]
    assert not stage.picks("a", began_at + 2.0)
    visits = [visit for crowd in crowds for visit in await crowd]
    assert all(visit.is_answered for visit in visits)
    computed = {
        each.request_id: sum(len(e.served.get(each.request_id, ())) for e in stage.engines.values())
        for each in visits
    }
    assert set(computed.values()) == {1}


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("options", [{}, {"is_blind": True}], ids=str)
@played(lambda options: Stage(units=2, timing=SLOW, **options), given=("options",))
async def test_an_engine_that_says_that_it_shuts_down_is_draining_after_one_refusal(
    stage: Stage, status: int
) -> None:
    crowds = [stage.crowd(4, max_tokens=160), stage.crowd(4, max_tokens=160, stream=False)]
    await asyncio.sleep(1.0)
    behaviour = stage.engines["a"].behaviour
    behaviour.error_rate, behaviour.error_status = 1.0, status
    behaviour.error_words = "cannot schedule new futures after shutdown"
    picks = len(stage.picks("a"))
    while len(stage.picks("a")) == picks:
        assert (await stage.ask(max_tokens=2)).unit == "b"
    await asyncio.sleep(0.2)
    view = unit_view(stage.gate.board.units["a"], stage.now)
    assert view["draining"], view
    assert "after shutdown" in view["reason"]
    visits = [visit for crowd in crowds for visit in await crowd]
    assert all(visit.is_answered for visit in visits)
    assert extra(stage) == 1
    assert len(stage.picks("a")) == picks + 1


@pytest.mark.parametrize("status", [500, 503])
@played(lambda: Stage(units=2, timing=STEPS))
async def test_what_clients_make_an_engine_say_of_a_shutdown_does_not_take_it_out(
    stage: Stage, status: int
) -> None:
    """Who names a tool like that may find it in an error of the engine; canaries are served."""
    for engine in stage.engines.values():
        engine.behaviour.oddly = lambda request: says(status) if b"shut" in request.body else None
    stage.liars.update(stage.engines)
    for _ in range(40):
        await stage.ask(messages=[{"role": "user", "content": "shut down"}], max_tokens=2)
    assert not [each for each in stage.shots() if "-> down" in each]


def says(status: int) -> Odd:
    """An error with a word of its client in it."""
    return Odd(((0.01, b'{"error": {"message": "no such tool: shut down"}}', 0),), status)


def extra(stage: Stage) -> int:
    """How often a request came to one more unit."""
    return sum(record.attempts - 1 for record in stage.gate.records)
