"""The commands of a gate to Redis: writing documents, the index of writers, and reading.

Each exchange is a batch of commands with a timeout, for at most SLICE units. The loop turns between two, so
that streams are not delayed by the number of units. Redis refuses single commands; the others still count.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from redis.exceptions import (
    ResponseError,
)

from cellgate.extras.redis.reports import UnitReport, written
from cellgate.extras.redis.shared_bans import BAN_AGE_S, BANS_MAX, BanWrite
from cellgate.extras.redis_client.redis_names import Names
from cellgate.extras.redis_client.servers import Command, RedisClient
from cellgate.extras.redis_client.signing import CLOCK_S, UNSIGNED, Signer

SLICE, BEATS_AT_ONCE, DOCUMENTS_AT_ONCE = 32, 64, 128
MEMBERS_MAX, MEMBERS_AT_ONCE, ROWS_A_TURN = 2_000, 1_000, 500
"""So much is read of an index of gates: of a larger one, which somebody has filled, a part."""
CELLS_MAX = 1_000
DOCUMENT_AGE_S = 600.0
"""A document that is older at first sight is not believed: an idle unit's is written once in four minutes."""

T = TypeVar("T")


class IndexEntry(NamedTuple):
    """An entry of an index: this gate reports units of this cell."""

    cell: str
    gate: str


