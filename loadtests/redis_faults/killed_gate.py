"""One of two gates is killed with a hundred streams in flight: how long does the other count them?"""

import os
import signal
import time
from contextlib import ExitStack

from loadtests.kit.gate import GateProcess, metric_sum
from loadtests.kit.questions import End, Question
from loadtests.kit.redis_server import redis_server
from loadtests.kit.users import Users
from loadtests.kit.waiting import until
from loadtests.simunit.process import sim_units

UNITS = ("a", "b", "c", "d")
QUESTION = Question.between((50, 200), (60, 120))
STREAMS = 100
"""Through each gate."""
EXPIRY_S = 0.75
_PATIENCE_S = 20.0
_LOOK_S = 0.01
_TIMING = {"step_ms": 50, "prefill_tokens_per_s": 100_000}


async def killed_gate() -> list[str]:
    """Kill it; what must not have been."""
    with ExitStack() as stack:
        server = stack.enter_context(redis_server())
        units = stack.enter_context(sim_units(UNITS, **_TIMING))
        settings = {"redis": server.url}
        killed, other = [stack.enter_context(GateProcess(units, settings=settings)) for _ in range(2)]
        users = Users(other.url, STREAMS, QUESTION, seed=1)
        async with Users(killed.url, STREAMS, QUESTION, seed=2), users:
            if not await until(lambda: _elsewhere(other) >= 0.9 * STREAMS, _PATIENCE_S, _LOOK_S):
                return [f"the other gate never counted {STREAMS} requests of the first"]
            killed_at = time.monotonic()
            os.kill(killed.pid, signal.SIGKILL)
            is_forgotten = await until(lambda: _elsewhere(other) == 0, _PATIENCE_S, _LOOK_S)
            took_s = time.monotonic() - killed_at
        problems = [answer.why() for answer in users.answers if answer.end() is not End.WHOLE][:5]
        if not is_forgotten:
            return [*problems, "the other gate went on counting the requests of the one that was killed"]
        print(
            f"a gate killed with some {STREAMS} requests in flight: the other counted none of them after "
            f"{took_s:.2f} s, and answered all {len(users.answers)} of its own",
            flush=True,
        )
        return problems if took_s <= EXPIRY_S + 2 * _LOOK_S else [*problems, f"that took {took_s:.2f} s"]


def _elsewhere(gate: GateProcess) -> float:
    """The requests that other gates have in flight, as this one counts them."""
    return metric_sum(gate.metrics(), "cellgate_in_flight_elsewhere")
