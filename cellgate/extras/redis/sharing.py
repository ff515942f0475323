"""Reads what other gates report: their beats, and documents where beats do not say all (reports.py).

In this order: `ReportReading`, `PrefixSharing`, `SharedLimits`, `Sharing`.
"""

from __future__ import annotations

import asyncio
import random
import struct
from base64 import b64encode
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from math import ceil, inf
from secrets import token_hex
from typing import Any, NamedTuple

import orjson

from cellgate.extras.redis.commands import SLICE, RedisCommands
from cellgate.extras.redis.reports import (
    HEARTBEAT_S,
    LOAD_FIELDS,
    Beat,
    BeatReader,
    MissedBeats,
    ReceivedBeat,
    Seen,
    UnitReport,
    read_beat,
    read_report,
    report_of,
    written_at,
)
from cellgate.extras.redis.roster import Roster, RosterKey
from cellgate.extras.redis_client.connect import Connect, Outage, in_words
from cellgate.extras.redis_client.redis_names import Names
from cellgate.extras.redis_client.servers import Command, RedisClient, answered
from cellgate.proxy.admission.limits import LimitLedger, Meter
from cellgate.proxy.observe.events import Action
from cellgate.proxy.process.tasks import end_tasks
from cellgate.router.board import Board, Flip
from cellgate.router.cost_model import NO_REMOTE_LOAD, RemoteLoad
from cellgate.router.nouns import Evidence, Sign, Strength, Verdict
from cellgate.router.prefix import ProvenPrefixes, RemotePrefixes
from cellgate.router.unit_state import UnitState

BEATS_READ, DOCUMENTS_MAX = 256, 20_000
"""So many heartbeats are read in one look at most; and so many documents of one gate."""
DOCUMENTS_READ, DOCUMENTS_S = 2048, 0.05
"""So many documents are read in one look at most, and for so long: who takes longer for a look than others
for some heartbeats takes them for silent.
"""
KEPT_LOOKS = 20
"""What was read of a gate is known for so many looks without a heartbeat of it: it may only be late."""
LARGE_BYTES, LOUD_S = 65_536, 10.0
"""Of a gate whose heartbeat is larger than that and says nothing, none is read for so long."""


