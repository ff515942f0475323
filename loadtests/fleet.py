"""The fleet's router, in figures: a gate is killed under it, and what 500 units cost.

What must stay true: the router is a process and known from outside only; what stands in Redis is what
docs/redis.md says.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from itertools import count as counting
from statistics import median

import orjson
import uvloop
from redis.asyncio import Redis

from loadtests.kit import progress
from loadtests.kit.gate import GateProcess
from loadtests.kit.questions import End, Question
from loadtests.kit.redis_server import redis_server
from loadtests.kit.report import run_parts
from loadtests.kit.users import Users
from loadtests.kit.waiting import until
from loadtests.simunit.process import sim_units
from loadtests.wire.client import Connections
from loadtests.wire.messages import post, whole
from loadtests.wire.reply import Reply
from loadtests.wire.scripted import Request, listen, port_of

UNITS = ("a", "b", "c", "d")
QUESTION = Question.between((50, 200), (60, 120))
STREAMS = 200
KILLED_WITH = 100
HEALED_S = 2.0
"""An expiry (0.75 s), a look at the gate that is missed (0.5 s, and 1 s for its answer where it hangs)."""
_TIMING = {"step_ms": 50, "prefill_tokens_per_s": 100_000}
_PATIENCE_S = 20.0
_LOOK_S = 0.01

MANY, FEW = 500, 4
PICK_LIMIT_US = 150.0
RPS = 240.0
ROUNDS = 3
"""Of silence and of requests, in turns: what else the machine does comes and goes."""
BEAT_S = 0.25
BODY = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "Why? " * 100}]})


def router_of(redis_url: str) -> GateProcess:
    """The fleet's router."""
    return GateProcess((), settings={"redis": redis_url, "discovery": "redis", "cells": []})


# A gate is killed.


async def killed() -> list[str]:
    """Kill one of two gates of the same units with streams in flight; what must not have been."""
    with ExitStack() as stack:
        server = stack.enter_context(redis_server())
        units = stack.enter_context(sim_units(UNITS, **_TIMING))
        settings = {"redis": server.url}
        gates = [stack.enter_context(GateProcess(units, settings=settings)) for _ in range(2)]
        router = stack.enter_context(router_of(server.url))
        async with Users(router.url, STREAMS, QUESTION, seed=1) as users:
            if not await until(lambda: max(map(_in_flight, gates)) >= KILLED_WITH, _PATIENCE_S, _LOOK_S):
                return [f"no gate ever had {KILLED_WITH} requests in flight: {[*map(_in_flight, gates)]}"]
            other, victim = sorted(gates, key=_in_flight)
            killed_at = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            is_healed = await until(lambda: _is_whole(router, other.url), _PATIENCE_S, _LOOK_S)
            took_s = time.monotonic() - killed_at
            await asyncio.sleep(2.0)
        ends = Counter(answer.end() for answer in users.answers)
    if not is_healed:
        return ["the router never had all units by way of the gate that is left"]
    print(
        f"a gate killed with {KILLED_WITH} or more of {STREAMS} streams: all units were UP by way of the "
        f"other after {took_s:.2f} s; " + ", ".join(f"{count} {end.value}" for end, count in ends.items()),
        flush=True,
    )
    allowed = {End.WHOLE, End.BROKEN}
    problems = [answer.why() for answer in users.answers if answer.end() not in allowed][:5]
    return problems if took_s <= HEALED_S else [*problems, f"that took {took_s:.2f} s"]


def _in_flight(gate: GateProcess) -> int:
    return sum(unit["in_flight"] for unit in gate.units())


def _is_whole(router: GateProcess, way: str) -> bool:
    return all(unit["url"] == way and unit["verdict"] == "up" for unit in router.units())


# What many units cost.


def _mock_gate(request: Request) -> None:
    """Answers as a gate whose units have nothing to compute."""
    request.write(whole(b'{"object":"chat.completion","choices":[]}'))


