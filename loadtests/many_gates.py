"""Many gates on one Redis: what that costs Redis and each gate, and how soon all know what one has found.

`python -m loadtests.many_gates` starts a real redis-server, two mock units (`--units`), and 1, 16, then 64
gates before them. What must hold: each gate hears all others, and all of them hear of a unit that one has
lost. The times of a flip are those of the gates' own events, to a millisecond; where the gates want more CPU
than the machine has, they are those of the crowd, and the line says so.
"""

import argparse
import asyncio
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import mean, median, quantiles

import uvloop

from loadtests.kit import processes, progress
from loadtests.kit.gate import GateProcess, Named, metric_sum
from loadtests.kit.mock_fleet import mock_fleet
from loadtests.kit.redis_server import RedisServer, redis_server
from loadtests.kit.report import print_problems, verdict
from loadtests.kit.waiting import until
from loadtests.redis_faults.flips import Door

SETTLE_S = 5.0
HEARD_PATIENCE_S = 30.0
LINGER_S = 3.0
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
    """Of one gate: four are due."""

    def line(self) -> str:
        """For people."""
        return (
            f"{self.gates} gates: each {self.gate_cpu:.1%} of a core and {self.gate_mb:.0f} MB, and "
            f"{self.beats_s:.1f} beats a second; Redis {self.redis_cpu:.1%} of a core and "
            f"{self.redis_mb:.1f} MB, {self.commands_s:.0f} commands a second, {self.in_s / 1e3:.0f} kB "
            f"a second in and {self.out_s / 1e3:.0f} out; the machine was {self.machine:.0%} busy"
        )


class Crowd:
    """So many gates before the same units, the first of them by way of doors."""

    def __init__(self, size: int, units: int, server: RedisServer, stack: AsyncExitStack) -> None:
        self.size = size
        self._units = units
        self.server = server
        self._stack = stack
        self.doors: dict[str, Door] = {}
        self.gates: list[GateProcess] = []

    async def start(self) -> None:
        """All of them, and wait until each hears all others. Raises RuntimeError when one does not."""
        units = self._stack.enter_context(mock_fleet(self._units, 2.0))
        for unit in units:
            door = self.doors[unit.name] = Door(unit.url)
            await door.open()
            self._stack.push_async_callback(door.shut)
        behind = [Named(name, f"http://127.0.0.1:{door.port}") for name, door in self.doors.items()]
        settings = {"redis": self.server.url}
        gates = [GateProcess(behind, settings=settings)]
        gates += [GateProcess(units, settings=settings) for _ in range(self.size - 1)]
        for gate in gates:
            self._stack.push_async_callback(_end, gate)
        starters = ThreadPoolExecutor(STARTERS)
        # Before the gates are ended, lest one is started after that.
        self._stack.callback(starters.shutdown, cancel_futures=True)
        await asyncio.gather(*(asyncio.wrap_future(starters.submit(gate.__enter__)) for gate in gates))
        self.gates = gates

    async def unheard(self) -> list[str]:
        """Wait until each gate hears all others; which of them do not."""
        await until(lambda: not self._deaf(), HEARD_PATIENCE_S, 1.0)
        return await asyncio.to_thread(self._deaf)

    def _deaf(self) -> list[str]:
        peers = enumerate(map(_peers, self.gates))
        return [f"gate {number} hears {heard}" for number, heard in peers if heard != self.size - 1]

    async def cost(self, seconds: float) -> Cost:
        """Measure while nothing happens."""
        assert self.server.process is not None
        pid = self.server.process.pid
        pids = [gate.pid for gate in self.gates]
        beats = await asyncio.to_thread(_beats, self.gates[-1])
        before, began = self._stats(), time.monotonic()
        cpu_s = [processes.cpu_s(each) for each in (pid, *pids)]
        machine_s = processes.machine_cpu_s()
        await asyncio.sleep(seconds)
        took_s = time.monotonic() - began
        redis_s, *gates_s = (processes.cpu_s(each) - s for each, s in zip((pid, *pids), cpu_s, strict=True))
        machine_s = processes.machine_cpu_s() - machine_s
        rates = [(after - was) / took_s for after, was in zip(self._stats(), before, strict=True)]
        commands_s, in_s, out_s = rates
        beats = await asyncio.to_thread(_beats, self.gates[-1]) - beats
        return Cost(
            gates=self.size,
            gate_cpu=mean(gates_s) / took_s,
            gate_mb=mean(map(processes.resident_mb, pids)),
            redis_cpu=redis_s / took_s,
            redis_mb=processes.resident_mb(pid),
            commands_s=commands_s,
            in_s=in_s,
            out_s=out_s,
            machine=machine_s / took_s / (os.cpu_count() or 1),
            beats_s=beats / took_s,
        )

    async def flip(self, name: str) -> tuple[list[float], int]:
        """The first gate loses a unit: how long until each of the others knew, and how many never did."""
        since = time.time()
        await self.doors[name].shut()
        await asyncio.sleep(LINGER_S)
        down_at = await asyncio.to_thread(self.gates[0].flipped, name, "down", since)
        await self.doors[name].open()
        if down_at is None:
            return [], len(self.gates) - 1
        told = [await asyncio.to_thread(_heard_at, gate, name, since) for gate in self.gates[1:]]
        heard = [at - down_at for at in told if at is not None]
        await asyncio.to_thread(self.gates[0].wait_up)
        return heard, len(told) - len(heard)

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
    return int(metric_sum(gate.metrics(), "cellgate_redis_peers"))