@dataclass(slots=True)
class _Reading:
    """All documents of one gate, of which something was missed: those that were read, since when, whether
    each has what was missed, and where the next ones begin.
    """

    behind: MissedBeats
    since: float = -inf
    has_missed: bool = False
    units: set[str] = field(default_factory=set)
    cursor: int = 0

    def begin(self, received: ReceivedBeat) -> None:
        """The first ones are about to be read. Of many gates some wait for long, and are read but once."""
        if self.since == -inf:
            self.since, self.has_missed = received.at, received.beat.number >= self.behind.again_at


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
        self._counts = counts
        self._on_report = on_report
        self._beats = BeatReader(expiry_s)
        self._loud: dict[str, float] = {}
        self._readings: dict[str, _Reading] = {}
        self.absent: dict[str, int] = {}
        """For how many looks a gate of the index had no beat."""

    def restart(self) -> None:
        """Redis may have been away, or be another one. What was missed is known by the numbers of beats."""
        self._readings.clear()

    async def read(self, commands: RedisCommands, gates: Collection[str]) -> Mapping[str, Beat]:
        """Take over all that is new of these gates, without this one; returns the beats, by gate."""
        for gate in self._roster.take_ended():
            self._beats.forget(gate)
        asked = self._asked(gates)
        beats = await self._read_beats(commands, asked)
        for gate in asked:
            if gate in beats:
                self.absent.pop(gate, None)
            else:
                self.absent[gate] = self.absent.get(gate, 0) + 1
        late = {gate for gate, looks in self.absent.items() if looks < KEPT_LOOKS}
        self._beats.keep(beats.keys() | late)
        self._roster.answered(self._now())
        # What is new first: the documents of many gates take minutes.
        for received in beats.values():
            await self._take(received)
        await self._read_documents(commands, beats)
        return {gate: received.beat for gate, received in beats.items()}

    def _asked(self, gates: Collection[str]) -> list[str]:
        """The gates that may have a beat, without those that have said much that was nothing just now. There
        are more than any fleet has: those first that had one.
        """
        now = self._now()
        self._loud = {gate: until for gate, until in self._loud.items() if until > now}
        others = [gate for gate in gates if gate != self._roster.own]
        if len(others) > BEATS_READ:
            others = sorted(others, key=lambda gate: (not self._beats.knows(gate), gate))[:BEATS_READ]
        return sorted(gate for gate in others if gate not in self._loud)

    async def _read_beats(self, commands: RedisCommands, gates: Iterable[str]) -> dict[str, ReceivedBeat]:
        """The beats of those who have one."""
        found: dict[str, ReceivedBeat] = {}
        asked_at = self._now()
        async for gate, document in commands.get_beats(gates):
            size = len(document) if isinstance(document, bytes) else 0
            if size > LARGE_BYTES:
                # One such takes milliseconds.
                await asyncio.sleep(0)
            beat = read_beat(document, gate) if document is not None else None
            if beat is None and size > LARGE_BYTES:
                self._loud[gate] = self._now() + LOUD_S
            received = self._beats.hear(beat, self._now(), asked_at) if beat is not None else None
            if received is not None:
                found[gate] = received
                self._counts["beats_read"] += 1
            elif document is not None:
                self._counts["documents_refused"] += 1
        return found

    async def _read_documents(self, commands: RedisCommands, beats: Mapping[str, ReceivedBeat]) -> None:
        """Some of the gates of which something was missed, one gate after the other: an exchange that takes
        longer than some heartbeats misses more of them.
        """
        self._begin(beats)
        left, ends_at = DOCUMENTS_READ, self._now() + DOCUMENTS_S
        for gate in [gate for gate in self._readings if gate in beats]:
            reading = self._readings[gate]
            while gate in self._readings:
                if left <= 0 or self._now() >= ends_at:
                    return
                reading.begin(beats[gate])
                left -= max(1, await self._read_some(commands, reading, beats[gate]))

    async def _read_some(self, commands: RedisCommands, reading: _Reading, received: ReceivedBeat) -> int:
        """The next documents of one gate; how many."""
        gate = received.beat.gate
        reading.cursor, found = await commands.documents(gate, reading.cursor)
        for number, (unit, document) in enumerate(found, 1):
            self._take_document(reading, received, unit, document)
            if number % SLICE == 0:
                await asyncio.sleep(0)
        if not reading.cursor or len(reading.units) > DOCUMENTS_MAX:
            self._end(gate, reading)
        return len(found)

    def _begin(self, beats: Mapping[str, ReceivedBeat]) -> None:
        for gate in self._readings.keys() - self._beats.behind.keys():
            del self._readings[gate]
        for gate, behind in self._beats.behind.items():
            reading, received = self._readings.get(gate), beats.get(gate)
            if received is None or (reading is not None and reading.behind is behind):
                continue
            if not behind.is_read or received.beat.number >= behind.again_at:
                self._readings[gate] = _Reading(behind)

    def _end(self, gate: str, reading: _Reading) -> None:
        """All documents of a gate were read. Of one that has none Redis may have lost them."""
        del self._readings[gate]
        reading.behind.is_read = True
        if reading.has_missed and reading.units and self._beats.behind.get(gate) is reading.behind:
            del self._beats.behind[gate]
            self._roster.drop_others(gate, reading.units, reading.since)

    def _take_document(self, reading: _Reading, received: ReceivedBeat, unit: str, document: bytes) -> None:
        report, beat = read_report(document), received.beat
        if report is None or (report.unit, report.gate) != (unit, beat.gate):
            self._counts["documents_refused"] += 1
            return
        self._counts["documents_read"] += 1
        reading.units.add(unit)
        newest = reading.behind.newest(report, written_at(report, beat, received.at))
        if newest is not None:
            # It may be older than a message on the channel meanwhile.
            now = self._now()
            seen = Seen(newest[0], max(0.0, now - newest[1]))
            if self._roster.update((unit, beat.gate), seen, now):
                self._on_report((unit, beat.gate), seen)

    async def _take(self, received: ReceivedBeat) -> None:
        gate, at = received.beat.gate, received.at
        self._roster.beat(gate, at)
        for number, (unit, row) in enumerate(received.rows.items(), 1):
            news = row if isinstance(row, dict) else None
            report = self._roster.change((unit, gate), news, at)
            # Load alone changes no verdict.
            if report is not None and report.is_whole and news and not news.keys() <= LOAD_FIELDS:
                self._on_report((unit, gate), Seen(report, self._now() - at))
            if number % SLICE == 0:
                await asyncio.sleep(0)


