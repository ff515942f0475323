"""Several gates may recover the same units: is each restarted exactly once, whatever happens to the gates?

`python -m loadtests.one_actor` starts a real redis-server, eight units in eight cells, and gates before them
that all have the same command. In each round all units are lost, and near the moment at which the command is
due one thing happens: a gate is killed (-9), the acting gate is stopped (SIGSTOP) for longer than its lease,
Redis is killed and comes back empty, or nothing. The command writes down who ran it. What must hold: one line
for each loss, and of two lines for a unit the later one has the larger fencing token.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import uvloop

from loadtests.kit import progress
from loadtests.kit.gate import GateProcess, Named, metric_sum
from loadtests.kit.mock_fleet import mock_fleet
from loadtests.kit.redis_server import RedisServer, redis_server
from loadtests.kit.report import print_problems, verdict
from loadtests.kit.waiting import until
from loadtests.redis_faults.flips import Door

UNITS = 8
AFTER_S = 3.0
REST_S = 60.0
"""How long a unit is given to come back. A second restart before that would be one too many."""
TAKEOVER_S = 4.5
"""From the death of an acting gate to the first action of the next, at most (docs/recovery.md)."""
STOPPED_S = TAKEOVER_S + 0.5
LINGER_S = STOPPED_S + 1.0
"""How long a unit stays lost after its restart: another gate would restart it now."""
HEARD_S = 1.5
"""After that every gate has heard of what was begun."""
PATIENCE_S = AFTER_S + STOPPED_S + TAKEOVER_S + 2.0 * REST_S
"""A gate that is killed between its claim and its command leaves the unit to the next attempt."""


class Deed(NamedTuple):
    """One run of the command."""

    unit: str
    fence: int
    attempt: int
    gate_pid: int


@dataclass(frozen=True, slots=True)
class Round:
    """What came of one round: the commands that ran for each unit."""

    fault: str
    deeds: Mapping[str, Sequence[Deed]]

    def problems(self) -> list[str]:
        """What must not have been."""
        return [
            f"{self.fault}: unit {unit} was restarted {len(deeds)} times: {', '.join(map(str, deeds))}"
            for unit, deeds in self.deeds.items()
            if len(deeds) != 1
        ]


class Fleet:
    """So many gates before the same units, which are reached through doors."""

    def __init__(self, size: int, redis: RedisServer, folder: Path, stack: AsyncExitStack) -> None:
        self.size = size
        self.redis = redis
        self.doors: dict[str, Door] = {}
        self.gates: list[GateProcess] = []
        self._written = folder / "deeds"
        self._audit = folder / "audit.jsonl"
        self._stack = stack

    async def start(self) -> None:
        """All of it; every gate has all units UP."""
        for unit in self._stack.enter_context(mock_fleet(UNITS, 2.0)):
            door = self.doors[unit.name] = Door(unit.url)
            await door.open()
            self._stack.push_async_callback(door.shut)
        self._stack.push_async_callback(self._end)
        await self.fill_up()

    async def fill_up(self) -> None:
        """Start gates for those that were killed, and wait until all units are UP at each of them."""
        while len(self.gates) < self.size:
            self.gates.append(await asyncio.to_thread(self._gate().__enter__))
        for gate in self.gates:
            await asyncio.to_thread(gate.wait_up)

    async def forget(self) -> None:
        """Let attempts count again everywhere, as an operator does who drains a unit and puts it back."""
        await asyncio.sleep(HEARD_S)
        for gate in self.gates:
            for unit in self.doors:
                await asyncio.to_thread(gate.drain, unit)
        await asyncio.sleep(HEARD_S)
        for gate in self.gates:
            for unit in self.doors:
                await asyncio.to_thread(gate.drain, unit, undo=True)

    async def kill(self, gate: GateProcess) -> None:
        """As a crash does."""
        self.gates.remove(gate)
        os.kill(gate.pid, signal.SIGKILL)
        await asyncio.to_thread(gate.__exit__, None, None, None)

    def acting(self, unit: str) -> GateProcess | None:
        """The gate that acts for the unit's cell, by its metrics."""
        label = f'cell="{_cell(unit)}"'
        acts = (gate for gate in self.gates if metric_sum(gate.metrics(), "cellgate_acting", label))
        return next(acts, None)

    def deeds(self) -> list[Deed]:
        """All so far."""
        lines = self._written.read_text().splitlines() if self._written.exists() else []
        return [Deed(unit, *map(int, rest)) for unit, *rest in map(str.split, lines)]

    def _gate(self) -> GateProcess:
        words = '"$CELLGATE_UNIT $CELLGATE_FENCE $CELLGATE_ATTEMPT $PPID"'
        recovery = {
            "command": ["sh", "-c", f"echo {words} >> {self._written}"],
            "audit": str(self._audit),
            "after_s": AFTER_S,
            "timeout_s": 5.0,
            "backoff_s": REST_S,
            "attempts": 9,
        }
        cells = [
            {
                "name": _cell(name),
                "units": [{"name": name, "url": f"http://127.0.0.1:{door.port}"}],
            }
            for name, door in self.doors.items()
        ]
        units = [Named(name, "") for name in self.doors]
        operator = {"recovery": [{"cell": _cell(name), **recovery} for name in self.doors]}
        return GateProcess(units, settings={"redis": self.redis.url, "cells": cells}, operator=operator)

    async def _end(self) -> None:
        for gate in self.gates:
            await asyncio.to_thread(gate.__exit__, None, None, None)


