"""Units that die, hang, restart and heal: their requests move, their traffic stops, then comes back."""

from __future__ import annotations

import asyncio

import pytest

from cellgate.router.nouns import Verdict
from tests.scenarios.harness import BACK_S, LATENCY_S, PROMISE_S, RULES, Stage
from tests.scenarios.kinds import HAS_WORKERS, crew
from tests.scenarios.seeds import seeds
from tests.scenarios.users import Users
from tests.scenarios.visit import Visit
from tests.sim.behaviour import Behaviour
from tests.sim.conversation import End
from tests.sim.engine import PORT
from tests.sim.timing import Timing
from tests.sim.world import played

SLOW_TO_START = Timing(prefill_s=1.0)
"""So that half of a crowd waits for its first token when something happens to the unit."""
STEPS = Timing(step_s=0.05)
WARMS_UP = Timing(step_s=0.05, warm_up_s=2.0)
CHUNKED = Timing(step_s=0.05, prefill_tokens_per_s=20_000.0, chunk_tokens=2048)
SHARED = "what everybody asks about, " * 400


@played(Stage, units=3)
async def test_a_healthy_fleet_answers_everything_and_never_flips(stage: Stage) -> None:
    for _ in range(5):
        visits = await stage.crowd(60, max_tokens=20)
        assert all(visit.is_answered for visit in visits)
        assert {visit.unit for visit in visits} == {"a", "b", "c"}
        await asyncio.sleep(stage.rng.uniform(0.0, 6.0))
    assert [stage.flips(name) for name in "abc"] == [["up"]] * 3


@played(Stage)
async def test_a_dead_unit_that_nobody_asks_is_found_by_a_probe(stage: Stage) -> None:
    await asyncio.sleep(10.0)
    stage.engines["a"].die()
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, 1.1 + LATENCY_S)
    assert all(visit.is_answered for visit in await stage.crowd(16))
    assert not stage.picks("a")


@played(Stage, timing=Timing(prefill_s=0.5, step_s=0.2, max_running=4))
async def test_a_saturated_fleet_is_busy_and_not_sick(stage: Stage) -> None:
    # 30 requests of 4 s behind each 4 places: canaries wait far longer than their timeout.
    assert all(visit.is_answered for visit in await stage.crowd(60, max_tokens=20))
    assert stage.flips("a") == stage.flips("b") == ["up"]


@pytest.mark.parametrize("kind", [Stage, pytest.param(crew, marks=HAS_WORKERS)])
@pytest.mark.parametrize("seed", seeds(range(5)))
@played(lambda kind, seed: kind(seed), given=("kind", "seed"))
async def test_a_leader_that_dies_at_any_moment_costs_nobody_anything(stage: Stage) -> None:
    crowd = stage.crowd(64, max_tokens=30)
    await asyncio.sleep(stage.rng.uniform(0.0, 0.3))
    stage.engines["a"].die()
    assert all(visit.is_answered for visit in await crowd)
    assert stage.flips("a")[-1] == "down"


def is_broken_off(visit: Visit) -> bool:
    """Something was shown, then an error event, then an end that is none."""
    return len(visit.reply.events) > 1 and visit.code is not None and visit.reply.end is End.TRUNCATED


@pytest.mark.parametrize("seed", seeds([1, 59, 67, 86, 88]))
@played(Stage, given=("seed",), timing=Timing(warm_up_s=5.0))
async def test_a_restarted_unit_is_looked_at_anew_before_it_gets_users(stage: Stage) -> None:
    """With the later seeds a canary is answered, or broken, by the process that ends."""
    crowd = stage.crowd(32, max_tokens=20)
    await asyncio.sleep(0.1)
    stage.engines["a"].restart()
    await crowd
    await stage.until(lambda: stage.flips("a")[-1] == "starting", 2.0)
    assert all(visit.unit == "b" for visit in await stage.crowd(8))
    await stage.until(stage.all_up, BACK_S)
    # It has only just come up: its share is small yet.
    assert any(visit.unit == "a" for visit in await stage.crowd(32))


@played(Stage, units=3)
async def test_a_unit_that_restarts_with_another_model_serves_that_at_once(stage: Stage) -> None:
    await asyncio.sleep(10.0)
    stage.engines["a"].model = "another"
    stage.engines["a"].restart()
    await stage.until(lambda: stage.gate.board.units["a"].serves_model("another"), 5.0)
    assert all(visit.unit in ("b", "c") for visit in await stage.crowd(8))


