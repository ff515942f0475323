"""The gate's connection to Redis: writes reports of its units, reads those of other gates. Advisory.

1. Nothing waits for it: it runs in its own tasks, and any failure leads to a pause and a retry.
2. Every exchange with Redis has a timeout. Without Redis the roster keeps what it has.
3. Each change of state is one log line without passwords.

In this order: `RedisLink`, `redis_metrics`, `share`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any

from prometheus_client import Metric
from redis.exceptions import ResponseError

from cellgate.extras.redis.commands import MEMBERS_MAX, SLICE, IndexEntry, RedisCommands, in_turns
from cellgate.extras.redis.fleet import FleetRouter
from cellgate.extras.redis.reports import (
    DOCUMENT_BEATS,
    EXPIRY_HEARTBEATS,
    HEARTBEAT_S,
    Beat,
    BeatWriter,
    Seen,
    UnitReport,
    read_report,
)
from cellgate.extras.redis.roster import Roster, RosterKey
from cellgate.extras.redis.shared_bans import BanWrite, SharedBans, is_ban, read_ban
from cellgate.extras.redis.sharing import (
    GATES_MAX,
    PrefixSharing,
    ReportReading,
    SharedLimits,
    Sharing,
    UnitChanges,
)
from cellgate.extras.redis.stored import SharedResponses
from cellgate.extras.redis_client.connect import (
    Connect,
    Outage,
    connector,
    in_words,
    is_refusal,
    refusal_reason,
)
from cellgate.extras.redis_client.redis_names import Names
from cellgate.extras.redis_client.servers import EXCHANGE_S, RedisClient
from cellgate.extras.redis_client.signing import UNSIGNED, Signer, signer_of
from cellgate.proxy.config.settings import TICK_S, RedisAccess
from cellgate.proxy.config.sources import RedisSource
from cellgate.proxy.control.plane import Part, Plane
from cellgate.proxy.discovery.base import Feed
from cellgate.proxy.observe.events import Action
from cellgate.proxy.observe.families import counter, gauge
from cellgate.proxy.observe.helpers import HelperTrouble
from cellgate.proxy.observe.log import log_line
from cellgate.proxy.process.listeners import own_url
from cellgate.proxy.process.tasks import end_tasks
from cellgate.router.board import Board, Flip
from cellgate.router.cost_model import NO_REMOTE_LOAD

REFUSED_PAUSE_S = 5.0
"""The pause after refused credentials: some servers lock out clients that retry too often."""
FLIPS_KEPT = 1024
BAN_BEATS = 8
"""The index of bans is read once in this many heartbeats (2 s); new ones are also published at once."""
ABSENT_MAX = 240
"""A gate is removed from the index after its beat was missing in this many heartbeats (a minute)."""
INDEX_BEATS = 20
"""The index is read once in so many heartbeats, and whenever its size has changed."""
FORGET_BEATS = 24
"""How often reports of removed units and gates are searched."""

_COUNTS = (
    "beats",
    "connects",
    "failures",
    "beats_read",
    "documents_written",
    "writes_refused",
    "documents_read",
    "documents_refused",
    "flips_sent",
    "flips_heard",
    "bans_sent",
    "bans_heard",
    "bans_refused",
    "prefixes_sent",
    "prefixes_heard",
    "prefixes_refused",
)
_WHAT_NOW = "this gate routes by its own observations and keeps trying"


class LinkState(Enum):
    """The state of the connection, with the log line for it."""

    AWAY = "away"
    REFUSED = "refused"
    FULL = "full"
    WELL = "well"


_LINK_IN_WORDS = {
    LinkState.AWAY: f"Redis does not answer (%s); {_WHAT_NOW}",
    LinkState.REFUSED: f"Redis refuses (%s); {_WHAT_NOW}",
    LinkState.FULL: f"Redis takes no writes (%s); {_WHAT_NOW}",
    LinkState.WELL: "Redis answers: this gate shares evidence with other gates",
}


class RedisLink:
    """`changes` gives what to publish, `roster` takes the reports of others. `on_flip` is called for each
    change of verdict that another gate publishes, `tell` with each log line. `all_cells`: reports of all
    cells are read, and not only of those that this gate reports.
    """

    def __init__(
        self,
        connect: Connect,
        gate: str,
        changes: Callable[[], UnitChanges],
        roster: Roster,
        *,
        now: Callable[[], float],
        rng: random.Random,
        on_flip: Callable[[Seen], None],
        tell: Callable[[str], None],
        names: Names,
        signer: Signer = UNSIGNED,
        heartbeat_s: float = HEARTBEAT_S,
        all_cells: bool = False,
        bans: SharedBans | None = None,
        prefixes: PrefixSharing | None = None,
    ) -> None:
        self._bans, self._prefixes = bans, prefixes
        self._ban_news: list[BanWrite] = []
        self._connect = connect
        self._gate = gate
        self._changes = changes
        self._roster = roster
        self._now = now
        self._rng = rng
        self._on_flip = on_flip
        self._tell = tell
        self._names, self._signer = names, signer
        self._heartbeat_s = heartbeat_s
        self._all_cells = all_cells
        self._expiry_ms = round(1000 * heartbeat_s * EXPIRY_HEARTBEATS)
        self._document_ms = self._expiry_ms * DOCUMENT_BEATS
        self._flips: list[UnitReport] = []
        self._wake = asyncio.Event()
        self._sessions = 0
        self._own, self._known = set[IndexEntry](), set[IndexEntry]()
        self._gates = self._present = frozenset[str]()  # Of the index; and others that had a heartbeat last.
        self._tasks: list[asyncio.Task[None]] = []
        self._clients: list[RedisClient] = []
        self.state = LinkState.AWAY
        self._reported: LinkState | None = None
        self._outage = Outage()
        self._trouble: HelperTrouble | None = None
        self.counts = dict.fromkeys(_COUNTS, 0)
        self._turn = 0
        """Heartbeats on this connection."""
        self._sizes: dict[str, int] = {}
        self._writer = BeatWriter(gate)
        self._reading = ReportReading(roster, now, self._expiry_ms / 1000, self.counts, self._look_for_flip)

    def start(self) -> None:
        """Begin, and run until `close`."""
        self._tasks = [
            asyncio.create_task(self._forever(self._beats, tells=True), name="redis beats"),
            asyncio.create_task(self._forever(self._tells, tells=False), name="redis flips told"),
            asyncio.create_task(self._forever(self._listens, tells=False), name="redis flips heard"),
        ]

    async def close(self) -> None:
        """End; written documents expire by themselves."""
        await end_tasks(*self._tasks)
        # Only here: a task that is cancelled may already be closing connections, and leaves the others.
        for client in self._clients:
            with suppress(Exception):
                await client.disconnect()

    def flipped(self, report: UnitReport) -> None:
        """A verdict of this gate has changed: publish it now. Never waits."""
        if len(self._flips) < FLIPS_KEPT:
            self._flips.append(report)
        self._wake.set()

    def banned(self, row: BanWrite) -> None:
        """A ban has begun or ended: publish it now. Never waits."""
        if len(self._ban_news) < FLIPS_KEPT:
            self._ban_news.append(row)
        self._wake.set()

    def troubles(self) -> Mapping[str, HelperTrouble | None]:
        """Whether Redis answers; nothing before that is known."""
        return {} if self._reported is None else {"Redis": self._trouble}

    def peers(self) -> int:
        """How many other gates report."""
        return len(self._roster.gates(self._now()))

    # -- staying connected ---------------------------------------------------------------------------------

    async def _forever(self, session: Callable[[RedisClient], Awaitable[None]], *, tells: bool) -> None:
        # One client for good: creating one takes redis-py a millisecond, which would delay streams.
        client = self._connect()
        self._clients.append(client)
        while True:
            pause_s = self._heartbeat_s
            try:
                await session(client)
            except Exception as error:  # No exception may end this task, which has to reconnect.
                state = LinkState.REFUSED if is_refusal(error) else LinkState.AWAY
                if state is LinkState.REFUSED:
                    pause_s = REFUSED_PAUSE_S
                if tells:
                    self.counts["failures"] += 1
                    self._roster.silent()
                    self._note(state, in_words(error))
            with suppress(Exception):
                await client.disconnect()
            # With jitter, so that many gates do not reconnect at once.
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))

    def _note(self, state: LinkState, why: str = "") -> None:
        """Log a change of state once, not again for another reason of the same state, but for what lasts."""
        self.state = state
        is_news = self._outage.tells(why) if state is LinkState.AWAY else False
        if state is LinkState.WELL:
            self._outage = Outage()
        line = _LINK_IN_WORDS[state] % why if why else _LINK_IN_WORDS[state]
        is_well = state is LinkState.WELL
        self._trouble = None if is_well else HelperTrouble(line.removeprefix("Redis "), has_event=True)
        if state is not self._reported or is_news:
            self._reported = state
            self._tell(line)

    # -- beats ---------------------------------------------------------------------------------------------

    async def _beats(self, client: RedisClient) -> None:
        commands = RedisCommands(client, self._names, self._signer)
        self._sessions += 1
        self._turn = 0
        self._writer.restart()
        self._reading.restart()
        is_new = True
        while True:
            refused = await self._write(commands)
            if is_new:
                await self._clean(commands)
            await self._read(commands)
            self.counts["beats"] += 1
            self.counts["connects"] += is_new
            is_new = False
            self._turn += 1
            if refused:
                self._note(LinkState.FULL, refusal_reason(refused[0]))
            else:
                self._note(LinkState.WELL)
            await asyncio.sleep(self._heartbeat_s * self._rng.uniform(0.9, 1.0))

    async def _write(self, commands: RedisCommands) -> list[ResponseError]:
        """Write what has changed; returns what was refused."""
        changes, writer = self._changes(), self._writer
        gone = self._own - (own := {IndexEntry(cell, self._gate) for cell in changes.cells})
        self._own = own
        if not own and not gone:
            return []
        await self._take(changes)
        has_prefixes = await self._put_prefixes(commands)
        beat, due = writer.beat(self._now(), has_prefixes=has_prefixes, others=len(self._present))
        missing, refused = await commands.put(self._gate, due, self._document_ms)
        self.counts["documents_written"] += len(due) - len(missing)
        writer.refused(missing)
        has_documents, why = await commands.put_beat(self._gate, beat, self._expiry_ms, self._document_ms)
        refused += why
        if not has_documents and not refused:
            # Redis has lost them.
            writer.restart()
        if changes.gone:
            await commands.remove_units(self._gate, changes.gone)
        self.counts["writes_refused"] += len(refused)
        await commands.remove_from_index(gone)
        return refused

    async def _take(self, changes: UnitChanges) -> None:
        """Have the writer tell it."""
        for unit in changes.gone:
            self._writer.leave(unit)
        for reports, is_due in ((changes.reports, False), (changes.due, True)):
            for number, report in enumerate(reports, 1):
                self._writer.take(report, self._now(), is_due=is_due)
                if number % SLICE == 0:
                    await asyncio.sleep(0)

    async def _clean(self, commands: RedisCommands) -> None:
        """Remove documents that this gate has left there: units go while Redis is away, too."""
        cursor, units = await commands.documents(self._gate, 0)
        while cursor:
            cursor, more = await commands.documents(self._gate, cursor)
            units += more
        known = self._writer.units()
        await commands.remove_units(self._gate, [unit for unit, _ in units if unit not in known])

    async def _read(self, commands: RedisCommands) -> None:
        """Read the reports of others for the same cells, or for all."""
        cells = await commands.cells() if self._all_cells else sorted({each.cell for each in self._own})
        sizes = await commands.index_sizes(cells)
        if sizes != self._sizes or self._turn % INDEX_BEATS == 0:
            known = await commands.index(cells)
            if len(known) >= MEMBERS_MAX:
                # Somebody has filled it. Who was heard is not lost among them.
                known |= {member for member in self._known if member.gate in self._present}
            self._sizes, self._known = sizes, known
            self._gates = frozenset([member.gate async for member in in_turns(self._known)])
        # Restore index entries in a Redis that came back empty, and add new ones.
        await commands.add_to_index(self._own - self._known)
        self._known |= self._own
        beats = await self._reading.read(commands, self._gates)
        self._present = frozenset(beats)
        await self._forget_departed(commands)
        if self._prefixes is not None:
            await self._get_prefixes(commands, self._prefixes, beats)
        if self._bans is not None and self.counts["beats"] % BAN_BEATS == 0:
            await self._share_bans(commands, self._bans)

    async def _put_prefixes(self, commands: RedisCommands) -> bool:
        """Publish the hashes of computed prompts, if there are any."""
        document, new = self._prefixes.document() if self._prefixes is not None else (None, 0)
        if document is not None:
            await commands.put_prefixes(self._gate, document, self._expiry_ms)
            self.counts["prefixes_sent"] += new
        return document is not None

    async def _get_prefixes(
        self, commands: RedisCommands, prefixes: PrefixSharing, beats: Mapping[str, Beat]
    ) -> None:
        """Read the hashes of others: of those whose beat says that there are some, or who have no beat."""
        prefixes.received_beats({gate: beat.number for gate, beat in beats.items()})
        gates = sorted(self._gates - {self._gate})[:GATES_MAX]
        news = [gate for gate in gates if gate not in beats or beats[gate].has_prefixes]
        async for gate, found in commands.get_prefixes(news):
            taken = prefixes.received(gate, found) if found is not None else 0
            self.counts["prefixes_refused"] += taken is None
            self.counts["prefixes_heard"] += taken or 0

    async def _share_bans(self, commands: RedisCommands, bans: SharedBans) -> None:
        """Read the bans of others. Bans that a Redis that came back empty has lost are written again."""
        index = await commands.bans()
        await commands.publish_bans((row for row in bans.own() if row.mark not in index), publish=False)
        unknown = [mark for mark in index if not bans.knows(mark)]
        async for mark, document, pttl_ms in commands.get_bans(unknown):
            if (
                document is not None
                and (reported := read_ban(document)) is not None
                and reported.mark == mark
            ):
                self._take_ban(document, pttl_ms if isinstance(pttl_ms, int) else 0)
            elif document is not None:
                self.counts["bans_refused"] += 1

    def _take_ban(self, document: Any, left_ms: int | None = None) -> None:
        assert self._bans is not None
        counts = left_ms is None or left_ms > 0
        received = counts and self._bans.received(document, self._gates, left_ms)
        self.counts["bans_heard" if received else "bans_refused"] += 1

    async def _forget_departed(self, commands: RedisCommands) -> None:
        """Remove old entries: gates come and go under new names, and the index must not grow."""
        absent = self._reading.absent
        if gone := {gate for gate, beats in absent.items() if beats >= ABSENT_MAX}:
            entries = {member for member in self._known if member.gate in gone}
            await commands.remove_from_index(entries)
            self._known -= entries
            self._gates -= gone
        for gate in absent.keys() - self._gates:
            del absent[gate]
        if self.counts["beats"] % FORGET_BEATS == 0:
            before = self._now() - ABSENT_MAX * self._heartbeat_s
            self._roster.forget_verdicts(before)
            # A fleet router keeps the reports of a gate until the gate itself is gone.
            if not self._all_cells:
                self._roster.forget(before)

    # -- flips ---------------------------------------------------------------------------------------------

    async def _tells(self, client: RedisClient) -> None:
        """A separate connection: a flip must not wait for a heartbeat that writes and reads many units."""
        commands = RedisCommands(client, self._names, self._signer)
        # Flips during a lost connection are published by the heartbeats.
        self._flips.clear()
        self._ban_news.clear()
        while True:
            await self._wake.wait()
            self._wake.clear()
            bans, self._ban_news = self._ban_news, []
            await commands.publish_bans(bans)
            self.counts["bans_sent"] += len(bans)
            flips, self._flips = self._flips, []
            await commands.publish(flips, self._document_ms)
            self.counts["flips_sent"] += len(flips)

    async def _listens(self, client: RedisClient) -> None:
        async with await client.pubsub() as pubsub:
            async with asyncio.timeout(EXCHANGE_S):
                await pubsub.subscribe(self._names.flips)
            session, pace = self._sessions, Pace(asyncio.get_running_loop().time)
            commands = RedisCommands(client, self._names, self._signer)
            # A subscriber does not notice a lost connection. The heartbeats do.
            while session == self._sessions:
                # It waits for a message, and before that, perhaps, for a new connection.
                async with asyncio.timeout(2.0 * EXCHANGE_S):
                    message = await pubsub.get_message(timeout=EXCHANGE_S)
                if message is not None:
                    self._received(message["data"], commands)
                    if (pause_s := pace.pause_s()) > 0.0:
                        # What is missed here stands in beats and documents.
                        await asyncio.sleep(pause_s)

    def _received(self, document: Any, commands: RedisCommands) -> None:
        if self._bans is not None and isinstance(document, bytes) and is_ban(document):
            ban = read_ban(document)
            if ban is not None and commands.believes_flip(ban.gate, document):
                self._take_ban(document)
            else:
                self.counts["bans_refused"] += 1
            return
        report = read_report(document) if isinstance(document, bytes) else None
        if report is not None and not commands.believes_flip(report.gate, document):
            report = None
        # Messages of gates that are not on the index are ignored; their documents are read at the next
        # heartbeat.
        if report is None or IndexEntry(report.cell, report.gate) not in self._known:
            self.counts["documents_refused"] += 1
        elif self._roster.update((report.unit, report.gate), Seen(report, 0.0), self._now()):
            self._look_for_flip((report.unit, report.gate), Seen(report, 0.0))

    def _look_for_flip(self, key: RosterKey, one: Seen) -> None:
        """A change of verdict may arrive twice, on the channel and at the next heartbeat: report it once."""
        if self._roster.is_news(key, one.report):
            self.counts["flips_heard"] += 1
            self._on_flip(one)


FLIPS_AT_ONCE, FLIPS_PAUSE_S = 32, 0.05
"""So many messages of the channel are read in one go; then it is left alone for so long."""


class Pace:
    """Bounds what reading a channel costs that somebody floods."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since = now()
        self._read = 0

    def pause_s(self) -> float:
        """How long to leave the channel alone, after one message."""
        now = self._now()
        if now - self._since >= FLIPS_PAUSE_S:
            self._since, self._read = now, 0
        self._read += 1
        return FLIPS_PAUSE_S if self._read >= FLIPS_AT_ONCE else 0.0