class RedisCommands:
    """The exchanges on one connection."""

    def __init__(self, client: RedisClient, names: Names, signer: Signer = UNSIGNED) -> None:
        self._client = client
        self._names = names
        self._signer = signer

    async def put(
        self, gate: str, reports: Iterable[UnitReport], expiry_ms: int
    ) -> tuple[list[UnitReport], list[ResponseError]]:
        """Write these documents of a gate. Those that were refused, and why."""
        refused, why = list[UnitReport](), list[ResponseError]()
        for part in _slices(reports):
            # Where it takes some of them not, it takes none: each would be made and sent for nothing.
            answers = [] if why else await self._client.exchange(self._set(gate, part, expiry_ms))
            why += [answer for answer in answers if isinstance(answer, ResponseError)]
            if why:
                refused += part
        return refused, why

    async def publish(self, flips: Iterable[UnitReport], expiry_ms: int) -> None:
        """Write these, and publish them on the channel of flips."""
        for part in _slices(flips):
            commands: list[Command] = []
            for report in part:
                flip = self._signer.sign(self._names.flips_of(report.gate), written(report))
                commands.append(("PUBLISH", self._names.flips, flip))
                commands += self._set(report.gate, [report], expiry_ms)
            await self._client.exchange(commands)

    async def put_beat(
        self, gate: str, beat: bytes, expiry_ms: int, documents_ms: int
    ) -> tuple[bool, list[ResponseError]]:
        """Write this gate's heartbeat, and have its documents live on. Whether it has any, and what was
        refused.
        """
        key = self._names.beat(gate)
        written = "SET", key, self._signer.sign(key, beat), "PX", expiry_ms
        lives_on = "PEXPIRE", self._names.units_of(gate), documents_ms
        answers = await self._client.exchange([written, lives_on])
        return bool(answers[1]), [answer for answer in answers if isinstance(answer, ResponseError)]

    async def get_beats(self, gates: Iterable[str]) -> AsyncIterator[tuple[str, Any]]:
        """The heartbeat of each of these gates, unchecked; None: there is none."""
        for part in _slices(gates, BEATS_AT_ONCE):
            keys = [self._names.beat(gate) for gate in part]
            (found,) = await self._client.exchange([("MGET", *keys)])
            if isinstance(found, Exception):
                # A Cluster moves that slot, and some of them are there already.
                found = await self._client.exchange([("GET", key) for key in keys])
            for gate, key, document in zip(part, keys, found, strict=True):
                yield gate, self._believed(key, document)

    async def cells(self) -> list[str]:
        """All cells with reports."""
        return sorted(islice(_texts(await self._members_of(self._names.cells)), CELLS_MAX))

    async def index_sizes(self, cells: Sequence[str]) -> dict[str, int]:
        """How many entries the index of each of these cells has."""
        sizes: dict[str, int] = {}
        for part in _slices(cells):
            answers = await self._client.exchange([("SCARD", self._names.gates_of(cell)) for cell in part])
            sizes |= zip(part, answers, strict=True)
        return sizes

    async def index(self, cells: Sequence[str]) -> set[IndexEntry]:
        """The gates that report units of these cells."""
        if not cells:
            return set()
        found = [await self._members_of(self._names.gates_of(cell)) for cell in cells]
        rows = zip(cells, found, strict=True)
        members = (member for cell, row in rows for member in _members(cell, row))
        return {member async for member in in_turns(islice(members, MEMBERS_MAX))}

    async def add_to_index(self, members: Iterable[IndexEntry]) -> None:
        """Put these on the index."""
        for part in _slices(members):
            commands: list[Command] = []
            for member in part:
                commands.append(("SADD", self._names.cells, member.cell))
                commands.append(("SADD", self._names.gates_of(member.cell), member.gate))
            await self._client.exchange(commands)

    async def remove_from_index(self, members: Iterable[IndexEntry]) -> None:
        """Take these off the index."""
        for part in _slices(members):
            await self._client.exchange(
                [("SREM", self._names.gates_of(member.cell), member.gate) for member in part]
            )

    async def remove_units(self, gate: str, units: Iterable[str]) -> None:
        """Remove the documents of units that a gate has no more."""
        for part in _slices(units):
            await self._client.exchange([("HDEL", self._names.units_of(gate), *part)])

    async def documents(self, gate: str, cursor: int) -> tuple[int, list[tuple[str, bytes]]]:
        """Some of a gate's documents, from where the last ones ended (0: the first): where they end (0: there
        are no more), and each with its unit; empty: one that nobody is to believe.
        """
        key = self._names.units_of(gate)
        (answer,) = await self._client.exchange([("HSCAN", key, cursor, "COUNT", DOCUMENTS_AT_ONCE)])
        if isinstance(answer, Exception):
            return 0, []
        found = list[tuple[str, bytes]]()
        for name, document in answer[1].items():
            unit = name.decode("latin-1")
            is_believed = self._signer.believes(self._names.unit(unit, gate), document, age_s=DOCUMENT_AGE_S)
            found.append((unit, document if is_believed else b""))
        return int(answer[0]), found

    async def publish_bans(self, rows: Iterable[BanWrite], *, publish: bool = True) -> None:
        """Write these bans, or their ends, and publish them on the channel of flips."""
        for part in _slices(rows):
            commands: list[Command] = []
            for row in part:
                if publish:
                    flip = self._signer.sign(self._names.flips_of(row.gate), row.document)
                    commands.append(("PUBLISH", self._names.flips, flip))
                key = self._names.ban(row.mark)
                commands.append(("SET", key, self._signer.sign(key, row.document), "PX", row.expiry_ms))
                commands.append(("SREM" if row.is_lifted else "SADD", self._names.poison, row.mark))
            await self._client.exchange(commands)

    async def bans(self) -> set[str]:
        """The prompts that any gate refuses."""
        return set(islice(_texts(await self._members_of(self._names.poison)), BANS_MAX))

    async def _members_of(self, key: str) -> Any:
        """The members of a set. Of one that is too large to be by gates some are read, in slices."""
        (size,) = await self._client.exchange([("SCARD", key)])
        if not isinstance(size, int) or size <= MEMBERS_AT_ONCE:
            (found,) = await self._client.exchange([("SMEMBERS", key)])
            return found
        found, cursor = set[Any](), b"0"
        for _ in range(MEMBERS_MAX // MEMBERS_AT_ONCE):
            (answer,) = await self._client.exchange([("SSCAN", key, cursor, "COUNT", MEMBERS_AT_ONCE)])
            if isinstance(answer, Exception):
                break
            found.update(answer[1])
            cursor = answer[0] if isinstance(answer[0], bytes) else str(answer[0]).encode()
            if cursor == b"0":
                break
        return found

    async def get_bans(self, marks: Iterable[str]) -> AsyncIterator[tuple[str, Any, Any]]:
        """The value of each key and its time to live in milliseconds; missing ones are removed from the
        index.
        """
        for part in _slices(marks):
            keys = [self._names.ban(mark) for mark in part]
            answers = await self._client.exchange([(word, key) for key in keys for word in ("GET", "PTTL")])
            if gone := [mark for mark, found in zip(part, answers[::2], strict=True) if found is None]:
                await self._client.exchange([("SREM", self._names.poison, mark) for mark in gone])
            for mark, key, found, pttl_ms in zip(part, keys, answers[::2], answers[1::2], strict=True):
                believed = self._believed(key, found, age_s=BAN_AGE_S)
                is_known = bool(believed) and isinstance(pttl_ms, int)
                yield mark, believed, self._signer.left_ms(key, pttl_ms) if is_known else pttl_ms

    async def put_prefixes(self, gate: str, document: bytes, expiry_ms: int) -> None:
        """Write this gate's hashes of cached prompts. A refusal does no harm."""
        key = self._names.prefixes(gate)
        await self._client.exchange([("SET", key, self._signer.sign(key, document), "PX", expiry_ms)])

    async def get_prefixes(self, gates: Iterable[str]) -> AsyncIterator[tuple[str, Any]]:
        """The documents of these gates; None: there is none."""
        for part in _slices(gates):
            keys = [self._names.prefixes(gate) for gate in part]
            answers = await self._client.exchange([("GET", key) for key in keys])
            for gate, key, found in zip(part, keys, answers, strict=True):
                yield gate, self._believed(key, found)

    def believes_flip(self, gate: str, document: bytes) -> bool:
        """Whether what the channel brought was said by that gate, now."""
        return self._signer.believes(self._names.flips_of(gate), document, once=True)

    def _set(self, gate: str, reports: Iterable[UnitReport], expiry_ms: int) -> list[Command]:
        documents = list[str | bytes]()
        for report in reports:
            place = self._names.unit(report.unit, gate)
            documents += report.unit, self._signer.sign(place, written(report))
        key = self._names.units_of(gate)
        # A gate that ends before its next heartbeat would leave it for ever.
        return [("HSET", key, *documents), ("PEXPIRE", key, expiry_ms)]

    def _believed(self, key: str, found: Any, *, age_s: float = CLOCK_S) -> Any:
        """A document; an empty one in the place of one that nobody is to believe."""
        is_believed = not isinstance(found, bytes) or self._signer.believes(key, found, age_s=age_s)
        return found if is_believed else b""


def _slices(rows: Iterable[T], size: int = SLICE) -> Iterator[list[T]]:
    rest = iter(rows)
    while part := list(islice(rest, size)):
        yield part


async def in_turns(rows: Iterable[T]) -> AsyncIterator[T]:
    """These rows, so many in one turn of the loop: somebody may have written as many as are read at all."""
    for number, row in enumerate(rows, 1):
        yield row
        if number % ROWS_A_TURN == 0:
            await asyncio.sleep(0)


def _texts(found: Any) -> Iterator[str]:
    """The entries of a set, as far as it is one."""
    for entry in found if isinstance(found, set) else ():
        if isinstance(entry, bytes):
            yield entry.decode("latin-1")


def _members(cell: str, found: Any) -> Iterator[IndexEntry]:
    """The entries of an index that have the form of one."""
    return (IndexEntry(cell, gate) for gate in _texts(found) if gate and ":" not in gate)
