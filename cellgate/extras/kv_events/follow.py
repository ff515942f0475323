"""Follows the KV events of all units that publish them: finds out where, and starts and stops followers.

A unit that comes up is asked once for its publishers, unless they are configured. One that has none costs
nothing more.

In this order: `KvEventFollowers`, `RankFollower`, `kv_event_metrics`, `follow_kv_events`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from functools import partial

import zmq
from prometheus_client import Metric
from xxhash import xxh3_64_intdigest

from cellgate.extras.kv_events.wire import (
    PATHS,
    BrokenPublisherError,
    EventBatch,
    KvDecoder,
    MalformedError,
    Numbers,
    NumberStep,
    Publisher,
    Publishers,
    Reached,
    ZmqLink,
    configured,
    publishers_in,
)
from cellgate.probes.base import Fetch, FetchError
from cellgate.probes.engines import parsed
from cellgate.proxy.control.plane import Part, Plane
from cellgate.proxy.observe.families import counter, gauge
from cellgate.proxy.observe.log import log_line
from cellgate.proxy.process.tasks import end_tasks
from cellgate.router.board import Board
from cellgate.router.kv_index import BLOCKS_MAX, Cleared, Lessons
from cellgate.router.prefix import KnownPrefixes
from cellgate.router.unit_state import UnitState

ALL_S = 10.0
"""All units of a large fleet are looked at so often, and when one has changed."""
KV_EVENTS_ASK_S = 2.0
"""How long a unit may take to tell where it publishes."""


@dataclass(slots=True)
class Followed:
    """One unit's publishers, and what has come of them. `asked` is the incarnation that was asked."""

    asked: object = None
    publishers: Publishers = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    asking: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Leave its publishers."""
        for task in self.tasks:
            task.cancel()
        self.tasks.clear()


class KvEventFollowers:
    """The followers of all units of a board. `fetch_of` asks a unit, `link` connects to a publisher."""

    def __init__(
        self,
        board: Board,
        fetch_of: Callable[[UnitState], Fetch],
        now: Callable[[], float],
        link: Callable[[Publisher], ZmqLink] | None = None,
    ) -> None:
        self._board = board
        self._fetch_of = fetch_of
        self._now = now
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._link = link or self._connect
        self._decoder = KvDecoder()
        self.lessons = Lessons()
        self._units: dict[UnitState, Followed] = {}
        self._as_of, self._all_at = -1, 0.0
        """The changes of the Board when all units were looked at last, and when they are again."""
        self._again: list[UnitState] = []
        """Units that have not answered."""
        self._has_publishers = False

    def __iter__(self) -> Iterator[tuple[UnitState, KnownPrefixes, Counter[str]]]:
        """The units that are followed, what is known of them, and what was counted."""
        for state, followed in self._units.items():
            if state.costs.known is not None:
                yield state, state.costs.known, followed.counts

    def tick(self, now: float) -> None:
        """Look for units that came, went or restarted, and for prompts whose events have come."""
        is_large = self._board.attention.is_large
        if not is_large or self._board.changes != self._as_of or now >= self._all_at:
            self._as_of, self._all_at = self._board.changes, now + ALL_S
            for state in [state for state in self._units if state.retired]:
                self._units.pop(state).stop()
            looked_at: Iterable[UnitState] = self._board
        else:
            looked_at, self._again = self._again, []
        for state in looked_at:
            followed = self._units.get(state)
            if followed is None:
                followed = self._units[state] = Followed()
            if state.is_usable():
                self._look(state, followed)
        for state, followed in self._units.items() if self._has_publishers else ():
            if followed.publishers and state.costs.known is not None:
                state.costs.known.tick(now)

    def _look(self, state: UnitState, followed: Followed) -> None:
        keys = state.unit.kv_events
        if keys is not None and keys.endpoint:
            self._follow(state, followed, configured(keys))
            return
        engine = keys.source if keys is not None else state.engine
        incarnation = (engine, state.case.restarted, state.up_since)
        if engine in PATHS and followed.asked != incarnation:
            followed.asked = incarnation
            followed.asking = asyncio.create_task(
                self._ask(state, followed, engine), name=f"KV event sources of {state.unit.name}"
            )

    async def _ask(self, state: UnitState, followed: Followed, engine: str) -> None:
        try:
            reply = await self._fetch_of(state)("GET", PATHS[engine], timeout_s=KV_EVENTS_ASK_S)
        except FetchError:
            followed.asked = None
            self._again.append(state)
            return
        if not state.retired:
            answer = parsed(reply.body) if reply.status == 200 else None
            self._follow(state, followed, publishers_in(engine, answer, state.unit.url))

    def _follow(self, state: UnitState, followed: Followed, publishers: Publishers) -> None:
        if publishers == followed.publishers:
            return
        followed.stop()
        followed.publishers = publishers
        self._has_publishers |= bool(publishers)
        state.costs.follow(KnownPrefixes(state.costs.prefixes, self.lessons) if publishers else None)
        known, name = state.costs.known, state.unit.name
        for rank, publisher in publishers.items() if known is not None else ():
            assert known is not None
            follower = RankFollower(
                name,
                rank,
                known,
                lambda publisher=publisher: self._link(publisher),  # type: ignore[misc]
                self._now,
                followed.counts,
                self._decoder,
                is_alone=len(publishers) == 1,
            )
            task = asyncio.create_task(follower.run(), name=f"KV events of {name}, rank {rank}")
            followed.tasks.append(task)
        self._share()
        if publishers:
            names = ", ".join(publisher.endpoint for publisher in publishers.values())
            log_line("info", f"unit {name}: its KV events are followed: {names}")

    def _share(self) -> None:
        """All indexes together hold at most BLOCKS_MAX blocks."""
        ranks = sum(len(followed.publishers) for followed in self._units.values())
        for state, followed in self._units.items():
            for rank in followed.publishers if state.costs.known is not None else ():
                state.costs.known.rank(rank, BLOCKS_MAX // ranks)  # type: ignore[union-attr]

    def _connect(self, publisher: Publisher) -> ZmqLink:
        if self._context is None:
            self._context = zmq.Context(io_threads=1)
        return ZmqLink(self._context, publisher)

    async def close(self) -> None:
        """Leave all publishers."""
        tasks = [task for followed in self._units.values() for task in followed.tasks]
        tasks += [followed.asking for followed in self._units.values() if followed.asking is not None]
        await end_tasks(*tasks)
        await self._decoder.close()
        if self._context is not None:
            self._context.destroy(linger=0)


# Follows the KV events of one rank of a unit, and keeps its index complete or out of use.
#
# Rules:
# 1. While the connection is lost, and while something missed is not made up for by a replay, the rank has no
#    say. Silence is normal: an engine publishes nothing when nothing changes.
# 2. What cannot be made up for is forgotten: the index begins again with what is published from then on.
# 3. A publisher that is broken is left, its index is cleared, and it is tried again later, ever more
# seldom.
# 4. One turn of the loop applies at most BLOCKS_PER_TURN blocks; large messages are decoded elsewhere.


BLOCKS_PER_TURN = 256
"""About half a millisecond."""
RETRY_S, RETRY_MAX_S = 1.0, 16.0
RESTARTS_MAX = 3
"""A publisher that has begun again more often on one connection is broken: a process counts upwards."""


class RankFollower:
    """Follows one rank. `link` makes the connection; `of` names the unit for people."""

    def __init__(
        self,
        of: str,
        rank: int,
        known: KnownPrefixes,
        link: Callable[[], ZmqLink],
        now: Callable[[], float],
        counts: Counter[str],
        decoder: KvDecoder,
        *,
        is_alone: bool = True,
    ) -> None:
        self._of = of
        self._rank = rank
        # An engine of one rank may be a part of something larger, and have any number.
        self._named = None if is_alone else rank
        self._known = known
        self._index = known.rank(rank, BLOCKS_MAX)
        self._link = link
        self._now = now
        self._counts = counts
        self._decoder = decoder
        self._numbers = Numbers()
        self._last = 0
        """A digest of the last message that was applied: another process has another one."""
        self._spent = 0
        self._restarts = 0
        self._is_up = False
        self._incarnation = known.incarnation
        self._said = ""

    async def run(self) -> None:
        """Follow it until cancelled."""
        retry_s = RETRY_S
        while True:
            began = self._now()
            try:
                with closing(self._link()) as link:
                    await self._follow(link)
            except (BrokenPublisherError, MalformedError) as error:
                self._fail(error)
            finally:
                self._known.suspend(self._rank)
                self._forget()
            retry_s = RETRY_S if self._now() - began > RETRY_MAX_S else min(2 * retry_s, RETRY_MAX_S)
            await asyncio.sleep(retry_s)

    def _fail(self, error: Exception) -> None:
        self._counts["malformed" if isinstance(error, MalformedError) else "broken"] += 1
        reason = str(error)
        if reason != self._said:
            self._said = reason
            log_line(
                "warning",
                f"unit {self._of}: its KV events (rank {self._rank}) are not used: {reason}; the gate goes "
                "by what it has sent there. Check kv_events of the unit, and what its engine publishes",
            )

    def _forget(self) -> None:
        self._index.clear()
        self._numbers.begin_anew()

    async def _follow(self, link: ZmqLink) -> None:
        self._restarts, self._is_up = 0, False
        while True:
            match link.take():
                case None:
                    self._spent = 0
                    await link.wait()
                case Reached(is_up):
                    was_up, self._is_up = self._is_up, is_up
                    if is_up:
                        await self._catch_up(link)
                    elif was_up:
                        self._counts["disconnects"] += 1
                        self._known.suspend(self._rank)
                case EventBatch() as message:
                    if self._incarnation != self._known.incarnation:
                        self._incarnation = self._known.incarnation
                        self._forget()
                        await self._catch_up(link)
                    await self._published(link, message)

    async def _catch_up(self, link: ZmqLink) -> None:
        """Make up for what was published before the connection was there."""
        if self._numbers.next is not None and not (link.can_replay and await self._goes_on(link)):
            self._forget()
        if self._numbers.next is None and link.can_replay:
            await self._replay(link, 0)
        self._known.resume(self._rank)

    async def _replay(self, link: ZmqLink, first: int) -> None:
        async with aclosing(link.replay(first)) as messages:
            async for message in messages:
                await self._replayed(message)

    async def _goes_on(self, link: ZmqLink) -> bool:
        """Replay from the last message that was applied; False: the publisher does not have it any more, or
        it is another process.
        """
        assert self._numbers.next is not None
        last = self._numbers.next - 1
        async with aclosing(link.replay(last)) as messages:
            first = await anext(messages, None)
            if first is None or (first.number, _digest(first)) != (last, self._last):
                return False
            async for message in messages:
                await self._replayed(message)
        return True

    async def _replayed(self, message: EventBatch) -> None:
        if self._numbers.next is not None and message.number != self._numbers.next:
            # Some were dropped on the way.
            self._counts["gaps"] += 1
            self._index.clear()
        await self._apply(message)

    async def _published(self, link: ZmqLink, message: EventBatch) -> None:
        step = self._numbers.take(message.number)
        if step is NumberStep.SKIP:
            return
        if step is NumberStep.RESTART:
            self._begin_anew()
            await self._catch_up(link)
            if self._numbers.take(message.number) is NumberStep.SKIP:
                return
        elif step is NumberStep.GAP:
            self._counts["gaps"] += 1
            await self._fill(link)
            if message.number < (self._numbers.next or 0):
                return
            if message.number != self._numbers.next:
                self._index.clear()
        await self._apply(message)

    def _begin_anew(self) -> None:
        self._counts["restarts"] += 1
        self._restarts += 1
        if self._restarts > RESTARTS_MAX:
            raise BrokenPublisherError("the numbers of its messages run backwards again and again")
        self._forget()

    async def _fill(self, link: ZmqLink) -> None:
        """Replay what is missing."""
        if link.can_replay and self._numbers.next is not None:
            self._known.suspend(self._rank)
            await self._replay(link, self._numbers.next)
            self._known.resume(self._rank)

    async def _apply(self, message: EventBatch) -> None:
        self._counts["messages"] += 1
        now = self._now()
        async with aclosing(self._decoder.decode(message.payload, self._named)) as parts:
            async for part in parts:
                for event in part:
                    self._known.apply(self._rank, event, now)
                    self._spent += 1 if isinstance(event, Cleared) else 1 + len(event.blocks)
                if self._spent >= BLOCKS_PER_TURN:
                    self._spent = 0
                    await asyncio.sleep(0)
        # A batch without a block takes its time as well.
        self._spent += len(message.payload) >> 7
        if self._spent >= BLOCKS_PER_TURN:
            self._spent = 0
            await asyncio.sleep(0)
        self._numbers.next = message.number + 1
        self._last = _digest(message)


def _digest(message: EventBatch) -> int:
    return xxh3_64_intdigest(message.payload)


# Metrics of KV events, by unit that publishes them; none without one.


FAULTS = ("broken", "disconnects", "gaps", "malformed", "restarts")


def kv_event_metrics(following: KvEventFollowers) -> Iterator[Metric]:
    """What `following` follows."""
    units = [(state.unit.name, known, counts) for state, known, counts in following]
    yield gauge(
        "kv_events_blocks",
        "Blocks of the unit's KV cache that are known from its events, while these decide; else the gate "
        "goes by belief, and it is 0.",
        "unit",
        ((unit, len(known) if known.is_used() else 0) for unit, known, _ in units),
    )
    yield counter(
        "kv_events_messages",
        "Messages of KV events that were `applied`, and faults by kind; events that do not fit are "
        "`strange`.",
        ("unit", "result"),
        (
            row
            for unit, known, counts in units
            for row in [
                ((unit, "applied"), counts["messages"]),
                ((unit, "strange"), known.strange),
                *(((unit, f), counts[f]) for f in FAULTS),
            ]
        ),
    )
    yield counter(
        "kv_events_prompts",
        "Prompts sent to the unit that were looked for in its events, by whether they were found.",
        ("unit", "result"),
        (
            row
            for unit, known, _ in units
            for row in (((unit, "found"), known.found), ((unit, "missed"), known.missed))
        ),
    )


# KV events and a control plane.


def follow_kv_events(plane: Plane) -> Part:
    """Follows the units of `plane`. Needs a running loop."""
    following = KvEventFollowers(
        plane.board, lambda state: plane.reach.probe_transport(state).fetch, plane.now
    )
    return Part(following.close, tick=following.tick, metrics=partial(kv_event_metrics, following))