Fault = Callable[[Fleet, random.Random], Awaitable[None]]


async def _kill_a_gate(fleet: Fleet, rng: random.Random) -> None:
    await fleet.kill(rng.choice(fleet.gates))


async def _kill_the_acting_gate(fleet: Fleet, rng: random.Random) -> None:
    gate = await asyncio.to_thread(fleet.acting, rng.choice(list(fleet.doors)))
    if gate is not None:
        await fleet.kill(gate)


async def _stop_the_acting_gate(fleet: Fleet, rng: random.Random) -> None:
    gate = await asyncio.to_thread(fleet.acting, rng.choice(list(fleet.doors)))
    if gate is not None:
        os.kill(gate.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(STOPPED_S)
        finally:
            os.kill(gate.pid, signal.SIGCONT)


async def _restart_redis(fleet: Fleet, rng: random.Random) -> None:
    fleet.redis.kill()
    await asyncio.sleep(rng.uniform(0.0, 2.0))
    await asyncio.to_thread(fleet.redis.start)


async def _nothing(_fleet: Fleet, _rng: random.Random) -> None: ...


FAULTS: Mapping[str, Fault] = {
    "a gate killed": _kill_a_gate,
    "the acting gate killed": _kill_the_acting_gate,
    "the acting gate stopped": _stop_the_acting_gate,
    "Redis came back empty": _restart_redis,
    "nothing": _nothing,
}


async def one_round(fleet: Fleet, fault: str, rng: random.Random) -> Round:
    """Lose all units, let the fault happen, and wait until each has been restarted for long enough."""
    before = len(fleet.deeds())
    for door in fleet.doors.values():
        await door.shut()
    await asyncio.sleep(AFTER_S + rng.uniform(-0.5, 2.0))
    await FAULTS[fault](fleet, rng)
    await until(lambda: len({deed.unit for deed in fleet.deeds()[before:]}) == UNITS, PATIENCE_S)
    await asyncio.sleep(LINGER_S)
    deeds = fleet.deeds()[before:]
    for door in fleet.doors.values():
        await door.open()
    await fleet.fill_up()
    await fleet.forget()
    return Round(fault, {unit: [deed for deed in deeds if deed.unit == unit] for unit in fleet.doors})


async def trials(size: int, wanted: int, rng: random.Random) -> list[str]:
    """Lose so many units, in rounds; what must not have been."""
    problems, rounds = list[str](), list[Round]()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="one-actor-")))
        fleet = Fleet(size, stack.enter_context(redis_server()), folder, stack)
        await fleet.start()
        while len(rounds) * UNITS < wanted:
            fault = list(FAULTS)[len(rounds) % len(FAULTS)]
            progress.phase(f"{size} gates, {len(rounds) * UNITS} of {wanted}, {len(problems)} problems")
            rounds.append(await one_round(fleet, fault, rng))
            problems += rounds[-1].problems()
        problems += _out_of_order(fleet.deeds())
    for fault in FAULTS:
        these = [len(deeds) for each in rounds if each.fault == fault for deeds in each.deeds.values()]
        print(f"{size} gates, {fault}: {these.count(1)} of {len(these)} units restarted exactly once")
    return problems


def _out_of_order(deeds: Sequence[Deed]) -> list[str]:
    last: dict[str, int] = {}
    problems = []
    for deed in deeds:
        if deed.fence < last.get(deed.unit, 0):
            problems.append(f"{deed} after fencing token {last[deed.unit]}")
        last[deed.unit] = deed.fence
    return problems


def _cell(unit: str) -> str:
    return f"cell-{unit}"


@progress.shown("one-actor")
def main() -> int:
    """Try with each number of gates; 0 when all holds."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.one_actor", description=__doc__)
    parser.add_argument("--gates", default="2,5", help="how many, one number after the other")
    parser.add_argument("--trials", type=int, default=200, help="units lost, with each number of gates")
    parser.add_argument("--seed", type=int, default=1, help="of the moments at which faults happen")
    args = parser.parse_args()
    problems: list[str] = []
    for size in map(int, args.gates.split(",")):
        problems += uvloop.run(trials(size, args.trials, random.Random(args.seed)))
    print(verdict(problems))
    print_problems(problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
