"""What a gate reads of others beside their heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, cast

from cellgate.proxy.redis.commands import IndexEntry, RedisCommands
from cellgate.proxy.redis.reports import DOCUMENT_BEATS, BeatWriter, Roster, UnitReport, written
from cellgate.proxy.redis.sharing import ReportReading
from cellgate.router.nouns import Verdict

EXPIRY_S = 0.75


class OneWriter:
    """A Redis in which gate g1 has a heartbeat, and documents of its units; g2 reads them."""

    def __init__(self) -> None:
        self.counts = {"beats_read": 0, "documents_read": 0, "documents_refused": 0}
        self.roster = Roster("g2")
        self.reading = ReportReading(self.roster, lambda: 0.0, EXPIRY_S, self.counts, lambda *_: None)
        self.documents: dict[str, bytes] = {}
        self._writer = BeatWriter("g1")

    async def get_beats(self, gates: Iterable[str]) -> AsyncIterator[tuple[str, Any, Any]]:
        for gate in gates:
            yield gate, self._beat, round(1000 * EXPIRY_S)

    async def get(self, members: Iterable[IndexEntry]) -> AsyncIterator[tuple[IndexEntry, Any, Any]]:
        for member in members:
            yield member, self.documents.get(member.unit), round(1000 * EXPIRY_S * DOCUMENT_BEATS)

    def read(self, *index: IndexEntry) -> None:
        """At the next heartbeat."""
        for unit in ("u1", "u2"):
            self._writer.take(UnitReport(unit, "a", "g1", Verdict.UP, f"http://{unit}"), 0.0)
        self._beat, _ = self._writer.beat(has_prefixes=False)
        asyncio.run(self._read(index))

    async def _read(self, index: Iterable[IndexEntry]) -> None:
        await self.reading.read(cast("RedisCommands", self), set(index))


def entry(unit: str, gate: str = "g1") -> IndexEntry:
    return IndexEntry("a", unit, gate)


def read_until_whole() -> OneWriter:
    redis = OneWriter()
    for _ in range(2 * DOCUMENT_BEATS):
        redis.read(entry("u1"), entry("u2"))
    assert redis.roster.units() == {"u1", "u2"}
    redis.counts["documents_read"] = 0
    return redis


def test_documents_of_a_gate_with_heartbeats_are_not_read() -> None:
    redis = read_until_whole()
    redis.documents["u1"] = written(UnitReport("u1", "a", "g1", Verdict.UP, "http://u1"))
    redis.read(entry("u1"), entry("u2"))
    assert redis.counts["documents_read"] == 0


def test_the_document_of_a_unit_that_is_not_known_yet_is_read() -> None:
    redis = read_until_whole()
    redis.documents["u3"] = written(UnitReport("u3", "a", "g1", Verdict.UP, "http://u3"))
    redis.read(entry("u1"), entry("u2"), entry("u3"))
    assert redis.roster.units() == {"u1", "u2", "u3"}


def test_an_entry_without_a_document_is_noted_also_when_its_gate_has_a_heartbeat_or_is_the_own_one() -> None:
    redis = read_until_whole()
    gone, own = entry("u9"), entry("u8", "g2")
    for _ in range(3):
        redis.read(entry("u1"), gone, own)
    assert (redis.reading.absent[gone], redis.reading.absent[own]) == (3, 3)
