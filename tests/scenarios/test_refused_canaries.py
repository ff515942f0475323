"""A canary that is refused speaks of the gate's own request first: its key may be old."""

from __future__ import annotations

import asyncio

import pytest

from cellgate.router.nouns import Verdict
from tests.scenarios.harness import Stage
from tests.sim.behaviour import Behaviour
from tests.sim.engine import CANARY
from tests.sim.http_server import Request
from tests.sim.odd import KINDS, Asked, Odd
from tests.sim.world import played


def refuse_canaries(stage: Stage, names: str, status: str = "401") -> None:
    """These engines have a new key, which the clients have and the gate has not."""

    def oddly(request: Request) -> Odd | None:
        is_canary = request.headers.get("x-request-id", "").startswith(CANARY)
        return KINDS[status](Asked(False, 1, stage.rng)) if is_canary else None

    for name in names:
        stage.engines[name].behaviour = Behaviour(oddly=oddly)


@pytest.mark.parametrize("units", [1, 3])
@pytest.mark.parametrize("pause_s", [0.2, 20.0])
@played(Stage, given=("units",))
async def test_units_that_refuse_canaries_and_serve_users_all_stay(
    stage: Stage, units: int, pause_s: float
) -> None:
    refuse_canaries(stage, "abc"[:units])
    until = stage.now + 60.0
    while stage.now < until:
        assert (await stage.ask(max_tokens=4)).is_answered
        await asyncio.sleep(pause_s)
    assert not stage.shots()
    told = stage.told("canary_refused")
    assert told or pause_s < 1.0
    assert all("gate's own key" in event["line"] for event in told)


@played(Stage, units=3)
async def test_an_idle_unit_that_alone_refuses_canaries_is_out(stage: Stage) -> None:
    refuse_canaries(stage, "b")
    await stage.until(lambda: stage.verdict("b") is Verdict.DOWN, 40.0)
    assert all("b: " in shot for shot in stage.shots())
