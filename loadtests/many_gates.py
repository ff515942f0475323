"""Many gates on one Redis: what that costs Redis and each gate, and how soon all know what one has found.

`python -m loadtests.many_gates` starts a real redis-server, two mock units (`--units`), and 1, 16, then 64
gates before them. What must hold: each gate hears all others, and all of them hear of a unit that one has
lost. The times of a flip are those of the gates' own events, to a millisecond; where the gates want more CPU
than the machine has, they are those of the crowd, and the line says so.

`--gates 1 --puppets 63 --units 1000` is one gate of 64: in Redis the others do what gates do
(puppet_gates.py). A gate without Redis before the same units at the same time shows
what sharing costs.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from statistics import mean, median, quantiles

import uvloop

from loadtests.kit import processes, progress
from loadtests.kit.gate import GateProcess, Named, metric_sum
from loadtests.kit.mock_fleet import mock_fleet
from loadtests.kit.redis_server import redis_server
from loadtests.kit.report import print_problems, verdict
from loadtests.kit.waiting import until
from loadtests.puppet_gates import FLIPS, beats_of, clocks, down_and_up, puppet_gates
from loadtests.redis_faults.flips import Door

SETTLE_S = 5.0
HEARD_PATIENCE_S = 60.0
LINGER_S = 3.0
DOORS = 40
LOOKS, LOOK_S, LOOKED_AT = 20, 0.2, 3
PAGE_SHARE = 0.4
"""Of a gate's time, which its page of metrics may take: with a thousand units it takes most of a second."""
READ_PATIENCE_S, READ_LOOK_S = 120.0, 5.0
STARTERS = 2
"""Gates are started so many at a time."""
FULL = 0.9
"""Of the machine: beyond that processes wait for each other."""
_STATS = ("total_commands_processed", "total_net_input_bytes", "total_net_output_bytes")


@dataclass(frozen=True, slots=True)
class Cost:
    """What some seconds took while nothing happened. Rates are for each second, CPU is of one core."""

    gates: int
    gate_cpu: float
    gate_mb: float
    redis_cpu: float
    redis_mb: float
    commands_s: float
    in_s: float
    out_s: float
    machine: float
    """The share of all cores that was busy."""
    beats_s: float
    """Of one gate, or puppet: four are due."""
    sharing: float
    """What a gate pays more than one without Redis."""

    def line(self) -> str:
        """For people."""
        return (
            f"{self.gates} gates: each {self.gate_cpu:.1%} of a core ({self.sharing:.1%} more than without "
            f"Redis) and {self.gate_mb:.0f} MB, and {self.beats_s:.1f} beats a second; Redis "
            f"{self.redis_cpu:.1%} of a core and {self.redis_mb:.1f} MB, {self.commands_s:.0f} commands a "
            f"second, {self.in_s / 1e3:.0f} kB a second in and {self.out_s / 1e3:.0f} out; the machine was "
            f"{self.machine:.0%} busy"
        )


