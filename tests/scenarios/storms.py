"""What looks like trouble and is none: phases of load in which no verdict may change.

`python -m tests.scenarios.storms --minutes 10 --seeds 3` keeps two healthy units full while the phases take
turns, with long prompts computed in chunks and as a whole. The exit code is 1 when a verdict changes.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from random import Random
from typing import Any

from tests.scenarios.harness import CHAT, Stage
from tests.scenarios.users import Users
from tests.scenarios.visit import encode
from tests.sim.behaviour import Behaviour
from tests.sim.client import Manner
from tests.sim.timing import Timing

STREAMS = 64
PHASE_S = 20.0
CHUNKED = Timing(step_s=0.05, prefill_tokens_per_s=20_000.0, chunk_tokens=2048, max_running=48)
WHOLE = Timing(step_s=0.05, prefill_tokens_per_s=20_000.0, chunk_tokens=0, max_running=48)
"""A prompt of 100k tokens is computed in one step of 5 s, in which nothing moves."""

BURST = 150
BURST_EVERY_S = 5.0
LONG_TOKENS = 100_000
LONG_AT_ONCE = 3
LATE_S = 5.0
BAD_PER_S = 100
SLOW_CLIENTS = 32

Phase = Callable[[Stage, float], Awaitable[object]]


async def bursts(stage: Stage, seconds: float) -> None:
    """Many requests in the same instant, again and again."""
    for _ in range(math.ceil(seconds / BURST_EVERY_S)):
        crowd = stage.crowd(BURST, prompt_tokens=stage.rng.randrange(50, 500))
        await asyncio.sleep(BURST_EVERY_S)
        await crowd


async def long_prompts(stage: Stage, seconds: float) -> None:
    """Prompts of 100k tokens, a few at a time, streamed and not."""

    def draw(rng: Random) -> dict[str, Any]:
        return {"prompt_tokens": LONG_TOKENS, "max_tokens": 4, "stream": rng.random() < 0.5}

    users = Users(stage, LONG_AT_ONCE, draw)
    await asyncio.sleep(seconds)
    await users.leave()


async def queues_full(stage: Stage, seconds: float) -> None:
    """One unit refuses everybody with 503 and the other with 429: they are full of other people's work."""
    for engine, status in zip(stage.engines.values(), (503, 429), strict=True):
        engine.behaviour = Behaviour(busy_status=status)
    await asyncio.sleep(seconds)


async def short_queues(stage: Stage, seconds: float) -> None:
    """Few may wait at each unit, and more users come than have a place."""
    for engine in stage.engines.values():
        engine.max_waiting = 4
    users = Users(stage, STREAMS)
    await asyncio.sleep(seconds)
    await users.leave()
    for engine in stage.engines.values():
        engine.max_waiting = sys.maxsize


async def late_probes(stage: Stage, seconds: float) -> None:
    """What probes ask is answered after 5 s; generation goes on."""
    for engine in stage.engines.values():
        engine.behaviour = Behaviour(late_s=LATE_S)
    await asyncio.sleep(seconds)


async def storm_of_400(stage: Stage, seconds: float) -> None:
    """Requests that the units refuse as nonsense."""
    nonsense = encode({"model": "tiny", "messages": [{"role": "user"}]})
    storm = []
    for _ in range(math.ceil(seconds * BAD_PER_S)):
        storm.append(asyncio.ensure_future(stage.send("POST", CHAT, nonsense)))
        await asyncio.sleep(1.0 / BAD_PER_S)
    assert {visit.reply.status for visit in await asyncio.gather(*storm)} == {400}


async def slow_clients(stage: Stage, seconds: float) -> None:
    """Clients that read now and then, or not at all until they leave."""
    manners = (
        Manner(read_every_s=2.0, leave_after_s=seconds),
        Manner(read_every_s=math.inf, leave_after_s=seconds),
    )
    crowds = (stage.crowd(SLOW_CLIENTS // 2, manner=manner, max_tokens=400) for manner in manners)
    await asyncio.gather(*crowds)


PHASES: dict[str, Phase] = {
    "bursts": bursts,
    "long prompts": long_prompts,
    "queues full": queues_full,
    "short queues": short_queues,
    "late probes": late_probes,
    "400-storm": storm_of_400,
    "slow clients": slow_clients,
}


def weather(
    seed: int,
    timing: Timing,
    phases: Iterable[Phase] = tuple(PHASES.values()),
    *,
    minutes: float = 0.0,
    phase_s: float = PHASE_S,
    streams: int = STREAMS,
) -> Stage:
    """Let the phases take turns over a full load, once at least; the stage afterwards."""
    stage = Stage(seed, timing=timing)

    async def scenario() -> None:
        users, over_at = Users(stage, streams), stage.now + 60.0 * minutes
        while True:
            for phase in phases:
                await phase(stage, phase_s)
                for engine in stage.engines.values():
                    engine.behaviour = Behaviour()
            if stage.now >= over_at:
                break
        await users.leave()

    stage.play(scenario())
    return stage


def shots(stage: Stage) -> list[str]:
    """The verdicts that should not have changed."""
    return [
        f"{event['unit']}: {event['before']} -> {event['after']}, {event['reason']}"
        for event in stage.gate.events.last()
        if event.get("after") not in (None, "up")
    ]


def main() -> int:
    """Run it; 0 when nobody was shot."""
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.storms", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of virtual time, for each kind of prefill"
    )
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    found = 0
    for name, timing in (("chunked", CHUNKED), ("whole", WHOLE)):
        for seed in range(args.seeds):
            stage = weather(seed, timing, minutes=args.minutes)
            lines = shots(stage)
            found += len(lines)
            ends = Counter(str(visit.reply.status) for visit in stage.visits)
            print(
                f"{name} prefill, seed {seed}: {dict(ends)}, {len(lines)} flips",
                *lines,
                sep="\n  ",
                flush=True,
            )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
