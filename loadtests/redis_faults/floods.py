"""Somebody who may write to Redis floods it, in four ways: what do users of gates that share it feel?

Two of four gates share it; requests go to all four in turns, so that what differs is Redis alone. The flood
comes from a process of its own; half of a second of it comes before the load.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import orjson
from redis import Redis

from loadtests.kit.processes import start, stop
from loadtests.kit.redis_server import redis_server
from loadtests.redis_faults.outage import WARM_UP_S, Phase, four_gates, load_phase

ADDED_MAX_S = 0.02
FLIPS_PER_S, SLICE_S = 10_000, 0.05
MEMBERS, MEMBERS_AT_ONCE = 1_000_000, 10_000
BEATS, BEAT_BYTES, BEAT_S = 16, 2_300_000, 0.25
FORGED_PER_S = 1_000
CELL, UNIT = "drill", "u0"
_AHEAD_S = 0.5
_ENOUGH_S = 300.0
"""A flood whose load was killed ends by itself."""


async def floods(seconds: float, rps: float) -> list[str]:
    """One after the other; what must not have been."""
    with ExitStack() as stack:
        server = stack.enter_context(redis_server())
        lanes = await four_gates(stack, server.url)
        await load_phase("warm-up", lanes, WARM_UP_S, rps)
        phases = [await load_phase("no flood", lanes, seconds, rps)]
        for name in FLOODS:
            command = [sys.executable, "-m", "loadtests.redis_faults.floods", str(server.socket), name]
            flooding = start(command, server.socket.parent / f"{name}.log")
            try:
                await asyncio.sleep(_AHEAD_S)
                phases.append(await load_phase(name, lanes, seconds, rps))
                proves = flooding.poll() in (None, 0)
            finally:
                stop(flooding)
            server.do("FLUSHALL")
            if not proves:
                return [f"proves nothing: the flood of {name} has ended"]
    print(*(phase.line() for phase in phases), sep="\n", flush=True)
    return [problem for phase in phases for problem in _problems(phase)]


def _problems(phase: Phase) -> list[str]:
    problems = [f"{phase.name}: {error}" for error in phase.errors[:5]]
    if not phase.proves_something:
        return [*problems, f"{phase.name}: proves nothing, too few were answered"]
    added_ms = 1000 * phase.added_s
    return problems if phase.added_s <= ADDED_MAX_S else [*problems, f"{phase.name}: {added_ms:.1f} ms added"]


# The process that floods.


def _word(number: int, gate: str = "evil") -> bytes:
    """A document about a unit, as a gate would write it."""
    word = {"v": 1, "unit": UNIT, "cell": CELL, "gate": gate, "verdict": ("up", "down")[number % 2]}
    return orjson.dumps({**word, "life_age_s": 0, "in_flight": 0, "weight": 100.0, "max_in_flight": 1000})


def _flips(client: Redis) -> None:
    for second in _paced(SLICE_S):
        with client.pipeline(transaction=False) as pipeline:
            for number in range(int(FLIPS_PER_S * SLICE_S)):
                pipeline.publish("cellgate:flips", _word(second + number))
            pipeline.execute()


def _members(client: Redis) -> None:
    client.sadd("cellgate:cells", CELL)
    for first in range(0, MEMBERS, MEMBERS_AT_ONCE):
        client.sadd(f"cellgate:cell:{CELL}", *(f"evil-{n}" for n in range(first, first + MEMBERS_AT_ONCE)))
    for _ in _paced(1.0):
        client.sadd(f"cellgate:cell:{CELL}", "evil")


def _beats(client: Redis) -> None:
    client.sadd("cellgate:cells", CELL)
    client.sadd(f"cellgate:cell:{CELL}", *(f"evil{number}" for number in range(BEATS)))
    for count in _paced(BEAT_S):
        for number in range(BEATS):
            units = {f"x{n}": {"unit": f"x{n}", "cell": CELL} for n in range(BEAT_BYTES // 40)}
            beat = {"v": 1, "gate": f"evil{number}", "beat": count, "prefixes": False, "units": units}
            client.set(f"cellgate:{{beat}}:evil{number}", orjson.dumps(beat), px=750)


def _forged(client: Redis) -> None:
    """A unit that lives for ever, and counters of limits far above and below all bounds."""
    client.sadd("cellgate:cells", CELL)
    client.sadd(f"cellgate:cell:{CELL}", "evil")
    for count in _paced(SLICE_S):
        beat = {"v": 1, "gate": "evil", "beat": 100 * count, "units": {}}
        with client.pipeline(transaction=False) as pipeline:
            pipeline.set("cellgate:{beat}:evil", orjson.dumps(beat), px=750)
            for number in range(int(FORGED_PER_S * SLICE_S)):
                pipeline.hset("cellgate:units:evil", UNIT, _word(0))
                pipeline.incrbyfloat(f"cellgate:limit:{number}", (1e15, -1e15)[count % 2])
            pipeline.execute()


def _paced(every_s: float) -> Iterator[int]:
    """Numbers, one each so many seconds."""
    begun, number = time.monotonic(), 0
    while time.monotonic() - begun < _ENOUGH_S:
        yield number
        number += 1
        time.sleep(max(0.0, begun + number * every_s - time.monotonic()))


FLOODS: dict[str, Callable[[Redis], None]] = {
    "flips": _flips,
    "members": _members,
    "beats": _beats,
    "forged": _forged,
}

if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt), Redis(unix_socket_path=sys.argv[1]) as connection:
        FLOODS[sys.argv[2]](connection)