# Hashes of cached prompts that gates share: a JSON document for each gate. docs/redis.md describes it.
#
# It has hashes of blocks of prompts (proxy/request/prompt.py), by unit, that the gate has just proven there.
# While a gate is new it has what was told before, too (`again`): believed for less long and told no further,
# so that nothing lives on because gates come and go. Pure except for the Board. Advisory like everything in
# Redis: a document that is invalid, or of a gate that does not report the unit, is counted and ignored. A
# wrong one makes units look cheaper for some prompts, until the cached tokens that engines report correct it.


VERSION = 1
HASHES_A_BEAT = 256
"""The most new hashes in one heartbeat: 3 kB."""
BEATS = 2
"""Each new hash is published in this many heartbeats, because a reader misses one now and then."""
SHARED_HASHES_MAX = 1024
"""The most hashes that are in one document, with those that were told before."""
DOCUMENT_MAX = 64 * 1024
GATES_MAX = 64
"""The most other gates whose documents are read."""
_BLOCK_BITS = 60

PrefixDocument = dict[str, list[int]]


def written(gate: str, reported: PrefixDocument, again: PrefixDocument) -> bytes:
    """The document."""
    more = {"again": _packed(again)} if again else {}
    return orjson.dumps({"v": VERSION, "gate": gate, "units": _packed(reported), **more})


def _packed(hashes: PrefixDocument) -> dict[str, str]:
    return {
        unit: b64encode(struct.pack(f"<{len(blocks)}Q", *blocks)).decode() for unit, blocks in hashes.items()
    }


def read(document: Any) -> tuple[str, PrefixDocument, PrefixDocument] | None:
    """The gate, its new hashes, and those from before; None when the document is invalid."""
    try:
        found = (
            orjson.loads(document) if isinstance(document, bytes) and len(document) <= DOCUMENT_MAX else None
        )
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict) or found.get("v") != VERSION:
        return None
    gate, left = found.get("gate"), SHARED_HASHES_MAX
    hashes: list[PrefixDocument] = []
    for units in (found.get("units"), found.get("again", {})):
        if not isinstance(gate, str) or not isinstance(units, dict):
            return None
        hashes.append({})
        for unit, text in units.items():
            if (blocks := _blocks(text)) is None:
                return None
            hashes[-1][unit] = blocks[:left]
            left -= len(hashes[-1][unit])
    return str(gate), hashes[0], hashes[1]


class _Part(NamedTuple):
    """What was published of one unit in one heartbeat. `restarted`: as its case had it then."""

    unit_state: UnitState
    restarted: tuple[str, float] | None
    hashes: list[int]


