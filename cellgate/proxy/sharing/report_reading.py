"""Reads what other gates report: their beats, and documents where beats do not say all (beats.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any

from cellgate.proxy.sharing.beats import Beat, BeatReader, read_beat
from cellgate.proxy.sharing.redis_commands import SLICE, IndexEntry, RedisCommands
from cellgate.proxy.sharing.roster import Roster, RosterKey
from cellgate.proxy.sharing.unit_report import DOCUMENT_BEATS, Seen, age_s, read_report


class ReportReading:
    """The part of one gate. `expiry_s` is that of a beat; `on_report` is called with each report that is new.
    `counts` are those of the link.
    """

    def __init__(
        self,
        roster: Roster,
        now: Callable[[], float],
        expiry_s: float,
        counts: dict[str, int],
        on_report: Callable[[RosterKey, Seen], None],
    ) -> None:
        self._roster = roster
        self._now = now
        self._expiry_s = expiry_s
        self._counts = counts
        self._on_report = on_report
        self._beats = BeatReader()
        self.absent: dict[IndexEntry, int] = {}
        """For how many looks there was no document at an entry of the index."""

    def restart(self) -> None:
        """Redis may have been away."""
        self._beats.restart()

    async def read(self, commands: RedisCommands, index: Collection[IndexEntry]) -> Mapping[str, Beat]:
        """Take over all that is new of these, without those of this gate; returns the beats, by gate."""
        beats = await self._read_beats(commands, {member.gate for member in index} - {self._roster.own})
        behind = {gate for gate, (beat, at) in beats.items() if self._beats.misses(beat, at)}
        unsaid = (
            member
            for member in index
            if member.gate not in beats
            or member.gate in behind
            # Its document was refused by a full Redis, or is gone.
            or self._roster.said(member.unit, member.gate) is None
        )
        seen: dict[RosterKey, Seen] = {}
        async for member, document, pttl_ms in commands.get(unsaid):
            key = member.unit, member.gate
            if (one := self._seen(key, document, pttl_ms, has_beat=member.gate in beats)) is not None:
                seen[key] = one
            self.absent[member] = self.absent.get(member, 0) + 1 if document is None else 0
        # A document that was read may be older than a message on the channel meanwhile.
        for key in self._roster.answered(seen, self._now()):
            self._on_report(key, seen[key])
        for beat, at in beats.values():
            await self._take(beat, at)
        return {gate: beat for gate, (beat, _) in beats.items()}

    async def _read_beats(self, commands: RedisCommands, gates: set[str]) -> dict[str, tuple[Beat, float]]:
        """The beats of those who have one, and when each was written."""
        found: dict[str, tuple[Beat, float]] = {}
        async for gate, document, pttl_ms in commands.get_beats(sorted(gates)):
            beat = read_beat(document, gate) if document is not None else None
            age = age_s(pttl_ms, self._expiry_s) if isinstance(pttl_ms, int) else None
            if beat is not None and age is not None:
                found[gate] = beat, self._now() - age
                self._counts["beats_read"] += 1
            elif document is not None:
                self._counts["documents_refused"] += 1
        self._beats.keep(set(found))
        return found

    async def _take(self, beat: Beat, at: float) -> None:
        self._roster.beat(beat.gate, at)
        for number, (unit, row) in enumerate(beat.rows.items(), 1):
            report = self._roster.change((unit, beat.gate), row if isinstance(row, dict) else None, at)
            if report is not None:
                self._on_report((unit, beat.gate), Seen(report, self._now() - at))
            if number % SLICE == 0:
                await asyncio.sleep(0)
        if (since := self._beats.whole_since(beat)) is not None:
            self._roster.drop_older(beat.gate, since)

    def _seen(self, key: RosterKey, document: Any, pttl_ms: Any, *, has_beat: bool) -> Seen | None:
        """The report at a key; None when it is missing or invalid, or of a gate whose beat has ended."""
        if document is None:
            return None
        expiry_s = self._expiry_s * (DOCUMENT_BEATS if has_beat else 1)
        age = age_s(pttl_ms, expiry_s) if isinstance(pttl_ms, int) else None
        report = read_report(document) if isinstance(document, bytes) else None
        if report is None or age is None or (report.unit, report.gate) != key:
            self._counts["documents_refused"] += 1
            return None
        self._counts["documents_read"] += 1
        return Seen(report, age) if has_beat or not report.beats else None
