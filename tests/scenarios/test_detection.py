"""Each fault is found in time, costs no request that had shown no token, and no healthy unit its place."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from cellgate.router.nouns import Verdict
from tests.scenarios.harness import Stage
from tests.scenarios.users import Users
from tests.scenarios.visit import Visit
from tests.sim.engine import Engine
from tests.sim.hurt import kill, stop, stop_core
from tests.sim.timing import Timing

STREAMS = 32
FOLLOWERS = 2
TIMING = Timing(step_s=0.05, prefill_tokens_per_s=100_000.0, chunk_tokens=8192)
"""Light enough for one unit alone: who waits for a token after a move waits for the gate, not for a unit."""
WAIT_LIMIT_S = 1.0
"""After detection, for whoever had shown no token."""
SETTLE_S = (2.0, 4.0)
GIVE_UP_S = 20.0
SEEDS = range(1, 8)
SEEDS_IN_EVERY_RUN = {"load": 1, "idle": 3}
HIDDEN_S = 18.0
"""Of an idle unit whose address goes on answering: until its next canary, and the one that confirms it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`limit_s`: to DOWN with agents (None: no agent sees it), without under load, idle. `keepalive_s`: the
    engine sends comments that often, before and after.
    """

    hurt: Callable[[Stage, Engine], None]
    limit_s: tuple[float | None, float, float]
    keepalive_s: float | None = None


def _behave(**fields: object) -> Callable[[Stage, Engine], None]:
    def hurt(_: Stage, engine: Engine) -> None:
        for name, value in fields.items():
            setattr(engine.behaviour, name, value)

    return hurt


def _follower(stage: Stage) -> int:
    return stage.rng.randint(1, FOLLOWERS)


def _cut_off(stage: Stage, engine: Engine) -> None:
    stage.world.net.partition(engine.address)


FAULTS = {
    "kill leader": Fault(lambda _, engine: kill(engine, 0), (0.3, 1.0, 5.0)),
    "kill follower": Fault(lambda stage, engine: kill(engine, _follower(stage)), (0.3, 1.0, HIDDEN_S)),
    "freeze leader": Fault(lambda _, engine: stop(engine, 0), (0.5, 3.0, 5.0)),
    "freeze engine core": Fault(lambda _, engine: stop_core(engine), (0.5, 3.0, HIDDEN_S)),
    "freeze follower": Fault(lambda stage, engine: stop(engine, _follower(stage)), (0.5, 3.0, HIDDEN_S)),
    "spin": Fault(_behave(spinning=True), (None, 3.0, HIDDEN_S)),
    "dropped link": Fault(_behave(wedged=True), (None, 3.0, HIDDEN_S)),
    "frozen behind comments": Fault(_behave(wedged=True), (None, 3.0, HIDDEN_S), keepalive_s=0.5),
    "leader cut off": Fault(_cut_off, (None, 3.0, 5.0)),
}
CASES = [
    pytest.param(name, agents, load, seed, marks=() if number < in_every_run else pytest.mark.nightly)
    for name, fault in FAULTS.items()
    for agents in ((True, False) if fault.limit_s[0] is not None else (False,))
    for load, in_every_run in SEEDS_IN_EVERY_RUN.items()
    for number, seed in enumerate(SEEDS)
]


@pytest.mark.parametrize(("name", "agents", "load", "seed"), CASES)
def test_a_fault_is_found_in_time_and_loses_nothing(name: str, agents: bool, load: str, seed: int) -> None:
    fault = FAULTS[name]
    with_agents_s, load_s, idle_s = fault.limit_s
    limit_s = with_agents_s if agents and with_agents_s is not None else load_s if load == "load" else idle_s
    stage = Stage(seed, timing=TIMING, followers=FOLLOWERS, agents=agents)

    async def scenario() -> None:
        hurt = stage.engines["a"]
        hurt.behaviour.keepalive_s = fault.keepalive_s
        users = Users(stage, STREAMS if load == "load" else 0)
        await asyncio.sleep(stage.rng.uniform(*SETTLE_S))
        hurt_at = stage.now
        fault.hurt(stage, hurt)
        await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, GIVE_UP_S)
        down_at = stage.gate.board.units["a"].case.since
        await asyncio.sleep(WAIT_LIMIT_S)
        await users.leave()
        assert down_at - hurt_at <= limit_s
        # Who waited for the hurt unit may show no token before it is found out: then it comes to the other.
        waiting = [v for v in stage.visits if v.reply.sent_s <= down_at and not _first_s(v) <= down_at]
        assert max((_first_s(visit) - down_at for visit in waiting), default=0.0) <= WAIT_LIMIT_S
        lost = [v for v in stage.visits if not v.is_answered and (v.unit != "a" or not v.reply.events)]
        assert [(visit.request_id, visit.reply.status, visit.code) for visit in lost] == []

    stage.play(scenario())
    assert stage.flips("b") == ["up"]


def _first_s(visit: Visit) -> float:
    """When its first token came; infinite when none did."""
    return visit.reply.event_times_s[0] if visit.reply.event_times_s else math.inf
