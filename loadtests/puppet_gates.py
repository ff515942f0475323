"""Gates without clients or units: in Redis they write and read as gates do, more than a machine could run.

`loadtests.many_gates --puppets N` starts them as one process. What must stay true: who shares Redis with them
sees of each what it would see of a gate before `units`, at `working` of which requests begin and end all the
time. The last units are clocks: what a puppet has in flight there are the milliseconds since `began`.
"""

import argparse
import heapq
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import orjson
from redis import Redis

from cellgate.extras.redis.reports import (
    DOCUMENT_BEATS,
    EXPIRY_HEARTBEATS,
    HEARTBEAT_S,
    BeatWriter,
    UnitReport,
    written,
)
from cellgate.extras.redis_client.redis_names import Names
from cellgate.router.nouns import Verdict
from loadtests.kit import processes

CELL = "drill"
CLOCKS = 8
"""So many puppets tell the time, each at a unit of its own."""
AT_ONCE = 32
EXPIRY_MS = round(1000 * HEARTBEAT_S * EXPIRY_HEARTBEATS)
INDEX_BEATS = 20
NAMES = Names()
FLIPS = NAMES.flips


def puppet(number: int) -> str:
    """The name of one."""
    return f"puppet-{number}"


def clocks(puppets: int, units: Sequence[str]) -> list[str]:
    """The units that tell the time."""
    return list(units[-min(CLOCKS, puppets) :])


def beats_of(do: Callable[..., bytes]) -> int:
    """How many heartbeats a puppet has written, as the Redis says that `do` asks."""
    return int(orjson.loads(do("GET", NAMES.beat(puppet(0))))["beat"])


def down_and_up(unit: str) -> list[bytes]:
    """What a puppet says of a unit on the channel FLIPS: that it is down, then that it is not."""
    verdicts = enumerate((Verdict.DOWN, Verdict.UP))
    return [written(told(puppet(0), unit, verdict=verdict, number=100 + turn)) for turn, verdict in verdicts]


@contextmanager
def puppet_gates(socket: str, puppets: int, units: int, working: int) -> Iterator[float]:
    """Run them; when they began (wall clock)."""
    began = time.time()
    with processes.announcing("loadtests.puppet_gates", socket, puppets, units, working, began):
        yield began


def told(gate: str, unit: str, **fields: object) -> UnitReport:
    """What a puppet says of a unit."""
    report = UnitReport(unit, CELL, gate, Verdict.UP, f"http://{unit}", number=1)
    for name, value in fields.items():
        setattr(report, name, value)
    return report


class Puppet:
    """One of them."""

    def __init__(self, number: int, units: Sequence[str], working: int, puppets: int, began: float) -> None:
        self.name = puppet(number)
        self._began = began
        self._reports = [told(self.name, unit, models=("mock",), itl_s=0.02) for unit in units]
        self._working = self._reports[:working]
        self._clock = self._reports[len(units) - 1 - number] if number < min(CLOCKS, puppets) else None
        self._writer = BeatWriter(self.name)
        self._rng = random.Random(number)
        self._beats = 0
        for report in self._reports:
            self._writer.take(report, 0.0)

    def beat(self, client: Redis, puppets: int, others: Sequence[str]) -> None:
        """One heartbeat, with all that a gate reads and writes."""
        now = time.monotonic()
        # The writer compares values, so a report may be the same object again.
        for report in self._working:
            report.in_flight = self._rng.randrange(1, 16)
            report.prefilling = self._rng.randrange(2)
            report.uncached_tokens = 700 * report.prefilling
            report.life_age_s, report.at_s = 0.01, now
            self._writer.take(report, now)
        if self._clock is not None:
            self._clock.in_flight = round(1000 * (time.time() - self._began))
            self._writer.take(self._clock, now)
        beat, due = self._writer.beat(now, has_prefixes=False, others=puppets)
        with client.pipeline(transaction=False) as pipe:
            for first in range(0, len(due), AT_ONCE):
                part = {report.unit: written(report) for report in due[first : first + AT_ONCE]}
                pipe.hset(NAMES.units_of(self.name), mapping=part)  # type: ignore[arg-type]
            pipe.set(NAMES.beat(self.name), beat, px=EXPIRY_MS)
            pipe.pexpire(NAMES.units_of(self.name), EXPIRY_MS * DOCUMENT_BEATS)
            pipe.scard(NAMES.gates_of(CELL))
            pipe.mget([NAMES.beat(other) for other in others if other != self.name])
            if self._beats % INDEX_BEATS == 0:
                pipe.sadd(NAMES.cells, CELL)
                pipe.sadd(NAMES.gates_of(CELL), self.name)
            pipe.execute()
        self._beats += 1


def play(client: Redis, puppets: list[Puppet]) -> None:
    """For ever, each about every HEARTBEAT_S."""
    rng = random.Random(0)
    due = [(time.monotonic() + HEARTBEAT_S * rng.random(), number) for number in range(len(puppets))]
    heapq.heapify(due)
    others: list[str] = []
    for turn in itertools.count():
        if turn % (INDEX_BEATS * len(puppets)) == len(puppets):
            found = client.smembers(NAMES.gates_of(CELL))
            others = sorted(name.decode() for name in found)  # type: ignore[union-attr]
        at, number = heapq.heappop(due)
        time.sleep(max(0.0, at - time.monotonic()))
        puppets[number].beat(client, len(puppets), others or [puppet(0)])
        next_at = max(at, time.monotonic() - HEARTBEAT_S) + HEARTBEAT_S * rng.uniform(0.9, 1.0)
        heapq.heappush(due, (next_at, number))


def main() -> int:
    """Until it is ended."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.puppet_gates", description=__doc__)
    parser.add_argument("socket")
    for name in ("puppets", "units", "working"):
        parser.add_argument(name, type=int)
    parser.add_argument("began", type=float)
    args = parser.parse_args()
    units = [f"u{number:04d}" for number in range(args.units)]
    with Redis(unix_socket_path=args.socket) as client:
        puppets = [Puppet(n, units, args.working, args.puppets, args.began) for n in range(args.puppets)]
        # Whoever started this may be killed.
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        print("{}", flush=True)
        play(client, puppets)
    return 0


if __name__ == "__main__":
    sys.exit(main())
