"""Engines whose first tokens are late for another reason than prefill are not taken to be slow.

Each prompt takes half a second before its prefill begins, however many there are; then 50,000 tokens are
computed in a second. Who took the half second for work would send such an engine a prompt at a time, learn
from that how slow it is, and refuse what it could have answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.scenarios.harness import Stage
from tests.scenarios.users import Users
from tests.sim.timing import Timing
from tests.sim.world import played

LATE = Timing(prefill_s=0.5, prefill_tokens_per_s=50_000.0)
PROMPT_TOKENS = 1000
BURST = 200
BURST_S = LATE.prefill_s + BURST * PROMPT_TOKENS / LATE.prefill_tokens_per_s
"""One of the two units alone would need so long for all of a burst, were its steps for nothing."""
WORLDS = range(1, 6)


def alike(rng: Random) -> dict[str, Any]:
    """Nothing can be told from the lengths of these."""
    return {"prompt_tokens": PROMPT_TOKENS, "max_tokens": 4, "stream": True}


def mixed(rng: Random) -> dict[str, Any]:
    return {"prompt_tokens": rng.randrange(100, 4000), "max_tokens": 4, "stream": True}


async def burst_s(stage: Stage, deadline_s: float) -> float:
    """Send a burst; when the last of its first tokens came. None is refused."""
    headers = {"x-slo-ttft-ms": str(int(1000 * deadline_s))}
    asks = [stage.ask(headers=headers, **alike(stage.rng)) for _ in range(BURST)]
    visits = await asyncio.gather(*asks)
    assert [visit.reply.status for visit in visits] == [200] * BURST
    return max(visit.reply.event_times_s[0] - visit.reply.sent_s for visit in visits)


@pytest.mark.parametrize(
    ("users", "draw"),
    [
        (1, mixed),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((1, alike), (6, alike), (6, mixed))),
    ],
)
def test_a_burst_after_a_quiet_time_is_neither_refused_nor_held_back(
    draw: Callable[[Random], dict[str, Any]], users: int
) -> None:
    """In all worlds but one at most: two equal units get about half of the burst each, however little has
    been seen of them before.
    """
    took_s = []
    for seed in WORLDS:
        stage = Stage(seed=seed, units=2, timing=LATE)

        async def scenario(stage: Stage = stage) -> None:
            quiet = Users(stage, users, draw)
            await asyncio.sleep(60.0)
            await quiet.leave()
            took_s.append(await burst_s(stage, deadline_s=2.0 * BURST_S))

        stage.play(scenario())
    assert sorted(took_s)[-2] < 0.75 * BURST_S, took_s


@played(Stage, units=1, timing=LATE)
async def test_what_is_learnt_in_a_crowd_does_not_sink_when_it_is_quiet(stage: Stage) -> None:
    crowded_s = await burst_s(stage, deadline_s=60.0)
    rates = stage.gate.board.units["a"].costs.rates
    learnt = rates.prefill_tokens_s.value
    quiet = Users(stage, 1, alike)
    await asyncio.sleep(60.0)
    await quiet.leave()
    assert rates.prefill_tokens_s.value > 0.8 * learnt
    assert rates.latency.value == pytest.approx(LATE.prefill_s, rel=0.1)
    assert await burst_s(stage, deadline_s=2.0 * BURST_S) < 1.1 * crowded_s