# Metrics of the gate's connection to Redis.


_COUNTERS: Mapping[str, tuple[str, tuple[str, ...], Mapping[tuple[str, ...], str]]] = {
    "redis_connects": (
        "Connections to Redis: established, and those that failed or were given up.",
        ("result",),
        {("established",): "connects", ("failed",): "failures"},
    ),
    "redis_messages": (
        "What this gate sent, and received of others: heartbeats, documents, changes of verdict, bans of "
        "prompts and their ends, hashes of cached prompts. Refused: writes that Redis did not accept (full, "
        "read-only), and what was invalid of others.",
        ("way", "kind"),
        {
            ("sent", "beats"): "beats",
            ("sent", "documents"): "documents_written",
            ("sent", "flips"): "flips_sent",
            ("sent", "bans"): "bans_sent",
            ("sent", "prefixes"): "prefixes_sent",
            ("received", "beats"): "beats_read",
            ("received", "documents"): "documents_read",
            ("received", "flips"): "flips_heard",
            ("received", "bans"): "bans_heard",
            ("received", "prefixes"): "prefixes_heard",
            ("refused", "writes"): "writes_refused",
            ("refused", "documents"): "documents_refused",
            ("refused", "bans"): "bans_refused",
            ("refused", "prefixes"): "prefixes_refused",
        },
    ),
}
"""For each counter its text, its labels, and what is counted by their values."""