class PrefixSharing:
    """The part of one gate. `roster` has the reports of other gates."""

    def __init__(self, board: Board, gate: str, roster: Roster, now: Callable[[], float]) -> None:
        self.remote = board.remote = RemotePrefixes()
        self._proven = board.proven = ProvenPrefixes()
        self._board = board
        self._gate = gate
        self._roster = roster
        self._now = now
        self._beats: list[list[_Part]] = []
        """What was published in the last heartbeats."""
        self._received: dict[str, int] = {}
        """By gate: the hash of the document that was read last."""
        self._numbers: dict[str, int] | None = None
        """By gate: the number of its last heartbeat. None: this gate has not looked for others yet."""
        self._again: Iterator[tuple[str, int]] = iter(())
        self._again_of: dict[str, tuple[UnitState, tuple[str, float] | None]] = {}
        """What is told again, and of which units, as their cases had it when that began."""

    def received_beats(self, beats: Mapping[str, int]) -> None:
        """The other gates have sent the heartbeats of these numbers. A new one is told what was told before:
        by each gate what it has proven, and by the first of those that know it what others have.
        """
        known, self._numbers = self._numbers, dict(beats)
        if known is None:
            return
        new = {gate for gate, number in beats.items() if number < known.get(gate, number + 1)}
        if len(known) <= BEATS_READ:
            # One that is away for a while is not new when it comes back.
            self._numbers = known | self._numbers
        if new:
            is_first = all(self._gate < gate for gate in known.keys() & beats.keys() - new)
            self._again = chain(self._proven.reported(), self.remote.recent() if is_first else ())
            self._again_of = {
                name: (state, state.case.restarted) for name, state in self._board.units.items()
            }

    def document(self) -> tuple[bytes | None, int]:
        """What to publish in this heartbeat (None: nothing), and how many hashes are new."""
        news, states = self._proven.take(HASHES_A_BEAT, self._now()), self._board.units
        beat = [
            _Part(states[u], states[u].case.restarted, hashes) for u, hashes in news.items() if u in states
        ]
        self._beats = [*self._beats[1 - BEATS :], beat]
        reported = PrefixDocument()
        for part in (part for beat in self._beats for part in beat):
            # The cache of an earlier incarnation is gone.
            if part.unit_state.case.restarted == part.restarted and not part.unit_state.retired:
                reported.setdefault(part.unit_state.unit.name, []).extend(part.hashes)
        again = self._published_again()
        document = written(self._gate, reported, again) if reported or again else None
        return document, sum(len(part.hashes) for part in beat)

    def _published_again(self) -> PrefixDocument:
        again = PrefixDocument()
        room = SHARED_HASHES_MAX - sum(len(part.hashes) for beat in self._beats for part in beat)
        for unit, block in islice(self._again, room):
            state, restarted = self._again_of.get(unit, (None, None))
            if state is not None and state.case.restarted == restarted and not state.retired:
                again.setdefault(unit, []).append(block)
        return again

    def received(self, gate: str, document: Any) -> int | None:
        """Apply the document of another gate; returns the number of hashes. None: it is ignored."""
        mark = hash(document) if isinstance(document, bytes) else 0
        if mark and self._received.get(gate) == mark:
            return 0
        found = read(document)
        if found is None or found[0] != gate or gate == self._gate:
            return None
        if len(self._received) >= GATES_MAX:
            self._received.clear()
        self._received[gate] = mark
        taken = 0
        for hashes, is_old in ((found[1], False), (found[2], True)):
            for unit, blocks in hashes.items():
                state = self._board.units.get(unit)
                if state is not None and self._is_of_now(state, gate):
                    self.remote.take(unit, blocks, self._now(), is_old=is_old)
                    taken += len(blocks)
        return taken

    def _is_of_now(self, state: UnitState, gate: str) -> bool:
        """Whether that gate reports the unit with the same epoch."""
        report = self._roster.said(state.unit.name, gate)
        if report is None or not report.is_whole:
            return False
        own, theirs = {epoch for _, epoch in state.case.epochs}, set(filter(None, report.epoch.split(",")))
        return not own or not theirs or not own.isdisjoint(theirs)


def _blocks(text: Any) -> list[int] | None:
    try:
        data = a2b_base64(text, strict_mode=True) if isinstance(text, str) else b"?"
        blocks = list(struct.unpack(f"<{len(data) // 8}Q", data))
    except (Base64Error, ValueError, struct.error):
        return None
    return blocks if max(blocks, default=0) >> _BLOCK_BITS == 0 else None


# Limits that gates share (proxy/admission/limits.py): each takes slices of counters in Redis, in the
# background.
#
# 1. No request waits for Redis. Without it each gate counts alone, which is said once.
# 2. A counter is a hash with an expiry: what each gate has taken of one limit in one window of the clock.
# Each writes its own number, so that a lost answer, or a server that has forgotten, changes nothing.


PERIOD_S, SOONEST_S = 0.25, 0.02
"""How often slices are taken; and at most so often while limits run low."""
LIMITS_ANSWER_S = 0.3
"""Without an answer for this long, each gate counts alone: that costs nobody a request."""
LIMITS_SLICE = 32
"""So many counters are in one exchange."""
QUIET_BEATS = 4
"""A limit that nobody uses here is looked at once in so many periods."""
SHARED_KEPT_S = 60
"""How long a counter outlives its window, for clocks that differ."""


class _Due(NamedTuple):
    """A counter to be looked at, what to take of it, and the window that it is of: the meter may go on to the
    next one before its turn comes, or before the answer does.
    """

    counter: str
    meter: Meter
    amount: int
    begins_at: float
    ends_at: float


