"""What a unit's page tells comes true: in virtual time, at whatever moment it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from cellgate.probes.canary import Canary
from cellgate.probes.runner import JITTER_MAX_S
from cellgate.proxy.admin.views import status, unit_page
from cellgate.router.known_answers import KnownAnswerRules
from tests.scenarios.harness import LATENCY_S, Stage
from tests.scenarios.seeds import seeds
from tests.scenarios.test_slow_engines import DEGRADED_LIMIT_S, TIMING, USERS, long_answers
from tests.scenarios.users import Users
from tests.sim import hurt
from tests.sim.behaviour import Behaviour
from tests.sim.node import AGENT_PORT
from tests.sim.world import played


def page(stage: Stage, name: str = "a") -> dict[str, Any]:
    """The page as it goes over the wire."""
    gate, state = stage.gate, stage.gate.board.units[name]
    canary_s = gate.prober.due_s(name, Canary.name, stage.now)
    shown: dict[str, Any] = orjson.loads(orjson.dumps(unit_page(state, gate.board, stage.now, canary_s)))
    for line in shown["why"]:
        assert line.endswith("."), line
        assert "\n" not in line
        assert "None" not in line
    return shown


@pytest.mark.parametrize("seed", seeds(range(3)))
@played(Stage, given=("seed",), known_answer=KnownAnswerRules(every_s=0.0))
async def test_a_canary_comes_when_it_was_told_to(stage: Stage) -> None:
    for _ in range(10):
        await asyncio.sleep(stage.rng.uniform(0.5, 3.0))
        canaries = stage.engines["a"].canaries
        due_s, before = page(stage)["next_canary_s"], len(canaries)
        if due_s:
            await asyncio.sleep(due_s - JITTER_MAX_S - 0.01)
            assert len(canaries) == before, "it came too soon"
            await asyncio.sleep(JITTER_MAX_S + LATENCY_S)
            assert len(canaries) == before + 1, "it is late"


# Six faults: the first lines of `cellgate why`, and the rows of `cellgate units` and of the page, name the
# present cause, and what helps. On real processes: tests/browser/test_present_cause.py.


def _slow(stage: Stage) -> None:
    stage.engines["a"].behaviour.slow = 2.0


def _hang(stage: Stage) -> None:
    stage.engines["a"].behaviour = Behaviour(wedged=True)


def _refused(stage: Stage) -> None:
    stage.engines["a"].behaviour = Behaviour(error_rate=1.0, error_status=401)


def _leader_killed(stage: Stage) -> None:
    hurt.kill(stage.engines["a"], 0)


def _follower_stopped(stage: Stage) -> None:
    hurt.stop(stage.engines["a"], 1)


def _agent_gone(stage: Stage) -> None:
    stage.world.net.kill(f"{stage.engines['a'].nodes[1].host}:{AGENT_PORT}")


FAULTS: dict[Callable[[Stage], None], tuple[str, str, str, str]] = {
    _slow: ("up", "slow", "slow: a token takes ", "compare clocks, temperatures and links"),
    _hang: ("down", "", "no token within ", "check its engine's log (http://a:8000); if it hangs"),
    _refused: ("down", "", "refuses what other units serve: 401 (", "compare its key"),
    _leader_killed: ("down", "", "the worker is gone (source agent, node a)", "check node a: "),
    _follower_stopped: ("down", "", "the worker is stopped (source agent, node a-1)", "check node a-1: "),
    _agent_gone: ("up", "node not watched", "agent a-1:9911 unreachable", "start the agent of node a-1"),
}


def row(stage: Stage, name: str = "a") -> dict[str, Any]:
    """What the status page gets of a unit."""
    shown = status(stage.gate.board, stage.now, waiting=0, stopping=False)
    return next(unit for unit in shown["units"] if unit["name"] == name)


@pytest.mark.parametrize("fault", FAULTS)
@played(Stage, timing=TIMING, agents=True, followers=1)
async def test_the_present_cause_and_what_helps_come_first(
    stage: Stage, fault: Callable[[Stage], None]
) -> None:
    verdict, besides, reason, advice = FAULTS[fault]

    def is_told() -> bool:
        shown = row(stage)
        return (shown["verdict"], shown["besides"]) == (verdict, besides) and shown["reason"].startswith(
            reason
        )

    users = Users(stage, USERS // 2, long_answers)
    await asyncio.sleep(15.0)
    assert (row(stage)["besides"], row(stage)["advice"]) == ("", "")
    fault(stage)
    await stage.until(is_told, DEGRADED_LIMIT_S)
    for later_s in (0.0, 30.0):
        await asyncio.sleep(later_s)
        assert is_told(), row(stage)
        assert row(stage)["advice"].startswith(advice), row(stage)["advice"]
        assert page(stage)["reason"] == row(stage)["reason"]
        assert reason.partition(" (source")[0] in page(stage)["why"][0]
    await users.leave()
