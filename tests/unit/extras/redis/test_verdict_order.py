"""An older verdict is never shown or passed on after a newer one, and the newest always arrives, in whatever
order channel, documents and beats come.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest

from cellgate.extras.redis.reports import (
    DOCUMENT_BEATS,
    HEARTBEAT_S,
    BeatWriter,
    Seen,
    UnitReport,
    read_report,
    written,
)
from cellgate.extras.redis.roster import Roster, RosterKey
from cellgate.extras.redis.sharing import ReportReading
from cellgate.router.nouns import Verdict

UNITS = ("u1", "u2")
LATE_S = 0.6
"""What a message, or an answer of Redis, may take at most."""
LASTS_S = 2.0
EXPIRY_S = 0.75
QUIET_S = (DOCUMENT_BEATS + 8) * HEARTBEAT_S + 2.0 * LATE_S
"""By then each document was written again, and read."""


class World:
    """Gates that write, and one that reads; things happen in the order of their times."""

    def __init__(self, seed: int, gates: int) -> None:
        self.rng = Random(seed)
        self.now = 100.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.roster = Roster("reader")
        self.counts = {"beats_read": 0, "documents_read": 0, "documents_refused": 0}
        self.reading = ReportReading(self.roster, lambda: self.now, EXPIRY_S, self.counts, self.hear)
        self.wrong: list[str] = []
        self.shown: dict[RosterKey, int] = {}
        self.passed_on: dict[RosterKey, tuple[int, Verdict]] = {}
        self.documents: dict[RosterKey, bytes] = {}
        self.latest: dict[RosterKey, UnitReport] = {}
        self.texts: dict[str, tuple[bytes, float]] = {}
        self.ends_at = self.now + LASTS_S
        self.gates = [f"g{number}" for number in range(gates)]
        for gate in self.gates:
            Writer(self, gate)
        self.later(self.rng.uniform(0.0, HEARTBEAT_S), self.read)

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._order), do))

    def late_s(self) -> float:
        """Mostly at once; now and then something stands still."""
        return self.rng.uniform(0.0, LATE_S if self.rng.random() < 0.2 else 0.01)

    def play(self) -> None:
        while self._due and self._due[0][0] < self.ends_at + QUIET_S:
            self.now, _, do = heapq.heappop(self._due)
            do()
            self._look()

    def _look(self) -> None:
        for key, report, _ in self.roster.everything():
            if report.number < self.shown.get(key, 0):
                self.wrong.append(f"{self.now:.3f} {key}: {report.number} is shown after {self.shown[key]}")
            self.shown[key] = report.number

    # -- the reader, as RedisLink and ReportReading are ----------------------------------------------------

    def hear(self, key: RosterKey, one: Seen) -> None:
        if self.roster.is_news(key, one.report):
            number, _ = self.passed_on.get(key, (0, None))
            if one.report.number <= number:
                self.wrong.append(f"{self.now:.3f} {key}: {one.report.number} is told after {number}")
            self.passed_on[key] = one.report.number, one.report.verdict

    def received(self, document: bytes) -> None:
        report = read_report(document)
        assert report is not None
        key = report.unit, report.gate
        if self.roster.update(key, Seen(report, 0.0), self.now):
            self.hear(key, Seen(report, 0.0))

    def read(self) -> None:
        """What Redis has now is taken over a while later, after what the channel has told meanwhile."""
        beats = {gate: text for gate, (text, at) in self.texts.items() if self.now - at < EXPIRY_S}
        documents = dict(self.documents)
        self.later(self.late_s(), lambda: self.take(beats, documents))

    def take(self, beats: dict[str, bytes], documents: dict[RosterKey, bytes]) -> None:
        async def get_beats(gates: Iterable[str]) -> AsyncIterator[tuple[str, Any]]:
            for gate in gates:
                yield gate, beats.get(gate)

        async def documents_of(gate: str, _cursor: int) -> tuple[int, list[tuple[str, bytes]]]:
            return 0, [(key[0], document) for key, document in documents.items() if key[1] == gate]

        commands = Mock(get_beats=get_beats, documents=documents_of)
        asyncio.run(self.reading.read(commands, self.gates))
        self.later(HEARTBEAT_S, self.read)


class Writer:
    """One gate: verdicts within milliseconds of each other, and beats."""

    def __init__(self, world: World, gate: str) -> None:
        self._world, self._gate, self._beat = world, gate, BeatWriter(gate)
        self._number = 0
        for unit in UNITS:
            self._set(UnitReport(unit, "a", gate, Verdict.STARTING))
        world.later(world.rng.uniform(0.0, HEARTBEAT_S), self.beat)
        world.later(world.rng.uniform(0.0, 0.5), self.flip)

    def _set(self, report: UnitReport) -> UnitReport:
        self._number += 1
        report = replace(report, number=self._number, at_s=self._world.now)
        self._world.latest[report.unit, self._gate] = report
        return report

    def flip(self) -> None:
        world, rng = self._world, self._world.rng
        if world.now > world.ends_at:
            return
        key = rng.choice(UNITS), self._gate
        others = [verdict for verdict in Verdict if verdict is not world.latest[key].verdict]
        document = written(self._set(replace(world.latest[key], verdict=rng.choice(others))))
        world.documents[key] = document
        if rng.random() > 0.1:
            world.later(world.late_s(), lambda: world.received(document))
        world.later(rng.choice((0.002, 0.01, 0.1, 1.0)) * rng.random(), self.flip)

    def beat(self) -> None:
        world = self._world
        for unit in UNITS:
            report = world.latest[unit, self._gate]
            report = replace(report, in_flight=world.rng.randrange(3), at_s=world.now)
            self._beat.take(report, world.now)
        text, due = self._beat.beat(world.now, has_prefixes=False)
        for report in due:
            world.documents[report.unit, self._gate] = written(report)
        world.texts[self._gate] = text, world.now
        # Now and then a gate stands still for longer than the readers remember.
        stands_s = 1.5 if world.rng.random() < 0.03 else 0.0
        world.later(HEARTBEAT_S * world.rng.uniform(0.9, 1.0) + stands_s, self.beat)


def wrong_in(seed: int) -> list[str]:
    """What was wrong in one order."""
    world = World(seed, gates=1 + seed % 7)
    world.play()
    for key, report in world.latest.items():
        said = world.roster.said(*key)
        if said is None or (said.number, said.verdict) != (report.number, report.verdict):
            world.wrong.append(f"{key}: {said} and not {report}")
        if world.passed_on.get(key) != (report.number, report.verdict):
            world.wrong.append(f"{key}: {world.passed_on.get(key)} was told last, and not {report.number}")
    return world.wrong


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(10_000), marks=pytest.mark.nightly)])
def test_no_verdict_comes_after_a_newer_one_and_the_newest_is_told(seeds: range) -> None:
    assert {seed: wrong[:3] for seed in seeds if (wrong := wrong_in(seed))} == {}
