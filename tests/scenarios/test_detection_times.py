"""What `cellgate check` promises of detection is kept, at whatever moment a unit fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cellgate.proxy.cli.check import kinds, rows
from cellgate.router.nouns import Rules, Verdict
from tests.scenarios.harness import Stage
from tests.scenarios.seeds import seeds
from tests.sim.behaviour import Behaviour
from tests.sim.engine import Engine

RULES = Rules()
REFUSES = "the leader's address refuses connections"
HANGS = "the engine hangs while its processes run"
STOPS = "a process is killed or stopped"


def promised(stage: Stage, fault: str, rules: Rules = RULES) -> tuple[float, float]:
    """The times of a fault, with streams and without, as they would be printed."""
    (kind,) = kinds([state.unit for state in stage.gate.board])
    row = {row.fault: row for row in rows(kind._replace(counts=not stage.is_blind), rules)}[fault]
    return row.busy_s, row.idle_s


def measured_s(stage: Stage, fail: Callable[[Engine], None], *, is_busy: bool) -> float:
    """How long after the fault unit `a` is DOWN."""
    found: list[float] = []

    async def scenario() -> None:
        crowd = stage.crowd(4 if is_busy else 0, max_tokens=500)
        await asyncio.sleep(3.0 + stage.rng.uniform(0.0, 3.0))
        began_at = stage.now
        fail(stage.engines["a"])
        await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, 30.0)
        found.append(stage.now - began_at)
        await crowd

    stage.play(scenario())
    return found[0]


def wedge(engine: Engine) -> None:
    engine.behaviour = Behaviour(wedged=True)


def spin(engine: Engine) -> None:
    engine.behaviour = Behaviour(spinning=True)


def stop_follower(engine: Engine) -> None:
    engine.behaviour = Behaviour(wedged=True)
    engine.nodes[1].stop()


@pytest.mark.parametrize("seed", seeds(range(3)))
@pytest.mark.parametrize(
    ("fault", "fail", "is_blind", "agents"),
    [
        (REFUSES, Engine.die, False, False),
        (HANGS, wedge, False, False),
        (HANGS, spin, False, False),
        (HANGS, wedge, True, False),
        (HANGS, wedge, False, True),
        (STOPS, stop_follower, False, True),
    ],
    ids=["gone", "wedged", "spinning", "wedged, blind", "wedged, with agents", "stopped, with agents"],
)
def test_a_fault_is_found_as_soon_as_promised(
    fault: str, fail: Callable[[Engine], None], is_blind: bool, agents: bool, seed: int
) -> None:
    for is_busy in (True, False):
        stage = Stage(seed, is_blind=is_blind, agents=agents, followers=int(agents))
        found_s = measured_s(stage, fail, is_busy=is_busy)
        assert found_s < promised(stage, fault)[not is_busy]


@pytest.mark.parametrize(
    "rules",
    [Rules(silent_min_s=0.4, canary_timeout_s=0.6, canary_idle_s=0.8), Rules(canary_timeout_s=0.3)],
    ids=["impatient", "of which one overrules the other"],
)
@pytest.mark.parametrize("seed", seeds(range(3)))
def test_other_rules_make_other_promises_that_are_kept(rules: Rules, seed: int) -> None:
    for is_busy in (True, False):
        stage = Stage(seed, rules=rules)
        found_s = measured_s(stage, wedge, is_busy=is_busy)
        assert found_s < promised(stage, HANGS, rules)[not is_busy] < promised(stage, HANGS)[not is_busy]
