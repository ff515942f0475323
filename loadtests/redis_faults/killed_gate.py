"""One of two gates is killed with a hundred streams in flight: how long does the other count them?"""

import asyncio
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from loadtests.client import End, Question
from loadtests.gate import GateProcess, metric_sum
from loadtests.redis_faults.server import RedisServer
from loadtests.simunit.process import SimUnit
from loadtests.users import Users

UNITS = ("a", "b", "c", "d")
STREAMS = 100
"""Through each gate."""
EXPIRY_S = 0.75
_PATIENCE_S = 20.0
_LOOK_S = 0.01
_TIMING = {"step_ms": 50, "prefill_tokens_per_s": 100_000}


async def killed_gate() -> list[str]:
    """Kill it; what must not have been."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drill-")))
        server = stack.enter_context(RedisServer(folder))
        units = await asyncio.to_thread(SimUnit.start_all, UNITS, **_TIMING)
        for unit in units:
            stack.callback(unit.stop)
        killed, other = [GateProcess(units, settings={"redis": server.url}) for _ in range(2)]
        for gate in (killed, other):
            await asyncio.to_thread(stack.enter_context, gate)
        users = Users(other.url, STREAMS, _question, seed=1)
        async with Users(killed.url, STREAMS, _question, seed=2), users:
            counted = await _until(other, lambda elsewhere: elsewhere >= 0.9 * STREAMS)
            if counted is None:
                return [f"the other gate never counted {STREAMS} requests of the first"]
            killed_at = time.monotonic()
            os.kill(killed.pid, signal.SIGKILL)
            forgotten_at = await _until(other, lambda elsewhere: elsewhere == 0)
        problems = [answer.why() for answer in users.answers if answer.end() is not End.WHOLE][:5]
        if forgotten_at is None:
            return [*problems, "the other gate went on counting the requests of the one that was killed"]
        took_s = forgotten_at - killed_at
        print(
            f"a gate killed with some {STREAMS} requests in flight: the other counted none of them after "
            f"{took_s:.2f} s, and answered all {len(users.answers)} of its own",
            flush=True,
        )
        return problems if took_s <= EXPIRY_S + 2 * _LOOK_S else [*problems, f"that took {took_s:.2f} s"]


async def _until(gate: GateProcess, is_so: Callable[[float], bool]) -> float | None:
    """When the requests that a gate counts elsewhere came to be so; None: never."""
    give_up_at = time.monotonic() + _PATIENCE_S
    while time.monotonic() < give_up_at:
        page = await asyncio.to_thread(gate.metrics)
        if is_so(metric_sum(page, "cellgate_in_flight_elsewhere")):
            return time.monotonic()
        await asyncio.sleep(_LOOK_S)
    return None


def _question(rng: random.Random) -> Question:
    return Question.draw(rng, prompt_tokens=rng.randint(50, 200), max_tokens=rng.randint(60, 120))