class SharedLimits:
    """The part of one gate. `gates` gives how many share the limits; `tell` gets each change of state."""

    def __init__(
        self,
        ledger: LimitLedger,
        connect: Connect,
        names: Names,
        gates: Callable[[], int],
        tell: Callable[[Action], None],
        rng: random.Random,
    ) -> None:
        self._ledger = ledger
        self._client = connect()
        self._names = names
        self._me = token_hex(6)
        """The field of this gate in each counter."""
        self._gates = gates
        self._tell = tell
        self._rng = rng
        self._low = asyncio.Event()
        self._beats = 0
        ledger.on_low = self._low.set
        ledger.counts.shares = False
        self._was_shared: bool | None = None
        self._why = Outage()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, and run until `close`."""
        self._task = asyncio.create_task(self._forever(), name="redis limits")

    async def close(self) -> None:
        """End."""
        if self._task is not None:
            await end_tasks(self._task)
            # Only here: a task that is cancelled may already be closing connections, and leaves the others.
            with suppress(Exception):
                await self._client.disconnect()

    async def _forever(self) -> None:
        while True:
            try:
                while True:
                    await self._share(self._client)
                    await self._pause()
            except Exception as error:  # No exception may end this task, which has to reconnect.
                self._ledger.stand_alone()
                self._note(shares=False, why=in_words(error))
            with suppress(Exception):
                await self._client.disconnect()
            # With jitter, so that many gates do not reconnect at once.
            await asyncio.sleep(PERIOD_S * self._rng.uniform(0.5, 1.0))

    async def _pause(self) -> None:
        await asyncio.sleep(SOONEST_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(PERIOD_S - SOONEST_S):
                await self._low.wait()
        self._low.clear()

    async def _share(self, client: RedisClient) -> None:
        """Take slices of all limits in use, once."""
        gates, self._beats = max(1, self._gates()), self._beats + 1
        self._ledger.gates = gates
        due = list(self._due(gates))
        for part in _slices(due):
            commands: list[Command] = []
            for each in part:
                name = self._names.limit(each.counter)
                commands.append(("HSET", name, self._me, each.meter.taken + each.amount))
                commands.append(("HVALS", name))
                commands.append(("EXPIREAT", name, int(each.ends_at) + SHARED_KEPT_S))
            answers = await answered(client, commands, LIMITS_ANSWER_S)
            for each, taken in zip(part, answers[1::3], strict=True):
                if each.meter.begins_at == each.begins_at:
                    each.meter.took(each.amount, sum(max(0, int(each_gate)) for each_gate in taken))
        if not due:
            # Whether it answers.
            await answered(client, [("PING",)], LIMITS_ANSWER_S)
        self._note(shares=True)

    def _due(self, gates: int) -> Iterator[_Due]:
        """The limits to be looked at now: all where they were not shared, because that a server answers says
        nothing of those that have the counters.
        """
        looks_at_all = self._was_shared is False or self._beats % QUIET_BEATS == 0
        for counter, meter in self._ledger.running():
            if not meter.spent and not meter.taken:
                continue
            amount = meter.to_take(gates)
            if amount or looks_at_all:
                yield _Due(counter, meter, amount, meter.begins_at, meter.ends_at)

    def _note(self, *, shares: bool, why: str = "") -> None:
        """Say it once when it has changed; and why it lasts, once that is known."""
        self._ledger.counts.shares = shares
        is_news = self._why.tells(why) if why else False
        if shares:
            self._why = Outage()
        if shares is not self._was_shared or is_news:
            if self._was_shared is not None or not shares:
                detail = f"Redis: {why}; at most the limit for each gate passes" if why else ""
                self._tell(Action("limits_shared" if shares else "limits_alone", "gate", detail=detail))
            self._was_shared = shares


def _slices(rows: Iterable[_Due]) -> Iterator[list[_Due]]:
    rest = iter(rows)
    while part := list(islice(rest, LIMITS_SLICE)):
        yield part


# Between the Board and Redis: what a gate reports of its units, and how it uses the reports of others.
#
# Pure except for the Board that it reads. Reports of others change no verdict by themselves: their DOWN is
# evidence that sends a canary, progress seen by them saves one, their requests count as load. Reports of
# others are never published again, or two gates would keep a dead unit alive between them.


PACE_BEATS = 20
"""A unit's usual pace is computed once in this many heartbeats (5 s). It takes 0.1 ms, so units take
turns.
"""
TURN_BEATS, TURNS_MAX = 120, 1000
"""A unit of which nothing changes is told again once in so many heartbeats (30 s); of a thousand, once in so
many (four minutes).
"""
IDLE_BATCH = 0.01
"""A unit with fewer requests on average keeps its last pace."""

NEWS_S = HEARTBEAT_S
"""The time of progress seen by another gate is only as exact as the way through Redis, and each slow write
moves it a little later. A time less than this after the last progress is not new progress."""
PEERS_LIFE_S = 10.0
"""The word of others that a unit makes progress stands in for this gate's own canary for so long."""
DOUBT_EVERY_S = 1.0
SHARED_AT_ONCE_S = 1.0
"""Progress this close together comes from canaries that gates sent at the same time."""
PEERS_NEWS_S = 1.25 * SHARED_AT_ONCE_S
"""So long what others have told of a unit is compared with what this gate sees of it."""