@pytest.mark.parametrize(
    "fault",
    [
        Behaviour(wedged=True),
        Behaviour(wedged=True, keepalive_s=0.5),
        Behaviour(spinning=True),
        Behaviour(silent=True),
    ],
    ids=["wedged", "wedged under comments", "spinning", "silent"],
)
@played(Stage, timing=SLOW_TO_START)
async def test_a_unit_that_hangs_loses_its_traffic_and_gets_it_back_when_it_is_well(
    stage: Stage, fault: Behaviour
) -> None:
    running = stage.crowd(16, max_tokens=400)
    await asyncio.sleep(2.0)
    waiting = stage.crowd(16, max_tokens=20)
    await asyncio.sleep(0.5)
    stage.engines["a"].behaviour = fault
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, PROMISE_S)
    assert all(visit.is_answered for visit in await waiting)
    assert [visit.unit for visit in await running].count("a") == 8
    assert all(visit.is_answered for visit in await running)
    assert {visit.unit for visit in await stage.crowd(8)} == {"b"}
    stage.engines["a"].behaviour = Behaviour()
    await stage.until(stage.all_up, BACK_S)
    await asyncio.sleep(RULES.slow_start_s)
    assert {visit.unit for visit in await stage.crowd(8)} == {"a", "b"}
    assert stage.flips("a") == ["up", "suspect", "down", "probation", "up"]
    assert stage.flips("b") == ["up"]


@played(Stage)
async def test_when_all_units_are_down_the_answer_names_them_and_where_to_read_why(stage: Stage) -> None:
    for engine in stage.engines.values():
        engine.die()
    await stage.until(lambda: not any(state.is_usable() for state in stage.gate.board), PROMISE_S)
    visit = await stage.ask()
    assert (visit.reply.status, visit.code) == (503, "no_unit")
    message = visit.reply.json["error"]["message"]
    assert "a is down, b is down" in message
    assert "see /units" in message
    # Whoever uses the API is not to learn where the units are.
    assert stage.engines["a"].address not in message


@played(Stage, units=1)
async def test_a_lone_unit_that_dies_and_returns_is_used_again(stage: Stage) -> None:
    crowd = stage.crowd(8, max_tokens=50)
    await asyncio.sleep(0.5)
    stage.engines["a"].die()
    assert all(is_broken_off(visit) for visit in await crowd)
    await asyncio.sleep(20.0)
    stage.engines["a"].restart()
    await stage.until(stage.all_up, BACK_S)
    assert (await stage.ask()).is_answered


@played(Stage, timing=SLOW_TO_START)
async def test_a_request_that_lost_the_last_unit_waits_for_the_next_to_come_up(stage: Stage) -> None:
    stage.engines["b"].die()
    await stage.until(lambda: stage.verdict("b") is Verdict.DOWN, PROMISE_S)
    crowd = stage.crowd(8)
    await asyncio.sleep(0.5)
    stage.engines["b"].restart()
    stage.engines["a"].die()
    assert all(visit.is_answered and visit.unit == "b" for visit in await crowd)


@played(Stage, units=4)
async def test_when_the_unit_dies_that_holds_what_everybody_asks_each_request_fails_once_at_most(
    stage: Stage,
) -> None:
    async def ask(number: int) -> None:
        messages = [{"role": "system", "content": SHARED}, {"role": "user", "content": f"{number}"}]
        visit = await stage.ask(messages=messages, max_tokens=8)
        assert visit.is_answered

    await ask(0)
    (owner,) = {visit.unit for visit in stage.visits}
    assert owner is not None
    for number in range(1, 5):
        await ask(number)
    assert len(stage.picks(owner)) >= 4, "it stays where it is cached"
    waiting = [asyncio.ensure_future(ask(number)) for number in range(5, 69)]
    await asyncio.sleep(0.01)
    stage.engines[owner].die()
    await asyncio.gather(*waiting)
    homes = {pick.unit for pick in stage.gate.router.picks} - {owner}
    assert len(homes) > 1, "by load, and not all to one"
    assert max(record.attempts for record in stage.gate.records) <= 2