class Crowd:
    """So many gates before the same units, the first of them by way of doors; and puppets."""

    def __init__(self, size: int, units: int, puppets: int, working: int, stack: AsyncExitStack) -> None:
        self.size = size
        self._units = units
        self.server = stack.enter_context(redis_server())
        self._stack = stack
        self.doors: dict[str, Door] = {}
        self.gates: list[GateProcess] = []
        self._puppets, self._working = puppets, working
        self._began = 0.0

    async def start(self) -> None:
        """All of them, and wait until each hears all others. Raises RuntimeError when one does not."""
        units = self._stack.enter_context(mock_fleet(self._units, 2.0))
        self.names = [unit.name for unit in units]
        # With a thousand of them the doors would cost more than the gates.
        for unit in units[:DOORS]:
            door = self.doors[unit.name] = Door(unit.url)
            await door.open()
            self._stack.push_async_callback(door.shut)
        behind = [Named(name, f"http://127.0.0.1:{door.port}") for name, door in self.doors.items()]
        settings = {"redis": self.server.url}
        gates = [GateProcess([*behind, *units[DOORS:]], settings=settings)]
        gates += [GateProcess(units, settings=settings) for _ in range(self.size - 1)]
        gates.append(GateProcess(units))
        for gate in gates:
            self._stack.push_async_callback(_end, gate)
        starters = ThreadPoolExecutor(STARTERS)
        # Before the gates are ended, lest one is started after that.
        self._stack.callback(starters.shutdown, cancel_futures=True)
        await asyncio.gather(*(asyncio.wrap_future(starters.submit(gate.__enter__)) for gate in gates))
        *self.gates, self.alone = gates
        if self._puppets:
            run = puppet_gates(str(self.server.socket), self._puppets, self._units, self._working)
            self._began = await asyncio.to_thread(self._stack.enter_context, run)

    async def unheard(self) -> list[str]:
        """Wait until each gate hears all others; which of them do not."""
        await until(lambda: not self._deaf(), HEARD_PATIENCE_S, 1.0)
        return await asyncio.to_thread(self._deaf)

    def _deaf(self) -> list[str]:
        peers = enumerate(map(_peers, self.gates))
        others = self.size + self._puppets - 1
        return [f"gate {number} hears {heard}" for number, heard in peers if heard != others]

    async def all_read(self) -> str:
        """Wait until the gates have read all that the puppets have written: what that took. Empty: they have
        not.
        """
        due = self._puppets * self._units
        pids = [self.alone.pid, *(gate.pid for gate in self.gates)]
        before_s = list(map(processes.cpu_s, pids))
        if not await until(lambda: min(map(_documents, self.gates)) >= due, READ_PATIENCE_S, READ_LOOK_S):
            return ""
        alone_s, *gates_s = (processes.cpu_s(pid) - s for pid, s in zip(pids, before_s, strict=True))
        return (
            f"{time.time() - self._began:.0f} s after they began, for {mean(gates_s) - alone_s:.1f} s of CPU "
            "more than without Redis, with the pages of metrics that showed it"
        )

    async def cost(self, seconds: float) -> Cost:
        """Measure while nothing happens."""
        assert self.server.process is not None
        pid = self.server.process.pid
        pids = [self.alone.pid, *(gate.pid for gate in self.gates)]
        beats = await asyncio.to_thread(self._beats)
        before, began = self._stats(), time.monotonic()
        cpu_s = [processes.cpu_s(each) for each in (pid, *pids)]
        machine_s = processes.machine_cpu_s()
        await asyncio.sleep(seconds)
        took_s = time.monotonic() - began
        redis_s, alone_s, *gates_s = (
            processes.cpu_s(each) - s for each, s in zip((pid, *pids), cpu_s, strict=True)
        )
        machine_s = processes.machine_cpu_s() - machine_s
        rates = [(after - was) / took_s for after, was in zip(self._stats(), before, strict=True)]
        commands_s, in_s, out_s = rates
        beats = await asyncio.to_thread(self._beats) - beats
        return Cost(
            gates=self.size + self._puppets,
            gate_cpu=mean(gates_s) / took_s,
            gate_mb=mean(map(processes.resident_mb, pids[1:])),
            redis_cpu=redis_s / took_s,
            redis_mb=processes.resident_mb(pid),
            commands_s=commands_s,
            in_s=in_s,
            out_s=out_s,
            machine=machine_s / took_s / (os.cpu_count() or 1),
            beats_s=beats / took_s,
            sharing=(mean(gates_s) - alone_s) / took_s,
        )

    def _beats(self) -> float:
        """Of the last gate; or of a puppet."""
        if not self._puppets:
            return metric_sum(
                self.gates[-1].metrics(), "cellgate_redis_messages_total", 'kind="beats",way="sent"'
            )
        return beats_of(self.server.do)

    async def loads(self) -> list[float]:
        """How old it is what some of the gates know of the puppets' load, again and again."""
        ages_s = list[float]()
        metric = 'cellgate_in_flight_elsewhere{{unit="{}"}}'
        named = {metric.format(name) for name in clocks(self._puppets, self.names)}
        took_s = 0.0
        for _ in range(LOOKS):
            await asyncio.sleep(random.uniform(0.5, 1.5) * max(LOOK_S, took_s / PAGE_SHARE))
            for gate in random.sample(self.gates, min(LOOKED_AT, self.size)):
                asked_at = time.time()
                with suppress(TimeoutError):
                    page = await asyncio.to_thread(gate.metrics)
                    at, took_s = (asked_at + time.time()) / 2, time.time() - asked_at
                    lines = (line.split(" ") for line in page.splitlines())
                    ages_s += [at - self._began - float(ms) / 1000 for name, ms, *_ in lines if name in named]
        return ages_s

    async def said(self, number: int) -> tuple[list[float], int]:
        """A puppet says that a unit is down: how long until each gate knew, and how many never did."""
        unit = self.names[number]
        down, up = down_and_up(unit)
        said_at = time.time()
        self.server.do("PUBLISH", FLIPS, down)
        await asyncio.sleep(LINGER_S)
        self.server.do("PUBLISH", FLIPS, up)
        heard = [await asyncio.to_thread(_heard_at, gate, unit, said_at) for gate in self.gates]
        took_s = [at - said_at for at in heard if at is not None]
        return took_s, len(heard) - len(took_s)

    async def flip(self, name: str) -> tuple[list[float], int]:
        """The first gate loses a unit: how long until each of the others knew, and how many never did."""
        since = time.time()
        await self.doors[name].shut()
        await asyncio.sleep(LINGER_S)
        down_at = await asyncio.to_thread(self.gates[0].flipped, name, "down", since)
        await self.doors[name].open()
        if down_at is None:
            return [], len(self.gates) - 1
        times = [await asyncio.to_thread(_heard_at, gate, name, since) for gate in self.gates[1:]]
        heard = [at - down_at for at in times if at is not None]
        await asyncio.to_thread(self.gates[0].wait_up)
        return heard, len(times) - len(heard)

    def _stats(self) -> list[float]:
        text = self.server.do("INFO", "stats")
        fields = text if isinstance(text, dict) else _fields(text)
        return [float(fields[name]) for name in _STATS]


