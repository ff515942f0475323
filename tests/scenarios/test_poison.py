"""A query of death: it costs two or three units, no neighbour anything, and then it is refused."""

from __future__ import annotations

import asyncio

import pytest

from cellgate.proxy.config.settings import Poison as PoisonSettings
from cellgate.proxy.control.containment import BANS_A_MINUTE
from tests.scenarios.gates import GatesStage
from tests.scenarios.harness import Stage
from tests.scenarios.poisoned import DEATHS_MAX, drink, play, poisoned
from tests.scenarios.seeds import crossed, seeds
from tests.scenarios.users import Users
from tests.sim.poison import Mode, Poison

END_S = 10.0
WEDGED_END_S = 25.0


@pytest.mark.parametrize(("mode", "stream"), crossed(Mode, [True, False]))
def test_poison_costs_three_units_at_most_and_its_neighbours_nothing(mode: Mode, stream: bool) -> None:
    stage = Stage(units=4)
    poison = poisoned(stage, mode)

    async def scenario() -> None:
        users = Users(stage, 12)
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

    stage.play(scenario())
    assert 1 < len(poison.kills) <= DEATHS_MAX, poison.kills


def test_what_one_gate_has_found_out_no_other_one_sends_and_who_clears_it_clears_it_for_all() -> None:
    stage = GatesStage(1, 4)
    poison = poisoned(stage, Mode.CRASH)

    async def scenario() -> None:
        await stage.until(stage.all_up, 10.0)
        await asyncio.sleep(2.0)
        first, second = stage.alive.values()
        visit = await drink(stage, via=stage.alive_client(0))
        assert visit.code == "poison_suspected"
        killed = len(poison.kills)
        await asyncio.sleep(0.2)
        assert (await drink(stage, via=stage.alive_client(1))).code == "poison_suspected"
        assert len(poison.kills) == killed
        assert second.containment.bans.all()[0].gate
        stage.redis.forget()
        await asyncio.sleep(5.0)
        (ban,) = second.containment.bans.all()
        assert second.containment.lift(ban.fingerprint, "an operator")
        await asyncio.sleep(0.2)
        assert not first.containment.bans.all()
        poison.marker = "nothing any more"
        assert (await drink(stage, via=stage.alive_client(0))).is_answered

    stage.play(scenario())


@pytest.mark.parametrize("ban_s", [0.0, 5.0])
def test_a_ban_lasts_as_long_as_is_configured(ban_s: float) -> None:
    stage = Stage(units=4, poison=PoisonSettings(ban_s))
    poison = poisoned(stage, Mode.CRASH)

    async def scenario() -> None:
        assert (await drink(stage)).code == "poison_suspected"
        await asyncio.sleep(ban_s + 1.0)
        await stage.until(stage.all_up, 60.0)
        killed = len(poison.kills)
        await drink(stage)
        assert len(poison.kills) > killed

    stage.play(scenario())


def test_fifty_clients_with_one_prompt_cost_no_more_units_than_one() -> None:
    stage = Stage(units=8)
    poison = poisoned(stage, Mode.CRASH)

    async def scenario() -> None:
        users = Users(stage, 12)
        await asyncio.sleep(3.0)
        clients = []
        for _ in range(50):
            clients.append(asyncio.ensure_future(drink(stage)))
            await asyncio.sleep(0.01)
        assert {visit.code for visit in await asyncio.gather(*clients)} == {"poison_suspected"}
        await asyncio.sleep(5.0)
        await users.leave()
        assert all(visit.is_answered for visit in users.visits)

    stage.play(scenario())
    assert len(poison.kills) <= DEATHS_MAX, poison.kills


def test_a_unit_that_dies_of_whatever_it_gets_has_nobody_blamed() -> None:
    stage = Stage(units=4)
    stage.engines["a"].poison = Poison(Mode.CRASH, marker="prompt")

    async def scenario() -> None:
        users = Users(stage, 12)
        await asyncio.sleep(60.0)
        await users.leave()
        assert all(visit.is_answered for visit in users.visits)

    stage.play(scenario())
    assert len(stage.engines["a"].poison.kills) > 1
    assert stage.gate.containment.counts["ended"] == stage.gate.containment.counts["bans"] == 0


def test_where_all_units_die_of_whatever_they_get_requests_end_honestly_and_few_prompts_are_refused() -> None:
    """A bad rollout: their canaries are answered, and no request is."""
    stage = Stage(units=4)
    for engine in stage.engines.values():
        engine.poison = Poison(Mode.CRASH, marker="prompt")

    async def scenario() -> None:
        users = Users(stage, 12)
        await asyncio.sleep(50.0)
        await users.leave()
        assert not any(visit.is_answered for visit in users.visits)

    stage.play(scenario())
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
