"""Servers of the Redis are replaced under load: Sentinels fail over; in a Cluster slots move, a node dies.

What must stay true: no request fails, and gates hear each other again within HEAL_LIMIT_S of the moment at
which Redis itself is whole. How long Redis takes until then is its own configuration
(`down-after-milliseconds`, `cluster-node-timeout`), and is printed apart.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

from loadtests.kit.redis_group import redis_cluster, redis_sentinels
from loadtests.kit.waiting import until
from loadtests.redis_faults.outage import WARM_UP_S, Lane, four_gates, healed, load_phase

HEAL_LIMIT_S = 2.0
SLOTS = 3000
"""Moved under load, of 16384."""
_PATIENCE_S = 30.0
_LOOK_S = 0.005


async def failed_over(seconds: float, rps: float) -> list[str]:
    """The primary is killed; what must not have been."""
    with ExitStack() as stack:
        sentinels = await asyncio.to_thread(stack.enter_context, redis_sentinels())
        lanes = await four_gates(stack, sentinels.url)
        problems = await _warm(lanes, rps)

        async def kill() -> None:
            sentinels.primary.kill()
            await until(sentinels.failed_over, _PATIENCE_S, _LOOK_S)

        return problems + await _while("the primary is killed", kill, lanes, seconds, rps)


async def resharded(seconds: float, rps: float) -> list[str]:
    """Slots are moved, then a node is killed; what must not have been."""
    with ExitStack() as stack:
        cluster = await asyncio.to_thread(stack.enter_context, redis_cluster())
        lanes = await four_gates(stack, cluster.url)
        problems = await _warm(lanes, rps)
        node = cluster.nodes[1]

        async def kill() -> None:
            node.kill()
            await until(lambda: cluster.serves_without(node), _PATIENCE_S, _LOOK_S)

        async def move() -> None:
            await asyncio.to_thread(cluster.move_slots, SLOTS)

        problems += await _while(f"{SLOTS} slots are moved", move, lanes, seconds, rps)
        return problems + await _while("a node with slots is killed", kill, lanes, seconds, rps)


async def _warm(lanes: Sequence[Lane], rps: float) -> list[str]:
    problems = await healed(lanes, time.monotonic(), _PATIENCE_S)
    await load_phase("warm-up", lanes, WARM_UP_S, rps)
    return problems


async def _while(
    name: str, fault: Callable[[], Awaitable[None]], lanes: Sequence[Lane], seconds: float, rps: float
) -> list[str]:
    """The fault, in the middle of some seconds of load."""
    load = asyncio.create_task(load_phase(name, lanes, seconds, rps))
    await asyncio.sleep(seconds / 4)
    began = time.monotonic()
    await fault()
    print(f"{name}: Redis itself took {time.monotonic() - began:.2f} s", flush=True)
    problems = await healed(lanes, time.monotonic(), HEAL_LIMIT_S)
    phase = await load
    print(phase.line(), flush=True)
    problems += [f"{name}: {error}" for error in phase.errors[:5]]
    return (
        problems if phase.proves_something else [*problems, f"{name}: proves nothing, too few were answered"]
    )
