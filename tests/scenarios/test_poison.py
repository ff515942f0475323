"""A query of death: it costs two or three units, no neighbour anything, and then it is refused."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, NamedTuple

import pytest

from cellgate.proxy.config.settings import Poison as PoisonSettings
from cellgate.proxy.config.settings import Timeouts
from cellgate.proxy.control.containment import BANS_A_MINUTE
from cellgate.proxy.request.prompt import read_prompt
from cellgate.router.poison import Ledger
from tests.scenarios.harness import Stage
from tests.scenarios.seeds import crossed, seeds
from tests.scenarios.users import Users
from tests.scenarios.visit import Visit, chat, encode
from tests.sim.chaos import STRIKES, Chaos
from tests.sim.client import Client
from tests.sim.loop import START_S
from tests.sim.poison import MARKER, Mode, Poison
from tests.sim.timing import Timing
from tests.sim.world import played

END_S = 10.0
WEDGED_END_S = 25.0
UNITS = 4
LASTING_S = 30.0
RATE_PER_S = 4.0
DEATHS_MAX = 3
MODES = (Mode.CUT, Mode.CRASH, Mode.LATE, Mode.MID)
DEADLY = [mode for mode in Mode if mode is not Mode.CUT]


class Played(NamedTuple):
    """What came of one seed. `deaths`: the most that a prompt cost; `blamed`: innocents taken for poison.

    `rash`: those of them that were not the only one at their deaths.
    """

    deaths: int
    blamed: int
    rash: int


def poisoned(stage: Stage, mode: Mode) -> Poison:
    """The stage, its engines mortal."""
    poison = Poison(mode)
    for engine in stage.engines.values():
        engine.poison = poison
    return poison


async def drink(stage: Stage, via: Client | None = None, prompt: str = MARKER, **fields: Any) -> Visit:
    """One client asks for it."""
    visit = stage._visit("/v1/chat/completions", body := chat(prompt, **fields))
    headers = {"x-request-id": visit.request_id}
    visit.reply = await (via or stage.client).request("POST", visit.path, encode(body), headers)
    return visit


def play(seed: int) -> Played:
    """Units that are struck at random, one at a time, users, and now and then a client with poison."""
    rng = Random(seed)
    mode = rng.choice(MODES) if seed % 2 else None
    timing = Timing(rng.choice((0.05, 0.5)), max_running=rng.choice((8, 256)))
    stage = Stage(
        seed, UNITS, timing=timing, followers=1, agents=rng.random() < 0.5, timeouts=Timeouts(answer_s=40.0)
    )
    poison = poisoned(stage, mode) if mode is not None else None
    drunk: list[asyncio.Future[Visit]] = []

    async def scenario() -> None:
        chaos = Chaos(stage.world, list(stage.engines.values()), 1, STRIKES, pause_s=(1.0, 10.0))
        visits, due_s = [], stage.now + rng.uniform(1.0, 10.0)
        while stage.now < START_S + LASTING_S:
            tokens, stream = rng.randrange(1, 60), rng.random() < 0.7
            visits.append(asyncio.ensure_future(stage.ask(max_tokens=tokens, stream=stream)))
            if poison is not None and stage.now >= due_s:
                # Another prompt each time: one that is known is refused.
                prompt, due_s = f"{MARKER} {len(drunk)}", stage.now + rng.uniform(8.0, 15.0)
                drunk.append(asyncio.ensure_future(drink(stage, prompt=prompt, stream=stream, max_tokens=99)))
            await asyncio.sleep(rng.expovariate(RATE_PER_S))
        chaos.stop()
        await asyncio.gather(*visits, *drunk)

    stage.play(scenario())
    culprits = {each.result().request_id for each in drunk}
    blamed = [visit for visit in stage.visits if visit.code == "poison_suspected"]
    innocents = [visit for visit in blamed if visit.request_id not in culprits]
    deadly = poison is not None and poison.mode is not Mode.CUT
    kills = [request_id for _, request_id, _ in poison.kills] if poison is not None and deadly else []
    ledger = stage.gate.plane.containment.ledger
    return Played(
        max((kills.count(each) for each in culprits), default=0),
        len(innocents),
        sum(has_company(ledger, visit) for visit in innocents),
    )


def has_company(ledger: Ledger, visit: Visit) -> bool:
    """Whether another prompt had met all deaths for which this one was ended, and had not come past one."""
    assert visit.body is not None
    record = ledger.records[read_prompt(visit.body, encode(visit.body)).fingerprint]
    deaths = [mark.death for mark in record.standing]
    others = [ledger.records.get(each) for each in set.intersection(*(death.died for death in deaths))]
    cleared = [
        any(mark.passed and mark.death in deaths for mark in other.marks)
        for other in others
        if other is not None
    ]
    return len(others) - cleared.count(True) > 1


@pytest.mark.parametrize(("mode", "stream"), crossed(DEADLY, [True, False]))
@played(Stage, units=4)
async def test_poison_costs_three_units_at_most_and_its_neighbours_nothing(
    stage: Stage, mode: Mode, stream: bool
) -> None:
    poison = poisoned(stage, mode)
    users = Users(stage, 6)
    await asyncio.sleep(5.0)
    began_at = stage.now
    visit = await drink(stage, stream=stream, max_tokens=200)
    assert stage.now - began_at < (WEDGED_END_S if mode is Mode.WEDGE else END_S)
    # An engine that says what it died of says it before it is seen to be dead.
    assert visit.code == "poison_suspected" or (mode is Mode.FATAL and visit.code is not None)
    await asyncio.sleep(2.0)
    killed = len(poison.kills)
    again_at = stage.now
    again = await drink(stage, stream=not stream)
    assert (again.reply.status, again.code) == (502, "poison_suspected")
    assert stage.now - again_at < 0.1
    assert len(poison.kills) == killed
    await asyncio.sleep(5.0)
    await users.leave()
    lost = [each for each in users.visits if not each.is_answered]
    assert not lost, [(each.reply.status, each.code) for each in lost]
    assert 1 < len(poison.kills) <= DEATHS_MAX, poison.kills


@pytest.mark.parametrize("stream", [True, False])
@played(Stage, units=4)
async def test_a_prompt_whose_connections_only_break_off_ends_no_unit_and_is_refused_to_nobody(
    stage: Stage, stream: bool
) -> None:
    """The processes live, and what else they have goes on: each of its requests ends after a few tries."""
    poison = poisoned(stage, Mode.CUT)
    users = Users(stage, 6)
    await asyncio.sleep(5.0)
    for asked in (1, 2):
        visit = await drink(stage, stream=stream, max_tokens=200)
        assert (visit.reply.status, visit.code) == (502, "closed_early")
        assert len(poison.kills) <= 6 * asked
    await users.leave()
    assert all(each.is_answered for each in users.visits)
    assert stage.gate.containment.counts["bans"] == 0
    assert stage.all_up()
    poison.marker = "nothing any more"
    assert (await drink(stage, stream=stream)).is_answered


@pytest.mark.parametrize("mode", [Mode.LATE, Mode.FAR])
@played(Stage, units=8)
async def test_a_popular_prompt_that_ends_units_after_a_while_is_still_found(
    stage: Stage, mode: Mode
) -> None:
    """The mirror of restarts under it: each unit dies as its oldest request comes to one point."""
    poison = poisoned(stage, mode)
    users = Users(stage, 6)
    await asyncio.sleep(5.0)
    clients = []
    for _ in range(20):
        clients.append(asyncio.ensure_future(drink(stage, stream=False, max_tokens=900)))
        await asyncio.sleep(1.0)
    assert {visit.code for visit in await asyncio.gather(*clients)} == {"poison_suspected"}
    await users.leave()
    assert all(visit.is_answered for visit in users.visits)
    assert len(poison.kills) <= DEATHS_MAX, poison.kills
    assert stage.gate.containment.counts["bans"] == 1


@pytest.mark.parametrize(
    ("more", "most", "stream"),
    [(0, DEATHS_MAX, True), (19, 8, True), (0, 1 + DEATHS_MAX, False), (19, 8, False)],
)
@played(lambda: Stage(units=8, timing=Timing(step_s=0.2)))
async def test_a_stream_that_ends_a_slow_unit_first_is_still_found_by_its_tokens(
    stage: Stage, more: int, most: int, stream: bool
) -> None:
    """It was computed for longer there than it lives at the others, but came to as many tokens. Of a whole
    answer nobody knows these: three of the others have to die after as long.
    """
    poison = poisoned(stage, Mode.FAR)
    stage.engines["a"].behaviour.slow = 3.0
    for name in stage.engines:
        stage.gate.board.drain(name, drained=name != "a")
    clients = [asyncio.ensure_future(drink(stage, max_tokens=900, stream=stream))]
    await asyncio.sleep(1.0)
    for name in stage.engines:
        stage.gate.board.drain(name, drained=False)
    for _ in range(more):
        clients.append(asyncio.ensure_future(drink(stage, max_tokens=900, stream=stream)))
        await asyncio.sleep(1.0)
    assert {visit.code for visit in await asyncio.gather(*clients)} == {"poison_suspected"}
    assert len(poison.kills) <= most, poison.kills


class Restarts(NamedTuple):
    """Of each unit, one after another, so many `rounds`; `lost`: requests that meet more than they may."""

    tokens: int
    pause_s: float
    lost: int
    rate: float = 25.0
    rounds: int = 1


@pytest.mark.parametrize(
    "restarts",
    [
        Restarts(100, 6.0, 0),
        Restarts(900, 6.0, 8),
        Restarts(900, 3.0, 8),
        pytest.param(Restarts(900, 1.0, 16), marks=pytest.mark.nightly),
        pytest.param(Restarts(900, 3.0, 32, rate=50.0), id="engines have a queue", marks=pytest.mark.nightly),
        pytest.param(Restarts(900, 3.0, 120, rounds=2), id="again and again", marks=pytest.mark.nightly),
    ],
)
@played(Stage, units=4)
async def test_units_restarted_one_after_another_under_one_popular_prompt_ban_it_for_nobody(
    stage: Stage, restarts: Restarts
) -> None:
    """All that an evaluation asks is one prompt; nobody has told the gate of the restarts. No answer of the
    long ones ends between the first restart and the second (the last, where they follow each other faster):
    others of the prompt are further by then, or were where the next unit died.
    """
    clients: list[asyncio.Future[Visit]] = []

    async def ask() -> None:
        while not is_over:
            clients.append(
                asyncio.ensure_future(
                    drink(stage, prompt="a question", stream=False, max_tokens=restarts.tokens)
                )
            )
            await asyncio.sleep(1.0 / restarts.rate)

    is_over = False
    asking = asyncio.ensure_future(ask())
    await asyncio.sleep(5.0)
    for engine in [*stage.engines.values()] * restarts.rounds:
        engine.die()
        await asyncio.sleep(1.0)
        engine.restart()
        await asyncio.sleep(restarts.pause_s)
    is_over = True
    await asking
    visits = await asyncio.gather(*clients)
    assert len(visits) >= restarts.rate * (5 + 4 * restarts.rounds * (1 + restarts.pause_s))
    lost = [visit.code for visit in visits if not visit.is_answered]
    assert "poison_suspected" not in lost
    # An answer that meets three restarts has used up what it may cost.
    assert len(lost) <= restarts.lost, lost
    assert stage.gate.containment.counts["bans"] == 0


@pytest.mark.parametrize("ban_s", [0.0, 5.0])
@played(lambda ban_s: Stage(units=4, poison=PoisonSettings(ban_s)), given=("ban_s",))
async def test_a_ban_lasts_as_long_as_is_configured(stage: Stage, ban_s: float) -> None:
    poison = poisoned(stage, Mode.CRASH)
    assert (await drink(stage)).code == "poison_suspected"
    await asyncio.sleep(ban_s + 1.0)
    await stage.until(stage.all_up, 60.0)
    killed = len(poison.kills)
    await drink(stage)
    assert len(poison.kills) > killed


@played(Stage, units=8)
async def test_fifty_clients_with_one_prompt_cost_no_more_units_than_one(stage: Stage) -> None:
    poison = poisoned(stage, Mode.CRASH)
    users = Users(stage, 6)
    await asyncio.sleep(3.0)
    clients = []
    for _ in range(50):
        clients.append(asyncio.ensure_future(drink(stage)))
        await asyncio.sleep(0.01)
    assert {visit.code for visit in await asyncio.gather(*clients)} == {"poison_suspected"}
    await asyncio.sleep(5.0)
    await users.leave()
    assert all(visit.is_answered for visit in users.visits)
    assert len(poison.kills) <= DEATHS_MAX, poison.kills


@played(Stage, units=4)
async def test_a_unit_that_dies_of_whatever_it_gets_has_nobody_blamed(stage: Stage) -> None:
    stage.engines["a"].poison = Poison(Mode.CRASH, marker="prompt")
    users = Users(stage, 6)
    await asyncio.sleep(40.0)
    await users.leave()
    assert all(visit.is_answered for visit in users.visits)
    assert len(stage.engines["a"].poison.kills) > 1
    assert stage.gate.containment.counts["ended"] == stage.gate.containment.counts["bans"] == 0


@played(Stage, units=4)
async def test_where_all_units_die_of_whatever_they_get_requests_end_honestly_and_few_prompts_are_refused(
    stage: Stage,
) -> None:
    """A bad rollout: their canaries are answered, and no request is."""
    for engine in stage.engines.values():
        engine.poison = Poison(Mode.CRASH, marker="prompt")
    users = Users(stage, 6)
    await asyncio.sleep(30.0)
    await users.leave()
    assert not any(visit.is_answered for visit in users.visits)
    assert stage.gate.containment.counts["bans"] <= BANS_A_MINUTE


@pytest.mark.parametrize("seed", seeds([3, 5, 7, 11, 21, 53]))
def test_among_random_faults_no_prompt_costs_more_than_three_units(seed: int) -> None:
    played = play(seed)
    assert played.deaths <= DEATHS_MAX
    assert played.rash == 0
    # Who is alone at two deaths, one of which was another fault, cannot be told from poison: five or six
    # innocents in 120 runs, of some 14,000 requests.
    assert played.blamed <= 2


@pytest.mark.parametrize("seed", [2, 4])
def test_among_random_faults_without_poison_nobody_is_blamed(seed: int) -> None:
    assert play(seed).blamed == 0
