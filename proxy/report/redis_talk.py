"""What a gate and Redis say to each other: writing documents, the index of who writes what, and reading.

Each exchange is one pipeline, bounded in time, of at most SLICE units: the loop turns between two, so that no
stream feels how many units there are. What Redis refuses, it refuses command by command; the rest counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from proxy.report.redis_connect import EXCHANGE_S
from proxy.report.redis_schema import Names, View, written

SLICE = 32
MEMBERS_MAX = 20_000
CELLS_MAX = 1_000

T = TypeVar("T")


class Member(NamedTuple):
    """An entry of an index: this gate tells of this unit, which is of this cell."""

    cell: str
    unit: str
    gate: str


class Talk:
    """The exchanges on one connection."""

    def __init__(self, client: Redis, names: Names) -> None:
        self._client = client
        self._names = names

    async def put(self, views: Iterable[View], expiry_ms: int) -> tuple[set[Member], int]:
        """Write these documents. Whose they are, and how many were refused."""
        members, refused = set(), 0
        for part in _slices(views):
            pipe = self._client.pipeline(transaction=False)
            for view in part:
                members.add(Member(view.cell, view.unit, view.gate))
                pipe.set(self._names.unit(view.unit, view.gate), written(view), px=expiry_ms)
            refused += sum(isinstance(result, ResponseError) for result in await _done(pipe))
        return members, refused

    async def tell(self, flips: Iterable[View], expiry_ms: int) -> None:
        """Write these, and tell of them on the channel of flips."""
        for part in _slices(flips):
            pipe = self._client.pipeline(transaction=False)
            for view in part:
                document = written(view)
                pipe.publish(self._names.flips, document)
                pipe.set(self._names.unit(view.unit, view.gate), document, px=expiry_ms)
            await _done(pipe)

    async def cells(self) -> list[str]:
        """All cells that anybody tells of."""
        pipe = self._client.pipeline(transaction=False)
        pipe.smembers(self._names.cells)
        (row,) = await _done(pipe)
        found = (
            (cell.decode("latin-1") for cell in row if isinstance(cell, bytes))
            if isinstance(row, set)
            else ()
        )
        return sorted(found)[:CELLS_MAX]

    async def index(self, cells: Sequence[str]) -> set[Member]:
        """Who tells of units of these cells."""
        if not cells:
            return set()
        pipe = self._client.pipeline(transaction=False)
        for cell in cells:
            pipe.smembers(self._names.units_of(cell))
        rows = zip(cells, await _done(pipe), strict=True)
        return set(islice((member for cell, row in rows for member in _members(cell, row)), MEMBERS_MAX))

    async def enlist(self, members: Iterable[Member]) -> None:
        """Put these on the index."""
        for part in _slices(members):
            pipe = self._client.pipeline(transaction=False)
            for member in part:
                pipe.sadd(self._names.cells, member.cell)
                pipe.sadd(self._names.units_of(member.cell), f"{member.unit}:{member.gate}")
            await _done(pipe)

    async def delist(self, members: Iterable[Member]) -> None:
        """Take these off the index."""
        for part in _slices(members):
            pipe = self._client.pipeline(transaction=False)
            for member in part:
                pipe.srem(self._names.units_of(member.cell), f"{member.unit}:{member.gate}")
            await _done(pipe)

    async def get(self, members: Iterable[Member]) -> AsyncIterator[tuple[Member, Any, Any]]:
        """What stands at each key, and the milliseconds that it has left; as found, whatever that is."""
        for part in _slices(members):
            pipe = self._client.pipeline(transaction=False)
            for member in part:
                key = self._names.unit(member.unit, member.gate)
                pipe.get(key)
                pipe.pttl(key)
            results = await _done(pipe)
            for row in zip(part, results[::2], results[1::2], strict=True):
                yield row


async def _done(pipe: Any) -> list[Any]:
    """The answers to a pipeline; an error of the server stands in the place of an answer."""
    async with asyncio.timeout(EXCHANGE_S):
        results: list[Any] = await pipe.execute(raise_on_error=False)
    return results


def _slices(rows: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(rows)
    while part := list(islice(rest, SLICE)):
        yield part


def _members(cell: str, found: Any) -> Iterator[Member]:
    """The entries of an index that have the form of one."""
    for entry in found if isinstance(found, (set, list)) else ():
        unit, _, gate = entry.decode("latin-1").partition(":") if isinstance(entry, bytes) else ("", "", "")
        if unit and gate and ":" not in gate:
            yield Member(cell, unit, gate)