def redis_metrics(link: RedisLink, board: Board) -> Iterator[Metric]:
    """The connection to Redis, and the attempts of other gates on shared units."""
    is_well = link.state is LinkState.WELL
    yield gauge("redis_up", "1 while Redis answers and accepts writes.", (), [((), is_well)])
    yield gauge("redis_peers", "Other gates that have reported recently.", (), [((), link.peers())])
    yield gauge(
        "in_flight_elsewhere",
        "Attempts of other gates in flight at a unit.",
        ("unit",),
        (((name,), board.remote_load.get(name, NO_REMOTE_LOAD).in_flight) for name in board.units),
    )
    for name, (text, labels, counted) in _COUNTERS.items():
        yield counter(name, text, labels, [(key, link.counts[of]) for key, of in counted.items()])


# Ties a control plane to Redis. The one place that knows both.


_GRAIN_S = 0.001


def share(plane: Plane, port: Callable[[], int], access: RedisAccess, feed: Feed, gate: str) -> Part:
    """Begins to share the reports of `plane`, or, as a fleet router, to use those of others.

    `port` is the one for clients; 0: not known yet. `feed` takes the units of others, `gate` is the name of
    this one. An invalid URL is only logged.
    """
    try:
        connect = connector(access, plane.settings.tls)
    except ValueError as error:
        log_line("error", f"redis: {error}; this gate uses only its own observations")
        return Part()
    routes = any(isinstance(source, RedisSource) for source in plane.settings.sources)
    signer = signer_of(plane.settings, routes=routes)
    if routes and not signer.signs:
        log_line("error", "redis: a fleet router needs a fleet secret or an admin token: it uses no gate")
    link_by = partial(_link, plane, connect, Names(access.prefix), signer)
    link = _route(plane, feed, gate, link_by) if routes else _share(plane, port, gate, link_by)
    link.start()
    responses = SharedResponses(plane.stored, connect, Names(access.prefix), signer)
    plane.search.gates = responses.find
    responses.start()

    async def close() -> None:
        await responses.close()
        await link.close()

    if (accounting := plane.accounting) is not None:
        names, gates = Names(access.prefix), lambda: link.peers() + 1
        limits = SharedLimits(accounting.ledger, connect, names, gates, plane.events.add, random.Random())
        limits.start()
        accounting.end_sharing = limits.close
    return Part(close, metrics=partial(redis_metrics, link, plane.board))


