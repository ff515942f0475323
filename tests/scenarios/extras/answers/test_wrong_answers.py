"""Units that answer quickly and wrongly: only these go, and only where it is proven."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from cellgate.router.known_answers import KnownAnswerRules
from cellgate.router.nouns import Verdict
from cellgate.router.unit_state import UnitState
from tests.scenarios.harness import BACK_S, Stage
from tests.scenarios.seeds import seeds
from tests.scenarios.test_continuation import LONG
from tests.scenarios.users import Users
from tests.sim.behaviour import Behaviour, Break
from tests.sim.world import played

EVERY_S = KnownAnswerRules().every_s
FOUND_S = EVERY_S + 15.0
OTHERS = Behaviour(weights="other ")


def down(stage: Stage) -> list[str]:
    """The units that have ever been down."""
    return [name for name in stage.engines if "down" in stage.flips(name)]


def told(stage: Stage, kind: str) -> list[str]:
    """The units of the events of a kind."""
    return [event["unit"] for event in stage.told(kind)]


def test_of_three_units_the_one_with_other_weights_goes_within_three_answers_and_does_not_return() -> None:
    stage = Stage(units=3)
    stage.engines["c"].behaviour = OTHERS

    async def scenario() -> None:
        await stage.until(lambda: stage.verdict("c") is Verdict.DOWN, FOUND_S)
        assert 2 <= len(stage.engines["c"].known) <= 3
        await asyncio.sleep(300.0)
        assert stage.flips("c")[-1] == "down"
        stage.engines["c"].behaviour = Behaviour()
        await stage.until(lambda: stage.verdict("c") is Verdict.UP, BACK_S)

    stage.play(scenario(), until_up=False)
    assert down(stage) == ["c"]
    flip = next(event for event in stage.gate.events.last() if event.get("after") == "down")
    assert flip["reason"].startswith("wrong answers: a, b agree on another answer; it says ' ")


def two_that_differ() -> Stage:
    stage = Stage(units=2)
    stage.engines["b"].behaviour = OTHERS
    return stage


@played(two_that_differ)
async def test_two_units_that_never_agreed_both_stay_and_it_is_told_once(stage: Stage) -> None:
    await stage.until(lambda: sorted(told(stage, "answers_differ")) == ["a", "b"], FOUND_S)
    assert max(len(engine.known) for engine in stage.engines.values()) <= 4
    await asyncio.sleep(600.0)
    assert down(stage) == []
    assert sorted(told(stage, "answers_differ")) == ["a", "b"]


@played(Stage, units=40)
async def test_answers_that_all_agree_are_not_compared_again_and_a_new_one_is(stage: Stage) -> None:
    check, compared = stage.gate.plane.extras["answers"], list[str]()
    group_of: Callable[..., dict[str, UnitState]] = check._group

    def counted(state: UnitState, question: str) -> dict[str, UnitState]:
        compared.append(state.unit.name)
        return group_of(state, question)

    check._group = counted
    await asyncio.sleep(6 * EVERY_S)
    assert len(compared) == 1, "the first answer of all"
    compared.clear()
    assert all(check.counts[name]["same"] >= 4 for name in stage.engines)
    stage.engines["c"].behaviour = OTHERS
    await stage.until(lambda: stage.verdict("c") is Verdict.DOWN, FOUND_S)
    assert down(stage) == ["c"]


@played(Stage, units=2)
async def test_of_two_units_the_one_whose_weights_change_without_a_restart_goes(stage: Stage) -> None:
    await asyncio.sleep(EVERY_S)
    stage.engines["a"].behaviour = OTHERS
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, FOUND_S)
    await asyncio.sleep(120.0)
    assert down(stage) == ["a"]


@played(Stage, units=1)
async def test_a_unit_alone_stays_and_it_is_told(stage: Stage) -> None:
    await asyncio.sleep(EVERY_S)
    stage.engines["a"].behaviour = OTHERS
    await stage.until(lambda: told(stage, "answers_differ") == ["a"], FOUND_S)
    stage.engines["a"].behaviour = Behaviour()
    await stage.until(lambda: told(stage, "answers_agree") == ["a"], FOUND_S)
    assert down(stage) == []


@played(Stage, units=3)
async def test_an_answer_that_changes_everywhere_at_midnight_takes_nobody_out(stage: Stage) -> None:
    await asyncio.sleep(EVERY_S)
    for engine in stage.engines.values():
        engine.behaviour = OTHERS
    await asyncio.sleep(10 * EVERY_S)
    assert down(stage) == told(stage, "answers_differ") == []


@pytest.mark.parametrize("is_good", [True, False], ids=["good weights", "the same bad weights"])
@played(Stage, units=3)
async def test_a_restarted_unit_gets_no_requests_before_it_agrees_with_the_others(
    stage: Stage, is_good: bool
) -> None:
    await asyncio.sleep(EVERY_S)
    stage.engines["c"].behaviour = OTHERS
    await stage.until(lambda: stage.verdict("c") is Verdict.DOWN, FOUND_S)
    stage.engines["c"].restart()
    stage.engines["c"].behaviour = Behaviour() if is_good else OTHERS
    await asyncio.sleep(BACK_S)
    assert (stage.verdict("c") is Verdict.UP) is is_good
    assert stage.flips("c").count("up") == 1 + is_good
    assert down(stage) == ["c"]


@pytest.mark.nightly
@played(Stage, units=3)
async def test_ten_minutes_of_busy_healthy_units_give_no_false_alarm(stage: Stage) -> None:
    users = Users(stage, 6)
    for _ in range(10):
        await asyncio.sleep(30.0)
        await users.leave()
        await asyncio.sleep(30.0)
        users = Users(stage, 6)
    await users.leave()
    assert down(stage) == told(stage, "answers_differ") == []
    counts = stage.gate.plane.extras["answers"].counts
    assert all(counts[name]["same"] >= 5 and not counts[name]["differs"] for name in stage.engines)


@pytest.mark.parametrize("seed", seeds(range(40)))
def test_never_more_than_the_wrong_units_are_taken_out(seed: int) -> None:
    """A minority gets other weights, each its own and at any moment, some for a while; some units restart."""
    rng = Random(seed)
    stage = Stage(seed, units=rng.randint(2, 7))
    size = len(stage.engines)
    wrong = rng.sample(sorted(stage.engines), rng.randint(1, max(1, (size - 1) // 2)))

    async def spoil(name: str) -> None:
        await asyncio.sleep(rng.uniform(0.0, 200.0))
        stage.engines[name].behaviour = Behaviour(weights=f"{name} ")

    async def scenario() -> None:
        spoiling = [asyncio.ensure_future(spoil(name)) for name in wrong]
        await asyncio.sleep(rng.uniform(0.0, 200.0))
        others = sorted(stage.engines.keys() - set(wrong))
        if size > 3 and 2 * (len(others) - 1) > size:
            stage.engines[others[0]].restart()
        await asyncio.gather(*spoiling)
        await asyncio.sleep(4 * EVERY_S)

    stage.play(scenario())
    reasons = {
        event["unit"]
        for event in stage.gate.events.last()
        if event.get("after") == "down" and event["source"] == "known_answer"
    }
    assert reasons <= set(wrong)
    odd = {name for name, state in stage.gate.board.units.items() if state.has_odd_answers()}
    assert odd >= set(wrong), "each of them is found"
    if size > 2:
        assert reasons == set(wrong)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("builds", [("x", "x"), ("x", "y"), ("x", ""), ("", "")])
def test_a_stream_is_resumed_only_by_its_own_build_unless_it_is_configured(
    builds: tuple[str, str], across: bool
) -> None:
    stage = Stage(units=2, continue_across_builds=across)
    for engine, build in zip(stage.engines.values(), builds, strict=True):
        engine.behaviour = Behaviour(fingerprint=build)

    async def scenario() -> None:
        crowd = stage.crowd(8, **LONG)
        await asyncio.sleep(0.5)
        stage.engines["a"].behaviour.breaks = Break.TRUNCATE
        await crowd

    stage.play(scenario())
    is_resumed = across or builds[0] == builds[1]
    assert set(stage.continuations()) == {"continued" if is_resumed else "no_unit"}
    assert bool(stage.told("drift")) is (set(builds) == {"x", "y"})