async def _end(gate: GateProcess) -> None:
    """End a gate, if it was started."""
    if gate.pid:
        await asyncio.to_thread(gate.__exit__, None, None, None)


def _fields(text: bytes) -> dict[str, str]:
    lines = text.decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _peers(gate: GateProcess) -> int:
    try:
        return int(metric_sum(gate.metrics(), "cellgate_redis_peers"))
    except TimeoutError:
        # It is reading all documents of all others.
        return -1


def _documents(gate: GateProcess) -> float:
    """How many documents of others it has read."""
    try:
        return metric_sum(gate.metrics(), "cellgate_redis_messages_total", 'kind="documents",way="received"')
    except TimeoutError:
        return 0.0


def _heard_at(gate: GateProcess, unit: str, since: float) -> float | None:
    """When a gate took another's word for it that a unit is down."""
    told = [flip["at"] for flip in gate.flips(since, unit) if "reports it as down" in flip["line"]]
    return told[0] if told else None


async def crowd(size: int, args: argparse.Namespace) -> list[str]:
    """Measure with so many gates; what must not have been."""
    async with AsyncExitStack() as stack:
        gates = Crowd(size, args.units, args.puppets, args.working, stack)
        await gates.start()
        problems = await gates.unheard()
        if args.puppets:
            read = await gates.all_read()
            print(f"{args.puppets} puppets: all was read {read or 'too late'}", flush=True)
            problems += [] if read else ["a gate has not read all"]
        await asyncio.sleep(SETTLE_S)
        cost = await gates.cost(args.seconds)
        print(cost.line(), flush=True)
        is_full = cost.machine > FULL
        if args.puppets:
            ages_s = await gates.loads()
            problems += _shown(cost, "loads, seen", ages_s)
        if size + args.puppets == 1:
            return problems
        took_s, missed = await _flips(gates, args.flips)
        problems += _shown(cost, "flips, heard", took_s)
        problems += [*missed, *(f"after the flips {each}" for each in await gates.unheard())]
    if problems and is_full:
        return [
            f"proves nothing with {size} gates, for the machine had no CPU left: {'; '.join(problems[:3])}"
        ]
    return problems


async def _flips(gates: Crowd, flips: int) -> tuple[list[float], list[str]]:
    """How long each flip took to each gate, and which were not heard."""
    took_s, problems = [], []
    for number in range(flips):
        if gates.size > 1:
            heard, missed = await gates.flip(list(gates.doors)[number % len(gates.doors)])
        else:
            heard, missed = await gates.said(number)
        took_s += heard
        problems += [f"{missed} gates never heard of flip {number}"] if missed else []
    return took_s, problems


def _shown(cost: Cost, what: str, times_s: list[float]) -> list[str]:
    """Print how these are distributed. Why that is not possible."""
    if len(times_s) < 2:
        return [f"no {what.split(',')[0]} to be seen"]
    p99_s = quantiles(times_s, n=100, method="inclusive")[98]
    print(
        f"{cost.gates} gates: {what} {len(times_s)} times: median {1000 * median(times_s):.1f} ms, p99 "
        f"{1000 * p99_s:.1f} ms, worst {1000 * max(times_s):.1f} ms"
        + (", on a machine that had no CPU left" if cost.machine > FULL else ""),
        flush=True,
    )
    return []


@progress.shown("many-gates")
def main() -> int:
    """Measure with each number of gates; 0 when all holds."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.many_gates", description=__doc__)
    parser.add_argument("--gates", default="1,16,64", help="how many, one number after the other")
    parser.add_argument("--units", type=int, default=2, help="before which all of them are")
    parser.add_argument("--puppets", type=int, default=0, help="which count as gates in Redis, beside them")
    parser.add_argument("--working", type=int, default=0, help="units at which each puppet has requests")
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring, with each number")
    parser.add_argument("--flips", type=int, default=6, help="with each number")
    args = parser.parse_args()
    problems: list[str] = []
    for size in map(int, args.gates.split(",")):
        progress.phase(f"{size} gates, {len(problems)} problems")
        problems += uvloop.run(crowd(size, args))
    print(verdict(problems))
    print_problems(problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
