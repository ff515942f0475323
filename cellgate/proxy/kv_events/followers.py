"""Follows the KV events of all units that publish them: finds out where, and starts and stops followers.

A unit that comes up is asked once for its publishers, unless they are configured. One that has none costs
nothing more.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq

from cellgate.probes.apis import parsed
from cellgate.probes.base import Fetch, FetchError
from cellgate.proxy.kv_events.decoding import KvDecoder
from cellgate.proxy.kv_events.link import KvEventLink, Publisher, ZmqLink
from cellgate.proxy.kv_events.publishers import PATHS, Publishers, configured, told
from cellgate.proxy.kv_events.rank_follower import RankFollower
from cellgate.proxy.logs.log import log_line
from cellgate.router.board import Board
from cellgate.router.known_prefixes import KnownPrefixes
from cellgate.router.kv_index import BLOCKS_MAX
from cellgate.router.kv_lessons import Lessons
from cellgate.router.unit_state import UnitState

ASK_S = 2.0
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
        link: Callable[[Publisher], KvEventLink] | None = None,
    ) -> None:
        self._board = board
        self._fetch_of = fetch_of
        self._now = now
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._link = link or self._connect
        self._decoder = KvDecoder()
        self.lessons = Lessons()
        self._units: dict[UnitState, Followed] = {}

    def __iter__(self) -> Iterator[tuple[UnitState, KnownPrefixes, Counter[str]]]:
        """The units that are followed, what is known of them, and what was counted."""
        for state, followed in self._units.items():
            if state.costs.known is not None:
                yield state, state.costs.known, followed.counts

    def tick(self, now: float) -> None:
        """Look for units that came, went or restarted, and for prompts whose events have come."""
        for state in [state for state in self._units if state.retired]:
            self._units.pop(state).stop()
        for state in self._board:
            followed = self._units.get(state)
            if followed is None:
                followed = self._units[state] = Followed()
            if state.costs.known is not None:
                state.costs.known.tick(now)
            if state.is_usable():
                self._look(state, followed)

    def _look(self, state: UnitState, followed: Followed) -> None:
        keys = state.unit.kv_events
        if keys is not None and keys.endpoint:
            self._follow(state, followed, configured(keys))
            return
        engine = keys.source if keys is not None else state.engine
        incarnation = (engine, state.case.reborn, state.risen_at)
        if engine in PATHS and followed.asked != incarnation:
            followed.asked = incarnation
            followed.asking = asyncio.create_task(
                self._ask(state, followed, engine), name=f"KV event sources of {state.unit.name}"
            )

    async def _ask(self, state: UnitState, followed: Followed, engine: str) -> None:
        try:
            reply = await self._fetch_of(state)("GET", PATHS[engine], timeout_s=ASK_S)
        except FetchError:
            followed.asked = None
            return
        if not state.retired:
            answer = parsed(reply.body) if reply.status == 200 else None
            self._follow(state, followed, told(engine, answer, state.unit.url))

    def _follow(self, state: UnitState, followed: Followed, publishers: Publishers) -> None:
        if publishers == followed.publishers:
            return
        followed.stop()
        followed.publishers = publishers
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

    def _connect(self, publisher: Publisher) -> KvEventLink:
        if self._context is None:
            self._context = zmq.Context(io_threads=1)
        return ZmqLink(self._context, publisher)

    async def close(self) -> None:
        """Leave all publishers."""
        tasks = [task for followed in self._units.values() for task in followed.tasks]
        tasks += [followed.asking for followed in self._units.values() if followed.asking is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._decoder.close()
        if self._context is not None:
            self._context.destroy(linger=0)
