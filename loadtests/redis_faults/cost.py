"""What sharing costs: CPU of gates before the same 200 units, with a Redis and without, at the same time."""

import time
from contextlib import ExitStack

from loadtests.kit.gate import GateProcess, metric_sum
from loadtests.kit.mock_fleet import mock_fleet
from loadtests.kit.redis_server import redis_server

UNITS = 200
BEATS_PER_S = 4.0
WRITING_LIMIT = 0.05
"""Of one core."""
SETTLE_S = 5.0
ENOUGH = 0.9
"""Of the beats that are due: less prove nothing."""
KINDS = ("none", "alone", "pair", "pair")
"""No Redis; one that nobody else writes to, by its prefix; and two gates that read each other's documents."""


def cost(seconds: float) -> list[str]:
    """Measure; what must not have been."""
    with ExitStack() as stack:
        server = stack.enter_context(redis_server())
        units = stack.enter_context(mock_fleet(UNITS, 2.0))
        gates = []
        for kind in KINDS:
            settings = {"redis": server.url, "redis_prefix": f"{kind}:"} if kind != "none" else {}
            gates.append(stack.enter_context(GateProcess(units, settings=settings)))
        time.sleep(SETTLE_S)
        before_s, beats, began = [gate.cpu_s() for gate in gates], _beats(gates[1]), time.monotonic()
        time.sleep(seconds)
        shares = [(gate.cpu_s() - cpu_s) for gate, cpu_s in zip(gates, before_s, strict=True)]
        took_s, beats = time.monotonic() - began, _beats(gates[1]) - beats
    none, alone, *pair = [share / took_s for share in shares]
    writing, both = alone - none, sum(pair) / 2 - none
    print(
        f"{UNITS} units, {beats / took_s:.1f} beats a second: writing takes {writing:.1%} of a core, writing "
        f"and reading as many of another gate {both:.1%}; a gate without Redis {none:.1%}",
        flush=True,
    )
    problems = []
    if writing > WRITING_LIMIT:
        problems.append(f"writing takes {writing:.1%} of a core, the limit is {WRITING_LIMIT:.0%}")
    if beats < ENOUGH * BEATS_PER_S * took_s:
        problems.append(f"proves nothing: only {beats / took_s:.1f} beats a second were written")
    return problems


def _beats(gate: GateProcess) -> float:
    return metric_sum(gate.metrics(), "cellgate_redis_messages_total", 'kind="beats",way="sent"')