def _link(
    plane: Plane,
    connect: Connect,
    names: Names,
    signer: Signer,
    roster: Roster,
    changes: Callable[[], UnitChanges],
    on_flip: Callable[[Seen], None],
    *,
    all_cells: bool = False,
    prefixes: PrefixSharing | None = None,
) -> RedisLink:
    bans = SharedBans(plane.containment, roster.own, plane.now)
    was_lost = False

    def tell(line: str) -> None:
        # An event is a line of the log as well, and Redis' trouble as a helper has none of its own.
        nonlocal was_lost
        is_lost = link.state is not LinkState.WELL
        if is_lost or was_lost:
            plane.events.add(Action("helper_lost" if is_lost else "helper_back", "gate", detail=line))
        else:
            log_line("info", line)
        was_lost = is_lost

    link = RedisLink(
        connect,
        roster.own,
        changes,
        roster,
        now=plane.now,
        rng=random.Random(),
        on_flip=on_flip,
        tell=tell,
        names=names,
        signer=signer,
        all_cells=all_cells,
        bans=bans,
        prefixes=prefixes,
    )
    plane.helpers.watch(link.troubles)
    plane.containment.on_ban = lambda ban, lifted: link.banned(bans.row(ban, lifted=lifted))
    return link


def _share(plane: Plane, port: Callable[[], int], gate: str, link_by: Callable[..., RedisLink]) -> RedisLink:
    roster, loop = Roster(gate), asyncio.get_running_loop()
    url = ""

    def gate_url() -> str:
        nonlocal url
        # It is known once the gate listens, which may be later.
        if not url and port():
            url = own_url(plane.settings, port())
        return url

    sharing = Sharing(
        plane.board,
        roster.own,
        roster,
        plane.now,
        plane.prober.observe,
        plane.metrics.recent_ttft_s,
        gate_url=gate_url,
        is_stopping=plane.is_stopping,
    )
    prefixes = PrefixSharing(plane.board, roster.own, roster, plane.now)
    link = link_by(roster, sharing.changes, sharing.received, prefixes=prefixes)

    def flipped(flip: Flip) -> None:
        report = sharing.report(flip)
        if report is not None:
            link.flipped(report)

    def tick(now: float) -> None:
        plane.board.remote_load = sharing.tick(now)
        # Attempts of an ended gate count until its report expires, not until the next tick.
        if (expiry_s := roster.expires_at(now) - now) < TICK_S:
            loop.call_later(expiry_s + _GRAIN_S, forget)

    def forget() -> None:
        plane.board.remote_load = sharing.tick(plane.now())

    plane.on_flip.append(flipped)
    plane.ticker.looks.append(tick)
    return link


def _route(plane: Plane, feed: Feed, gate: str, link_by: Callable[..., RedisLink]) -> RedisLink:
    # It has no units of its own to report.
    roster = Roster(gate)
    router = FleetRouter(plane, roster, feed)
    plane.on_flip.append(router.flipped)
    plane.ticker.looks.append(router.tick)
    return link_by(roster, UnitChanges, router.received, all_cells=True)