async def cost(seconds: float) -> list[str]:
    """The CPU of a router of many units beside that of one of few; what must not have been."""
    per_request_us = {}
    for count in (FEW, MANY):
        with ExitStack() as stack:
            server = stack.enter_context(redis_server())
            async with _published(server.url, count):
                router = router_of(server.url)
                await asyncio.to_thread(stack.enter_context, router)
                if not await until(partial(_knows, router, count), _PATIENCE_S, _LOOK_S):
                    return [f"the router never had {count} units"]
                turns = [(0.0, seconds / ROUNDS), (RPS, seconds / ROUNDS)] * ROUNDS
                shares = [await _share(router, turn_s, rps) for rps, turn_s in turns]
                idle, busy = median(shares[::2]), median(shares[1::2])
        per_request_us[count] = 1e6 * (busy - idle) / RPS
        print(
            f"{count} units: {idle:.1%} of a core to know of them, "
            f"{per_request_us[count]:.0f} us of CPU a request",
            flush=True,
        )
    pick_us = per_request_us[MANY] - per_request_us[FEW]
    print(f"a pick among {MANY} takes {pick_us:.0f} us more than one among {FEW}", flush=True)
    return [] if pick_us <= PICK_LIMIT_US else [f"the limit is {PICK_LIMIT_US:.0f} us"]


def _knows(router: GateProcess, count: int) -> bool:
    return len(router.units()) == count


async def _share(router: GateProcess, seconds: float, rps: float) -> float:
    """The share of a core that the router takes at so many requests a second."""
    began_s, began_at = router.cpu_s(), time.monotonic()
    asking: set[asyncio.Task[None]] = set()
    async with Connections(router.url) as gate:
        while (now := time.monotonic()) < began_at + seconds:
            if len(asking) < rps * (now - began_at) and rps:
                asking.add(asyncio.create_task(_ask(gate)))
            await asyncio.sleep(0.5 / rps if rps else 0.1)
        await asyncio.gather(*asking)
    return (router.cpu_s() - began_s) / (time.monotonic() - began_at)


async def _ask(gate: Connections) -> None:
    await gate.exchange(post(BODY), reply := Reply())
    if reply.status != 200:
        raise RuntimeError(f"the router answered {reply.status}: {reply.body[:200]!r}")


@asynccontextmanager
async def _published(redis_url: str, count: int) -> AsyncIterator[None]:
    """A gate that answers, and is told of in Redis as the gate of so many units."""
    listener = await listen(_mock_gate)
    url = f"http://127.0.0.1:{port_of(listener)}"
    beats = asyncio.create_task(_publish(redis_url, url, count))
    try:
        yield
    finally:
        beats.cancel()
        listener.close()
        await asyncio.gather(beats, return_exceptions=True)


async def _publish(redis_url: str, url: str, units: int) -> None:
    names = [f"u{number:03}" for number in range(units)]
    async with Redis.from_url(redis_url) as client:
        await client.sadd("cellgate:cells", "c")
        await client.sadd("cellgate:cell:c", "mock")
        for beat in counting(1):
            pipe = client.pipeline(transaction=False)
            written = {"v": 1, "gate": "mock", "beat": beat, "units": {}}
            pipe.set("cellgate:{beat}:mock", orjson.dumps(written), px=750)
            for name in names:
                document = {
                    "v": 1,
                    "unit": name,
                    "cell": "c",
                    "gate": "mock",
                    "verdict": "up",
                    "gate_url": url,
                    "models": ["m"],
                    "max_in_flight": 64,
                    "life_age_s": 0.1,
                    "running": 0,
                    "waiting": 0,
                }
                pipe.hset("cellgate:units:mock", name, orjson.dumps(document))
            await pipe.execute()
            await asyncio.sleep(BEAT_S)


@progress.shown("fleet")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 0 when each passes."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.fleet", description=__doc__)
    parser.add_argument("part", nargs="?", choices=("killed", "cost"), help="one of them; both without it")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase of cost")
    args = parser.parse_args(arguments)
    parts: dict[str, Callable[[], list[str]]] = {
        "killed": lambda: uvloop.run(killed()),
        "cost": lambda: uvloop.run(cost(args.seconds)),
    }
    return run_parts({args.part: parts[args.part]} if args.part else parts)


if __name__ == "__main__":
    sys.exit(main())