@pytest.mark.parametrize("warm", [False, True], ids=["the first large prompt", "one like it was seen"])
@played(Stage, 1, timing=CHUNKED)
async def test_a_wedge_under_a_large_prompt_is_found_sooner_once_one_like_it_was_seen(
    stage: Stage, warm: bool
) -> None:
    users = Users(stage, 32)
    await asyncio.sleep(15.0)
    stage.gate.set_drain("b", drained=True)
    if warm:
        for _ in range(4):
            await stage.ask(prompt_tokens=100_000, max_tokens=4)
    large = asyncio.ensure_future(stage.ask(prompt_tokens=100_000, max_tokens=4))
    await asyncio.sleep(0.3)
    stage.gate.set_drain("b", drained=False)
    await asyncio.sleep(1.0)
    stage.engines["a"].behaviour.wedged = True
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, 3.0 if warm else 90.0)
    await users.leave()
    assert (await large).is_answered
    assert stage.flips("b") == ["up"]


# -- leaders that restart faster than anybody looks: no process gets anybody before its canary ---------


@pytest.mark.parametrize("seed", seeds(range(6)))
@played(Stage, given=("seed",), timing=STEPS)
async def test_a_unit_that_restarts_while_it_is_down_starts_once(stage: Stage, seed: int) -> None:
    """Its new epoch is read before it gets users, not after."""
    users = Users(stage, 16)
    await asyncio.sleep(3.0 + seed / 10)
    engine = stage.engines["a"]
    engine.die()
    await asyncio.sleep(1.5)
    engine.start()
    await asyncio.sleep(15.0)
    await users.leave()
    flips = stage.flips("a")
    assert flips[-1] == "up"
    assert flips.count("up") == 2, flips


@pytest.mark.parametrize("seed", seeds(range(3)))
@pytest.mark.parametrize("gap_s", [0.0, 0.3])
@pytest.mark.parametrize("users", [0, 8])
@pytest.mark.parametrize("options", [{}, {"agents": True, "followers": 1}, {"is_blind": True}], ids=str)
@played(
    lambda options, seed: Stage(seed, timing=WARMS_UP, **options),
    given=(
        "options",
        "seed",
    ),
)
async def test_a_leader_that_starts_anew_between_two_probes_gets_nobody_before_a_canary(
    stage: Stage, users: int, gap_s: float
) -> None:
    engine = stage.engines["a"]
    crowd = Users(stage, users)
    await asyncio.sleep(stage.rng.uniform(3.0, 5.0))
    await _restart(stage, gap_s)
    began_at = stage.now
    # Whoever comes in the next two seconds, and had not been there before, is answered.
    asks = []
    for _ in range(40):
        asks.append(asyncio.ensure_future(stage.ask(max_tokens=2)))
        await asyncio.sleep(0.05)
    assert all(visit.is_answered for visit in await asyncio.gather(*asks))
    await stage.until(stage.all_up, BACK_S)
    await crowd.leave()
    served = [one for record in engine.served.values() for one in record]
    first = min((one.arrived_s for one in served if one.arrived_s > began_at), default=began_at)
    canaries = [one.arrived_s for one in engine.canaries if one.arrived_s > began_at]
    assert first == began_at or min(canaries) < first
    assert stage.flips("b") == ["up"]


@pytest.mark.parametrize("seed", seeds(range(3)))
@played(Stage, given=("seed",), timing=WARMS_UP)
async def test_the_same_without_any_connection_that_could_break(stage: Stage) -> None:
    engine = stage.engines["a"]
    await asyncio.sleep(stage.rng.uniform(3.0, 5.0))
    for transport in list(stage.world.net.transports):
        if transport.sock.local == (engine.host, PORT):
            transport.close()
    await asyncio.sleep(0.1)
    engine.restart()
    assert all(visit.is_answered for visit in await stage.crowd(16))
    await stage.until(stage.all_up, BACK_S)


async def _restart(stage: Stage, gap_s: float) -> None:
    engine = stage.engines["a"]
    engine.die()
    if gap_s:
        await asyncio.sleep(gap_s)
    engine.start()
    for node in engine.nodes:
        node.start()


@played(Stage, units=2, timing=STEPS)
async def test_the_event_of_a_unit_that_hangs_tells_what_became_of_its_requests(stage: Stage) -> None:
    crowd = stage.crowd(8, max_tokens=100)
    await asyncio.sleep(1.0)
    late = stage.crowd(8, max_tokens=10, stream=False)
    stage.engines["a"].behaviour.spinning = True
    assert all(visit.is_answered for visit in [*await crowd, *await late])
    (event,) = (each for each in stage.gate.plane.events.last() if each.get("after") == "down")
    assert event["streams"] > 0 < event["leaving"]
    became = {"continued elsewhere": event["streams"], "answered elsewhere": event["leaving"]}
    assert event["became"] == became
