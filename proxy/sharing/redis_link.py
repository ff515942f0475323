"""The gate's line to Redis: writes what it knows of its units, reads what other gates do. Advisory.

1. Nobody waits for it: it runs in tasks of its own, and whatever fails there ends in a pause and a new try.
2. Every exchange with Redis is bounded in time. While there is none the roster keeps what it has.
3. One line in the log for each change of state; passwords are in none.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from enum import Enum
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from cellgate.proxy.sharing.bans import BanWrite, SharedBans, is_ban
from cellgate.proxy.sharing.bans import read_ban as read_ban
from cellgate.proxy.sharing.connect import EXCHANGE_S, Connect, in_words, is_refusal, refusal_reason
from cellgate.proxy.sharing.prefixes import GATES_MAX, PrefixSharing
from cellgate.proxy.sharing.redis_commands import IndexEntry, RedisCommands
from cellgate.proxy.sharing.roster import Roster, RosterKey
from cellgate.proxy.sharing.unit_report import (
    EXPIRY_HEARTBEATS,
    HEARTBEAT_S,
    Names,
    Seen,
    UnitReport,
    age_s,
    read_report,
)

REFUSED_PAUSE_S = 5.0
"""Between two tries with credentials that were refused: some servers lock out who asks too often."""
FLIPS_KEPT = 1024
BAN_BEATS = 8
"""The index of refused prompts is read once in so many beats (2 s); each is told of at once as well."""
ABSENT_MAX = 240
"""An entry of an index whose document was missing in so many beats (a minute) is taken off the index."""
FORGET_BEATS = 24
"""So often what was said of units and gates that are gone is looked for."""

_COUNTS = (
    "beats",
    "connects",
    "failures",
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
    """How it stands with Redis, and what the operator is told when it comes to be so."""

    AWAY = "away"
    REFUSED = "refused"
    FULL = "full"
    WELL = "well"


_WORDS = {
    LinkState.AWAY: f"Redis does not answer (%s); {_WHAT_NOW}",
    LinkState.REFUSED: f"Redis refuses (%s); {_WHAT_NOW}",
    LinkState.FULL: f"Redis takes no writes (%s); {_WHAT_NOW}",
    LinkState.WELL: "Redis answers: this gate shares evidence with other gates",
}


class RedisLink:
    """`views` gives what there is to tell, `roster` takes what others tell. `on_flip` is called for each
    change of verdict that another gate tells of, `tell` with each line for the operator. `all_cells`: what
    is told of any cell is read, and not only of those that there is something to tell of.
    """

    def __init__(
        self,
        connect: Connect,
        gate: str,
        reports: Callable[[], Iterable[UnitReport]],
        roster: Roster,
        *,
        now: Callable[[], float],
        rng: random.Random,
        on_flip: Callable[[Seen], None],
        tell: Callable[[str], None],
        names: Names,
        heartbeat_s: float = HEARTBEAT_S,
        all_cells: bool = False,
        bans: SharedBans | None = None,
        prefixes: PrefixSharing | None = None,
    ) -> None:
        self._bans = bans
        self._prefixes = prefixes
        self._ban_news: list[BanWrite] = []
        self._connect = connect
        self._gate = gate
        self._reports = reports
        self._roster = roster
        self._now = now
        self._rng = rng
        self._on_flip = on_flip
        self._tell = tell
        self._names = names
        self._heartbeat_s = heartbeat_s
        self._all_cells = all_cells
        self._expiry_ms = round(1000 * heartbeat_s * EXPIRY_HEARTBEATS)
        self._flips: list[UnitReport] = []
        self._wake = asyncio.Event()
        self._verdicts: dict[RosterKey, str] = {}
        self._sessions = 0
        self._own: set[IndexEntry] = set()
        self._known: set[IndexEntry] = set()
        self._absent: dict[IndexEntry, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.state = LinkState.AWAY
        self._told: LinkState | None = None
        self.counts = dict.fromkeys(_COUNTS, 0)

    def start(self) -> None:
        """Begin, and go on until `close`."""
        self._tasks = [
            asyncio.create_task(self._forever(self._beats, tells=True), name="redis beats"),
            asyncio.create_task(self._forever(self._tells, tells=False), name="redis flips told"),
            asyncio.create_task(self._forever(self._listens, tells=False), name="redis flips heard"),
        ]

    async def close(self) -> None:
        """End; what was written expires by itself."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def flipped(self, report: UnitReport) -> None:
        """A verdict of ours has changed: tell it now. Never waits."""
        if len(self._flips) < FLIPS_KEPT:
            self._flips.append(report)
        self._wake.set()

    def banned(self, row: BanWrite) -> None:
        """A prompt is refused from now on, or no more: tell it now. Never waits."""
        if len(self._ban_news) < FLIPS_KEPT:
            self._ban_news.append(row)
        self._wake.set()

    def peers(self) -> int:
        """How many other gates are heard."""
        return len(self._roster.gates(self._now()))

    # -- staying connected ---------------------------------------------------------------------------------

    async def _forever(self, session: Callable[[Redis], Awaitable[None]], *, tells: bool) -> None:
        # One client for good: to make one takes redis-py a millisecond, in which no stream gets its tokens.
        client = self._connect()
        while True:
            pause_s = self._heartbeat_s
            try:
                await session(client)
            except Exception as error:  # Whatever it is: it must not end the one who is to recover from it.
                state = LinkState.REFUSED if is_refusal(error) else LinkState.AWAY
                if state is LinkState.REFUSED:
                    pause_s = REFUSED_PAUSE_S
                if tells:
                    self.counts["failures"] += 1
                    self._roster.silent()
                    self._note(state, in_words(error))
            finally:
                with suppress(Exception):
                    await client.connection_pool.disconnect()
            # Jittered, so that many gates do not come back to it as one.
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))

    def _note(self, state: LinkState, why: str = "") -> None:
        """Say so once: not again when the same has other reasons."""
        self.state = state
        if state is not self._told:
            self._told = state
            self._tell(_WORDS[state] % why if why else _WORDS[state])

    # -- beats ---------------------------------------------------------------------------------------------

    async def _beats(self, client: Redis) -> None:
        commands = RedisCommands(client, self._names)
        self._sessions += 1
        is_new = True
        while True:
            refused = await self._write(commands)
            await self._read(commands)
            self.counts["beats"] += 1
            self.counts["connects"] += is_new
            is_new = False
            if refused:
                self._note(LinkState.FULL, refusal_reason(refused[0]))
            else:
                self._note(LinkState.WELL)
            await asyncio.sleep(self._heartbeat_s * self._rng.uniform(0.9, 1.0))

    async def _write(self, commands: RedisCommands) -> list[ResponseError]:
        """Write all there is to tell; what of it was refused."""
        own, refused = await commands.put(self._reports(), self._expiry_ms)
        self._own = own
        self.counts["writes_refused"] += len(refused)
        self.counts["documents_written"] += len(own) - len(refused)
        return refused

    async def _read(self, commands: RedisCommands) -> None:
        """Read what others have written of the same cells, or of all there are."""
        cells = await commands.cells() if self._all_cells else sorted({member.cell for member in self._own})
        index = await commands.index(cells)
        self._known = index
        # What a Redis that came back empty has forgotten is put on the index again.
        await commands.add_to_index(self._own - index)
        seen: dict[RosterKey, Seen] = {}
        async for member, document, pttl_ms in commands.get(m for m in index if m.gate != self._gate):
            key = member.unit, member.gate
            if (one := self._seen(key, document, pttl_ms)) is not None:
                seen[key] = one
            self._absent[member] = self._absent.get(member, 0) + 1 if document is None else 0
        # What was read may be older than what was heard on the channel meanwhile.
        for key in self._roster.answered(seen, self._now()):
            self._look_for_flip(key, seen[key])
        await self._forget_departed(commands, index)
        if self._prefixes is not None:
            await self._share_prefixes(commands, self._prefixes)
        if self._bans is not None and self.counts["beats"] % BAN_BEATS == 0:
            await self._share_bans(commands, self._bans)

    async def _share_prefixes(self, commands: RedisCommands, prefixes: PrefixSharing) -> None:
        """Tell what prompts were computed where, and hear what others tell."""
        document, new = prefixes.document()
        if document is not None:
            await commands.put_prefixes(self._gate, document, self._expiry_ms)
            self.counts["prefixes_sent"] += new
        gates = sorted({member.gate for member in self._known} - {self._gate})[:GATES_MAX]
        async for gate, found in commands.get_prefixes(gates):
            taken = prefixes.heard(gate, found) if found is not None else 0
            self.counts["prefixes_refused"] += taken is None
            self.counts["prefixes_heard"] += taken or 0

    async def _share_bans(self, commands: RedisCommands, bans: SharedBans) -> None:
        """Read what prompts others refuse. What a Redis that came back empty has not is written again."""
        index = await commands.bans()
        await commands.publish_bans((row for row in bans.own() if row.mark not in index), publish=False)
        unknown = [mark for mark in index if not bans.knows(mark)]
        async for mark, document, pttl_ms in commands.get_bans(unknown):
            if document is not None and (told := read_ban(document)) is not None and told.mark == mark:
                self._take_ban(document, pttl_ms if isinstance(pttl_ms, int) else 0)
            elif document is not None:
                self.counts["bans_refused"] += 1

    def _take_ban(self, document: Any, left_ms: int | None = None) -> None:
        assert self._bans is not None
        counts = left_ms is None or left_ms > 0
        heard = counts and self._bans.heard(document, {member.gate for member in self._known}, left_ms)
        self.counts["bans_heard" if heard else "bans_refused"] += 1

    def _seen(self, key: RosterKey, document: Any, pttl_ms: Any) -> Seen | None:
        """What stands at a key; None when that is nothing, or not what should be there."""
        if document is None:
            return None
        age = age_s(pttl_ms, self._expiry_ms / 1000) if isinstance(pttl_ms, int) else None
        report = read_report(document) if isinstance(document, bytes) else None
        if report is None or age is None or (report.unit, report.gate) != key:
            self.counts["documents_refused"] += 1
            return None
        self.counts["documents_read"] += 1
        return Seen(report, age)

    async def _forget_departed(self, commands: RedisCommands, index: set[IndexEntry]) -> None:
        """Gates come and go under new names: the index must not grow with every one there ever was."""
        gone = {member for member, beats in self._absent.items() if beats >= ABSENT_MAX}
        await commands.remove_from_index(gone)
        for member in [member for member in self._absent if member in gone or member not in index]:
            del self._absent[member]
            self._verdicts.pop((member.unit, member.gate), None)
        # A router over the fleet keeps what a gate said until that one itself is gone.
        if self.counts["beats"] % FORGET_BEATS == 0 and not self._all_cells:
            self._roster.forget(self._now() - ABSENT_MAX * self._heartbeat_s)

    # -- flips ---------------------------------------------------------------------------------------------

    async def _tells(self, client: Redis) -> None:
        """A connection of its own: a flip must not wait for a beat that writes and reads many units."""
        commands = RedisCommands(client, self._names)
        # What has flipped while there was no connection is told by the beats.
        self._flips.clear()
        self._ban_news.clear()
        while True:
            await self._wake.wait()
            self._wake.clear()
            bans, self._ban_news = self._ban_news, []
            await commands.publish_bans(bans)
            self.counts["bans_sent"] += len(bans)
            flips, self._flips = self._flips, []
            await commands.publish(flips, self._expiry_ms)
            self.counts["flips_sent"] += len(flips)

    async def _listens(self, client: Redis) -> None:
        async with client.pubsub(ignore_subscribe_messages=True) as pubsub:
            async with asyncio.timeout(EXCHANGE_S):
                await pubsub.subscribe(self._names.flips)
            session = self._sessions
            # Who only listens does not notice that the other end is gone. The beats do.
            while session == self._sessions:
                # It waits for a message, and before that, perhaps, for a new connection.
                async with asyncio.timeout(2.0 * EXCHANGE_S):
                    message = await pubsub.get_message(timeout=EXCHANGE_S)
                if message is not None:
                    self._heard(message["data"])

    def _heard(self, document: Any) -> None:
        if self._bans is not None and isinstance(document, bytes) and is_ban(document):
            self._take_ban(document)
            return
        report = read_report(document) if isinstance(document, bytes) else None
        # Whoever is not on the index yet is read at the next beat: what strangers shout is not kept.
        if report is None or IndexEntry(report.cell, report.unit, report.gate) not in self._known:
            self.counts["documents_refused"] += 1
        elif self._roster.update((report.unit, report.gate), Seen(report, 0.0), self._now()):
            self._look_for_flip((report.unit, report.gate), Seen(report, 0.0))

    def _look_for_flip(self, key: RosterKey, one: Seen) -> None:
        """A verdict may be heard of twice, on the channel and at the next beat: it is told once."""
        verdict = one.report.verdict.value
        if self._verdicts.get(key) != verdict:
            self._verdicts[key] = verdict
            self.counts["flips_heard"] += 1
            self._on_flip(one)
