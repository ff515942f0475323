"""What sharing through Redis costs a gate: what changes, and not what is there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from statistics import mean
from typing import Any, cast

from cellgate.extras.redis.commands import RedisCommands
from cellgate.extras.redis.link import RedisLink
from cellgate.extras.redis.reports import DOCUMENT_BEATS, BeatWriter, UnitReport, written
from cellgate.extras.redis.roster import Roster
from cellgate.extras.redis.sharing import TURN_BEATS, Sharing
from cellgate.extras.redis_client.redis_names import Names
from cellgate.extras.redis_client.servers import Command, RedisClient
from cellgate.router.nouns import Ask, Verdict
from cellgate.router.unit_state import Lease
from tests.cost.bench import Bench, costs_what_works, counted
from tests.sim.redis import SimRedis

WORKING = 4
BEATS = TURN_BEATS
FIRST = 2 * DOCUMENT_BEATS


class Clock:
    """All that is there of a world."""

    def __init__(self) -> None:
        self.loop, self.now, self.rng = self, 1e6, random.Random(1)

    def time(self) -> float:
        return self.now


class Gate:
    """A gate of so many units and its line to Redis, which answers at once."""

    def __init__(self, name: str, units: int, clock: Clock, redis: SimRedis) -> None:
        self.loop = asyncio.new_event_loop()
        self.bench, self._clock, self._redis = Bench(self.loop, units), clock, redis
        self.board = self.bench.plane.board
        self.board.attention.configure(self.board.units, clock.now)
        self.roster = Roster(name)
        self.sharing = Sharing(
            self.board, name, self.roster, clock.time, self.board.observe, lambda _unit: None
        )
        client = cast("RedisClient", self)
        self.link = RedisLink(
            lambda: client,
            name,
            self.sharing.changes,
            self.roster,
            now=clock.time,
            rng=clock.rng,
            on_flip=self.sharing.received,
            tell=lambda _line: None,
            names=Names(),
        )
        self._commands = RedisCommands(client, Names())
        self.sent = 0

    async def exchange(self, commands: Sequence[Command], _limit_s: float = 1.0) -> list[Any]:
        self.sent += len(commands)
        return [self._redis.do(command) for command in commands]

    def beat(self) -> int:
        """A heartbeat and a tick; its bytecodes."""
        self.board.attention.tick(self._clock.now)
        with counted() as counts:
            self.loop.run_until_complete(self._beat())
        return counts.total()

    async def _beat(self) -> None:
        await self.link._write(self._commands)
        await self.link._read(self._commands)
        self.board.remote_load = self.sharing.tick(self._clock.now)

    def close(self) -> None:
        self.bench.close()
        self.loop.close()


def beats(units: int) -> tuple[list[int], float]:
    """Bytecodes of each heartbeat of one of two gates of so many units, and its commands in each. Both have
    requests at a few units, and more or fewer of them at each beat.
    """
    clock, found, sent = Clock(), list[int](), 0
    redis = SimRedis(cast("Any", clock))
    gates = [Gate(name, units, clock, redis) for name in ("g1", "g2")]
    leases: dict[Gate, list[Lease]] = {gate: [] for gate in gates}
    for number in range(FIRST + BEATS):
        clock.now += 0.25
        if number == FIRST:
            sent = gates[0].sent
        for gate in gates:
            for name in list(gate.board.units)[:WORKING]:
                gate.board.units[name].progress_at = clock.now - 0.01
                leases[gate].append(gate.board.open(name, Ask("m", stream=True), clock.now, retry=False))
            if not number % 2:
                while leases[gate]:
                    gate.board.close(leases[gate].pop(), clock.now)
        gates[1].beat()
        cost = gates[0].beat()
        if number >= FIRST:
            found.append(cost)
    known, load = len(gates[0].roster.units()), gates[0].board.remote_load
    assert (known, len(load)) == (units, WORKING)
    for gate in gates:
        gate.close()
    return found, (gates[0].sent - sent) / BEATS


def test_a_heartbeat_with_a_thousand_units_costs_what_those_cost_that_work() -> None:
    (few, few_sent), (many, many_sent) = beats(WORKING), beats(1000)
    costs_what_works("a heartbeat", few, many)
    print(f"its commands: {few_sent:.1f} and {many_sent:.1f}")
    assert max(many) <= 2 * max(few)
    # The document of the unit whose turn it is.
    assert many_sent <= few_sent + 2


def of_many(others: int) -> tuple[int, float]:
    """Bytecodes and commands of a heartbeat beside so many gates that have requests at all of 40 units."""
    clock, names = Clock(), Names()
    redis = SimRedis(cast("Any", clock))
    gate = Gate("g", 40, clock, redis)
    units, (cell,) = list(gate.board.units), {state.unit.cell for state in gate.board.units.values()}
    writers = [BeatWriter(f"p{number}") for number in range(others)]
    costs, sent = list[int](), 0
    all_read = 2 * FIRST
    for number in range(all_read + 4):
        clock.now += 0.25
        for writer in writers:
            for unit in units:
                writer.take(UnitReport(unit, cell, writer.gate, Verdict.UP, in_flight=number), clock.now)
            beat, due = writer.beat(clock.now, has_prefixes=False, others=others)
            for report in due:
                redis.hset(names.units_of(writer.gate), report.unit, written(report))
            redis.set(names.beat(writer.gate), beat, "PX", 750)
            redis.sadd(names.gates_of(cell), writer.gate)
        if number < all_read:
            gate.loop.run_until_complete(gate._beat())
            sent = gate.sent
        else:
            costs.append(gate.beat())
    gate.close()
    return round(mean(costs)), (gate.sent - sent) / 4


def first_reading(units: int) -> float:
    """Bytecodes for each document of another gate, with the tick after it. Its units are as usual."""
    clock, names = Clock(), Names()
    redis = SimRedis(cast("Any", clock))
    gate, writer = Gate("g", units, clock, redis), BeatWriter("p")
    (cell,) = {state.unit.cell for state in gate.board.units.values()}
    for unit in gate.board.units:
        report = UnitReport(
            unit, cell, "p", Verdict.UP, f"http://{unit}", models=("m",), number=1, itl_s=0.02
        )
        writer.take(report, clock.now)
    gate.beat()
    redis.sadd(names.gates_of(cell), "p")
    costs = list[int]()
    for _ in range(2):
        clock.now += 0.25
        beat, due = writer.beat(clock.now, has_prefixes=False)
        for report in due:
            redis.hset(names.units_of("p"), report.unit, written(report))
        redis.set(names.beat("p"), beat, "PX", 750)
        costs.append(gate.beat())
    assert gate.link.counts["documents_read"] == units
    gate.close()
    return (costs[0] - costs[1]) / units


def test_the_first_reading_of_a_gate_costs_what_its_documents_say() -> None:
    """A document of which all 33 fields are written and read takes more."""
    few, many = first_reading(100), first_reading(1000)
    print(f"a document: {few:.0f} bytecodes of 100, {many:.0f} of 1,000")
    assert many <= 1.1 * few
    assert many <= 2200


def test_what_other_gates_tell_costs_a_gate_the_same_however_many_they_are() -> None:
    """All together tell so many changes; more gates tell them more rarely each."""
    (few, few_sent), (many, many_sent) = of_many(16), of_many(63)
    print(f"beside 16 gates: {few} bytecodes, {few_sent} commands; beside 63: {many}, {many_sent}")
    assert many <= 1.25 * few
    assert many_sent == few_sent
