"""Follows the KV events of one rank of a unit, and keeps its index complete or out of use.

Rules:
1. While the connection is lost, and while something missed is not made up for by a replay, the rank has no
   say. Silence is normal: an engine publishes nothing when nothing changes.
2. What cannot be made up for is forgotten: the index begins anew with what is published from then on.
3. A publisher that is broken is left, its index is cleared, and it is tried again later, ever more seldom.
4. One turn of the loop applies at most BLOCKS_PER_TURN blocks; large messages are decoded elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, closing

from xxhash import xxh3_64_intdigest

from cellgate.proxy.kv_events.decode import MalformedError
from cellgate.proxy.kv_events.decoding import KvDecoder
from cellgate.proxy.kv_events.link import BrokenPublisherError, EventBatch, KvEventLink, Reached
from cellgate.proxy.kv_events.sequence import Numbers, NumberStep
from cellgate.proxy.logs.log import log_line
from cellgate.router.known_prefixes import KnownPrefixes
from cellgate.router.kv_index import BLOCKS_MAX, Cleared

BLOCKS_PER_TURN = 256
"""About half a millisecond."""
RETRY_S, RETRY_MAX_S = 1.0, 16.0
RESTARTS_MAX = 3
"""A publisher that has begun anew more often on one connection is broken: a process counts upwards."""


class RankFollower:
    """Follows one rank. `link` makes the connection; `of` names the unit for people."""

    def __init__(
        self,
        of: str,
        rank: int,
        known: KnownPrefixes,
        link: Callable[[], KvEventLink],
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

    async def _follow(self, link: KvEventLink) -> None:
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

    async def _catch_up(self, link: KvEventLink) -> None:
        """Make up for what was published before the connection was there."""
        if self._numbers.next is not None and not (link.can_replay and await self._goes_on(link)):
            self._forget()
        if self._numbers.next is None and link.can_replay:
            await self._replay(link, 0)
        self._known.resume(self._rank)

    async def _replay(self, link: KvEventLink, first: int) -> None:
        async with aclosing(link.replay(first)) as messages:
            async for message in messages:
                await self._replayed(message)

    async def _goes_on(self, link: KvEventLink) -> bool:
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

    async def _published(self, link: KvEventLink, message: EventBatch) -> None:
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

    async def _fill(self, link: KvEventLink) -> None:
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