def _beats(gate: GateProcess) -> float:
    return metric_sum(gate.metrics(), "cellgate_redis_messages_total", 'kind="beats",way="sent"')


def _heard_at(gate: GateProcess, unit: str, since: float) -> float | None:
    """When a gate took another's word for it that a unit is down."""
    told = [flip["at"] for flip in gate.flips(since, unit) if "reports it as down" in flip["line"]]
    return told[0] if told else None


async def crowd(size: int, units: int, seconds: float, flips: int) -> list[str]:
    """Measure with so many gates; what must not have been."""
    async with AsyncExitStack() as stack:
        gates = Crowd(size, units, stack.enter_context(redis_server()), stack)
        await gates.start()
        problems = await gates.unheard()
        await asyncio.sleep(SETTLE_S)
        cost = await gates.cost(seconds)
        print(cost.line(), flush=True)
        if size == 1:
            return problems
        took_s, missed = await _flips(gates, flips)
        problems += [*missed, *(f"after the flips {each}" for each in await gates.unheard())]
    is_full = cost.machine > FULL
    if len(took_s) > 1:
        print(_times(size, took_s) + (", on a machine that had no CPU left" if is_full else ""), flush=True)
    else:
        problems.append("no flip was heard")
    if problems and is_full:
        return [
            f"proves nothing with {size} gates, for the machine had no CPU left: {'; '.join(problems[:3])}"
        ]
    return problems


async def _flips(gates: Crowd, flips: int) -> tuple[list[float], list[str]]:
    """How long each flip took to each gate, and which were not heard."""
    took_s, problems = [], []
    for number in range(flips):
        heard, missed = await gates.flip(list(gates.doors)[number % len(gates.doors)])
        took_s += heard
        problems += [f"{missed} of {gates.size - 1} gates never heard of flip {number}"] if missed else []
    return took_s, problems


def _times(size: int, took_s: list[float]) -> str:
    p99_s = quantiles(took_s, n=100, method="inclusive")[98]
    return (
        f"{size} gates: flips, heard {len(took_s)} times: median {1000 * median(took_s):.1f} ms, p99 "
        f"{1000 * p99_s:.1f} ms, worst {1000 * max(took_s):.1f} ms"
    )


@progress.shown("many-gates")
def main() -> int:
    """Measure with each number of gates; 0 when all holds."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.many_gates", description=__doc__)
    parser.add_argument("--gates", default="1,16,64", help="how many, one number after the other")
    parser.add_argument("--units", type=int, default=2, help="before which all of them are")
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring, with each number")
    parser.add_argument("--flips", type=int, default=6, help="with each number")
    args = parser.parse_args()
    problems: list[str] = []
    for size in map(int, args.gates.split(",")):
        progress.phase(f"{size} gates, {len(problems)} problems")
        problems += uvloop.run(crowd(size, args.units, args.seconds, args.flips))
    print(verdict(problems))
    print_problems(problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
