"""Units that are equals stay, whatever is asked and answered; one that is worse goes, and comes back.

A handful of the scenes of tests/scenarios/equals.py, which plays any number of them.
"""

from __future__ import annotations

import asyncio
from random import Random
from statistics import fmean

import pytest

from cellgate.router.nouns import Verdict
from tests.extras import needs
from tests.scenarios.equals import Played, Scene, Unit, check, check_mirror
from tests.scenarios.harness import Stage
from tests.sim.behaviour import Behaviour

EQUALS = (4, 73)
"""A line again and again, and nothing at all: to clients, and to canaries as well."""
MORE = (("a grammar fails", 2), ("thinks in silence", 4))
"""Whole ones, each refused after 0.8 s: nothing moves, and nobody waits; and 25 s of nothing."""
WORSE = (0, 1, 2, 3, 6, 7, 9)


@pytest.mark.parametrize("seed", EQUALS)
def test_equals_are_never_told_apart(seed: int) -> None:
    _, problems, _ = check(seed)
    assert problems == []


@pytest.mark.parametrize(("kind", "seed"), MORE)
def test_equals_are_not_told_apart_by_answers_of_newer_engines(kind: str, seed: int) -> None:
    assert Played(Scene(seed, kind, 0.0, 3, "one", 0.0, 12, 0.5)).problems() == []


@pytest.mark.parametrize("seed", WORSE)
def test_a_unit_that_answers_worse_by_half_goes_and_comes_back(seed: int) -> None:
    _, problems, _ = check_mirror(seed)
    assert problems == []


def flipping(seed: int, *chances: float) -> Stage:
    """Idle units that say one line again and again, to the known prompt as well, each by its own chance."""
    stage, rng = Stage(seed, units=len(chances)), Random(seed)
    for engine, chance in zip(stage.engines.values(), chances, strict=True):
        unit = Unit(Scene(seed, "a line", chance, len(chances), "many", 0.0, 0, 0.0), rng)
        unit.at_canaries = True
        engine.behaviour = Behaviour(oddly=unit)
    return stage


@needs("answers")
@pytest.mark.parametrize("seed", [1, 2])
def test_known_answers_of_units_that_do_not_agree_with_themselves_prove_nothing(seed: int) -> None:
    stage = flipping(seed, *[0.5] * 5)
    stage.play(asyncio.sleep(400.0))
    assert all(engine.odd_served for engine in stage.engines.values())
    assert stage.shots() == []


@needs("answers")
@pytest.mark.parametrize("chance", [0.5, 1.0])
def test_a_unit_whose_known_answers_differ_more_often_than_those_of_others_goes(chance: float) -> None:
    stage = flipping(1, 0.0, chance, 0.0, 0.0)

    async def scenario() -> None:
        await stage.until(lambda: stage.verdict("b") is Verdict.DOWN, 600.0)

    stage.play(scenario())
    assert all(shot.startswith("b: up -> down, wrong answers") for shot in stage.shots())


@pytest.mark.parametrize("streams", [0.0, 1.0])
def test_what_the_only_unit_aborts_is_shown_as_it_is(streams: float) -> None:
    """Nobody else could serve it: its client gets the unit's own answer, and no 503."""
    played = Played(Scene(3, "aborted", 1.0, 1, "many", streams, 4, 0.0))
    assert {visit.unit for visit in played.visits} == {"a"}
    assert played.shots == []


@pytest.mark.parametrize(
    ("kind", "units", "seeds"),
    [("head late", 5, (17, 19, 21)), ("in bursts", 3, (5, 7, 9)), ("a pause", 3, (10, 12, 14))],
)
def test_no_equal_stands_idle_for_long_because_a_request_took_long(
    kind: str, units: int, seeds: tuple[int, ...]
) -> None:
    """Some take long; whose turn it was is chance. It was half of the time."""
    played = [Played(Scene(seed, kind, 0.3, units, "many", 0.5, 12, 0.0)) for seed in seeds]
    assert fmean(each.idle for each in played) < 0.25
    assert [each.problems() for each in played] == [[]] * len(seeds)


@pytest.mark.parametrize(("units", "chance", "seed"), [(3, 0.1, 1)])
def test_no_equal_stands_idle_because_it_has_failed_as_others_do(
    units: int, chance: float, seed: int
) -> None:
    played = Played(Scene(seed, "500", chance, units, "many", 0.5, 12, 0.0))
    assert played.idle < 0.1
    assert played.shots == []


@pytest.mark.parametrize("more", [0.5, 0.9])
def test_one_that_fails_more_often_than_others_that_fail_as_well_gets_hardly_anything(more: float) -> None:
    """It answers at once, so it looks the least loaded of all."""
    played = Played(Scene(1, "500", 0.1, 3, "many", 0.5, 12, 0.0), more=more)
    late = {name: len(played.stage.picks(name, since=5.0)) for name in played.stage.engines}
    assert late["b"] < 0.1 * sum(late.values())