class UnitChanges(NamedTuple):
    """What a gate publishes with a heartbeat: reports of units that may have changed, those whose documents
    are due in any case, the units that it has no more, and the cells of all that it has.
    """

    reports: Iterable[UnitReport] = ()
    due: Iterable[UnitReport] = ()
    gone: Collection[str] = ()
    cells: Collection[str] = ()


class Sharing:
    """The part of one gate. `observe` takes evidence (`Prober.observe`), `ttft_s` gives the recent time to
    first token of a unit (`Metrics.recent_ttft_s`).
    """

    def __init__(
        self,
        board: Board,
        gate: str,
        roster: Roster,
        now: Callable[[], float],
        observe: Callable[[Evidence], object],
        ttft_s: Callable[[str], float | None],
        *,
        gate_url: Callable[[], str] = str,
        is_stopping: Callable[[], bool] = bool,
    ) -> None:
        self._board = board
        self._gate = gate
        self._roster = roster
        self._now = now
        self._observe = observe
        self._ttft_s = ttft_s
        self._gate_url = gate_url
        self._is_stopping = is_stopping
        self._beats = 0
        self._verdicts: dict[str, tuple[Verdict, float, int]] = {}
        """By unit: the last verdict that was told, since when it is so, and its number."""
        self._count = 0
        self._itl_s: dict[str, float | None] = {}
        self._doubted_at: dict[str, float] = {}
        self._fleet: Mapping[str, UnitState] = {}
        self._ticked: Mapping[str, UnitState] = {}
        self._about: tuple[str, bool] | None = None
        """What was told of the gate itself, with each of its units."""
        self._places: dict[str, int] = {}
        self._cells: frozenset[str] = frozenset()
        self._turns: list[UnitState] = []
        self._others: dict[str, RemoteLoad] = {}
        self._lively: dict[str, tuple[float, tuple[float, str] | None]] = {}
        """Units of which others have just told something: until when that is looked at, and the last progress
        there that another gate has seen."""
        self._lives: dict[UnitState, tuple[float, float]] = {}
        """For units whose last progress was seen by others: when this gate saw some, and when they did."""

    def changes(self) -> UnitChanges:
        """What to publish now."""
        self._beats += 1
        gone = self._take_fleet() if self._fleet is not self._board.units else ()
        about, news = (self._gate_url(), self._is_stopping()), self._board.attention.news()
        if about != self._about:
            self._about, news = about, list(self._fleet.values())
        return UnitChanges(self._reports(news), self._turn(), gone, self._cells)

    def _take_fleet(self) -> set[str]:
        """The gate has other units now; returns those that it has no more."""
        # The board has changed those of before in place.
        before, self._fleet = self._places.keys(), self._board.units
        names = self._fleet.keys()
        self._places = {name: place for place, name in enumerate(names)}
        self._cells = frozenset(state.unit.cell for state in self._fleet.values())
        self._turns = []
        for kept in (self._itl_s, self._verdicts):
            for name in kept.keys() - names:
                del kept[name]
        self._lives = {state: lives for state, lives in self._lives.items() if not state.retired}
        return before - names

    def _reports(self, news: Iterable[UnitState]) -> Iterator[UnitReport]:
        """Of the units of which anything may have changed."""
        for state in news:
            if state.retired:
                continue
            name = state.unit.name
            if state.batch > IDLE_BATCH and (self._beats + self._places.get(name, 0)) % PACE_BEATS == 0:
                self._itl_s[name] = state.step_times.gap_s(0.5)
            yield self._report(state)

    def _turn(self) -> Iterator[UnitReport]:
        """Of the units whose turn it is, changed or not."""
        units = len(self._fleet)
        if not units or self._beats % max(1, TURN_BEATS // units):
            return
        if not self._turns:
            self._turns = list(self._fleet.values())
        for _ in range(min(ceil(units / TURNS_MAX), len(self._turns))):
            state = self._turns.pop()
            if not state.retired:
                yield self._report(state)

    def report(self, flip: Flip) -> UnitReport | None:
        """The report to publish at once for a change of verdict."""
        state = self._board.units.get(flip.unit)
        return self._report(state) if state is not None else None

    def received(self, seen: Seen) -> None:
        """Another gate's verdict has changed."""
        report, now = seen.report, self._now()
        if report.unit in self._board.units and report.verdict is Verdict.DOWN:
            # However often it is told, a unit gets one canary for it in this time.
            if now - self._doubted_at.get(report.unit, -DOUBT_EVERY_S) < DOUBT_EVERY_S:
                return
            self._doubted_at[report.unit] = now
            reason = f"gate {report.gate} reports it as down: {report.reason}"
            source = f"gate {report.gate}"
            self._observe(Evidence(report.unit, Sign.BAD, Strength.STRONG, source, reason, now))

    def tick(self, now: float) -> dict[str, RemoteLoad]:
        """Apply the progress seen by others. Returns what else they report of units."""
        units, others = self._board.units, self._others
        changed: Collection[str] = self._roster.changed(now)
        if self._ticked is not units:
            self._ticked = units
            others.clear()
            changed = self._roster.units()
        for name in changed:
            self._lively[name] = now + PEERS_NEWS_S, self._roster.lived_at(name)
            remote_load = self._roster.remote_load(name, now)
            if name in units and remote_load != NO_REMOTE_LOAD:
                others[name] = remote_load
            else:
                others.pop(name, None)
        for name, (until, lived) in list(self._lively.items()):
            if lived is not None and name in units:
                self._take_life(units[name], *lived)
            if now >= until:
                del self._lively[name]
        return others

    def _take_life(self, state: UnitState, lived_at: float, gate: str) -> None:
        """Another gate has seen progress. The gate that saw it last sends the next canary, too; of several at
        the same time, the one whose name is first.
        """
        lived_at = min(lived_at, self._own_progress_at(state) + PEERS_LIFE_S)
        if lived_at > state.progress_at + NEWS_S:
            self._lives[state] = self._own_progress_at(state), lived_at
            state.progress_at = state.peer_canary_at = lived_at
        elif gate < self._gate and lived_at > state.progress_at - SHARED_AT_ONCE_S:
            state.peer_canary_at = state.progress_at

    def _own_progress_at(self, state: UnitState) -> float:
        """When this gate itself last saw progress of the unit; 0: never."""
        own_at, others_at = self._lives.get(state, (0.0, 0.0))
        return own_at if state.progress_at == others_at else state.progress_at

    def _report(self, state: UnitState) -> UnitReport:
        name = state.unit.name
        return report_of(
            state,
            self._gate,
            self._now(),
            number=self._number(state),
            progress_at=self._own_progress_at(state),
            ttft_s=self._ttft_s(name),
            itl_s=self._itl_s.get(name),
            gate_url=self._gate_url(),
            stopping=self._is_stopping(),
        )

    def _number(self, state: UnitState) -> int:
        """That of its verdict. All units count together, so that one that comes back goes on from there."""
        name, case = state.unit.name, state.case
        verdict, since, number = self._verdicts.get(name, (case.verdict, -1.0, 0))
        if (verdict, since) != (case.verdict, case.since):
            self._count = number = self._count + 1
            self._verdicts[name] = case.verdict, case.since, number
        return number
