"""The commands of a gate to Redis: writing documents, the index of writers, and reading.

Each exchange is a batch of commands with a timeout, for at most SLICE units. The loop turns between two, so
that streams are not delayed by the number of units. Redis refuses single commands; the others still count.

In this order: `RedisCommands`, `SharedBans`, `ServerClient`, `ClusterClient`, `RedisUrl`, `connector`.
"""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import orjson
from redis.asyncio import Redis, Sentinel
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cellgate.proxy.config.checks import address
from cellgate.proxy.config.settings import Address, RedisAccess, Tls
from cellgate.proxy.control.containment import Containment, fingerprint_name
from cellgate.proxy.observe.text import one_line
from cellgate.proxy.process.certificates import note_shown
from cellgate.proxy.redis.reports import Names, UnitReport, written
from cellgate.proxy.redis.signing import CLOCK_S, UNSIGNED, Signer
from cellgate.router.poison import Ban

SLICE = 32
MEMBERS_MAX, MEMBERS_AT_ONCE, ROWS_A_TURN = 20_000, 1_000, 500
CELLS_MAX = 1_000

T = TypeVar("T")


class IndexEntry(NamedTuple):
    """An entry of an index: this gate reports this unit of this cell."""

    cell: str
    unit: str
    gate: str


class RedisCommands:
    """The exchanges on one connection."""

    def __init__(self, client: RedisClient, names: Names, signer: Signer = UNSIGNED) -> None:
        self._client = client
        self._names = names
        self._signer = signer

    async def put(self, reports: Iterable[UnitReport], expiry_ms: int) -> tuple[int, list[ResponseError]]:
        """Write these documents. How many there were, and what was refused."""
        count, refused = 0, list[ResponseError]()
        for part in _slices(reports):
            count += len(part)
            answers = await self._client.exchange([self._set(report, expiry_ms) for report in part])
            refused += [answer for answer in answers if isinstance(answer, ResponseError)]
        return count, refused

    async def publish(self, flips: Iterable[UnitReport], expiry_ms: int) -> None:
        """Write these, and publish them on the channel of flips."""
        for part in _slices(flips):
            commands: list[Command] = []
            for report in part:
                flip = self._signer.sign(self._names.flips_of(report.gate), written(report))
                commands.append(("PUBLISH", self._names.flips, flip))
                commands.append(self._set(report, expiry_ms))
            await self._client.exchange(commands)

    async def put_beat(self, gate: str, beat: bytes, expiry_ms: int) -> list[ResponseError]:
        """Write this gate's heartbeat; what was refused."""
        key = self._names.beat(gate)
        answers = await self._client.exchange([("SET", key, self._signer.sign(key, beat), "PX", expiry_ms)])
        return [answer for answer in answers if isinstance(answer, ResponseError)]

    async def get_beats(self, gates: Iterable[str]) -> AsyncIterator[tuple[str, Any, Any]]:
        """The heartbeat of each of these gates, unchecked, and its time to live in milliseconds."""
        for part in _slices(gates):
            keys = [self._names.beat(gate) for gate in part]
            answers = await self._client.exchange([(word, key) for key in keys for word in ("GET", "PTTL")])
            for gate, key, found, pttl_ms in zip(part, keys, answers[::2], answers[1::2], strict=True):
                yield gate, *self._checked(key, found, pttl_ms)

    async def cells(self) -> list[str]:
        """All cells with reports."""
        return sorted(islice(_texts(await self._members_of(self._names.cells)), CELLS_MAX))

    async def index_sizes(self, cells: Sequence[str]) -> dict[str, int]:
        """How many entries the index of each of these cells has."""
        sizes: dict[str, int] = {}
        for part in _slices(cells):
            answers = await self._client.exchange([("SCARD", self._names.units_of(cell)) for cell in part])
            sizes |= zip(part, answers, strict=True)
        return sizes

    async def index(self, cells: Sequence[str]) -> set[IndexEntry]:
        """The reporting gates of the units of these cells."""
        if not cells:
            return set()
        found = [await self._members_of(self._names.units_of(cell)) for cell in cells]
        rows = zip(cells, found, strict=True)
        members = (member for cell, row in rows for member in _members(cell, row))
        return {member async for member in in_turns(islice(members, MEMBERS_MAX))}

    async def add_to_index(self, members: Iterable[IndexEntry]) -> None:
        """Put these on the index."""
        for part in _slices(members):
            commands: list[Command] = []
            for member in part:
                commands.append(("SADD", self._names.cells, member.cell))
                commands.append(("SADD", self._names.units_of(member.cell), f"{member.unit}:{member.gate}"))
            await self._client.exchange(commands)

    async def remove_from_index(self, members: Iterable[IndexEntry]) -> None:
        """Take these off the index, and remove their documents."""
        for part in _slices(members):
            commands: list[Command] = []
            for member in part:
                entry = f"{member.unit}:{member.gate}"
                commands.append(("SREM", self._names.units_of(member.cell), entry))
                commands.append(("DEL", self._names.unit(member.unit, member.gate)))
            await self._client.exchange(commands)

    async def get(self, members: Iterable[IndexEntry]) -> AsyncIterator[tuple[IndexEntry, Any, Any]]:
        """The value of each key, unchecked, and its time to live in milliseconds."""
        for part in _slices(members):
            keys = [self._names.unit(member.unit, member.gate) for member in part]
            answers = await self._client.exchange([(word, key) for key in keys for word in ("GET", "PTTL")])
            for member, key, found, pttl_ms in zip(part, keys, answers[::2], answers[1::2], strict=True):
                yield member, *self._checked(key, found, pttl_ms)

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
                yield mark, *self._checked(key, found, pttl_ms, age_s=BAN_AGE_S)

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
                yield gate, self._checked(key, found, 0)[0]

    def believes_flip(self, gate: str, document: bytes) -> bool:
        """Whether what the channel brought was said by that gate, now."""
        return self._signer.believes(self._names.flips_of(gate), document, once=True)

    def _set(self, report: UnitReport, expiry_ms: int) -> Command:
        key = self._names.unit(report.unit, report.gate)
        return "SET", key, self._signer.sign(key, written(report)), "PX", expiry_ms

    def _checked(self, key: str, found: Any, pttl_ms: Any, *, age_s: float = CLOCK_S) -> tuple[Any, Any]:
        """A document and its time to live; an empty one in the place of one that nobody is to believe."""
        if isinstance(found, bytes) and not self._signer.believes(key, found, age_s=age_s):
            return b"", pttl_ms
        return found, self._signer.left_ms(key, pttl_ms) if isinstance(pttl_ms, int) and found else pttl_ms


def _slices(rows: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(rows)
    while part := list(islice(rest, SLICE)):
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
    for entry in _texts(found):
        unit, _, gate = entry.partition(":")
        if unit and gate and ":" not in gate:
            yield IndexEntry(cell, unit, gate)


# Bans of prompts that gates share: a JSON document for each. docs/redis.md describes it.
#
# Advisory like everything in Redis: a document that is invalid, of an unknown gate, or without an end is
# counted and ignored. The time of a ban here is limited by this gate's own `poison.ban_s`.


VERSION = 1
COMMAND_DOCUMENT_MAX = 4096
BANS_MAX = 1024
"""The most entries of the index that are read."""
LEFT_MS_MAX = 1 << 40
BAN_AGE_S = 3600.0
"""A document that is older was not written for a ban that still holds."""
LIFTED_MS = 1000
"""How long the end of a ban stays readable."""
_BEGIN = b'{"poison":'
_COMMAND_MARK = re.compile(r"[0-9a-f]{16}")
_COMMAND_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MODEL_MAX, _UNITS_MAX = 128, 8


class BanDocument(NamedTuple):
    """One document. `left_ms`: how long it holds; 0: it is lifted."""

    mark: str
    gate: str
    model: str
    units: tuple[str, ...]
    left_ms: int
    payer: str = ""


class BanWrite(NamedTuple):
    """A document to be written, and its expiry."""

    mark: str
    document: bytes
    expiry_ms: int
    is_lifted: bool
    gate: str = ""


def is_ban(document: bytes) -> bool:
    """Whether a message on the channel is of this kind."""
    return document.startswith(_BEGIN)


def read_ban(document: bytes) -> BanDocument | None:
    """The content of a document; None when it is invalid."""
    try:
        found = orjson.loads(document) if len(document) <= COMMAND_DOCUMENT_MAX else None
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict) or found.get("v") != VERSION:
        return None
    mark, gate = _fit(found.get("poison"), _COMMAND_MARK), _fit(found.get("gate"), _COMMAND_NAME)
    left_ms, model, units = found.get("left_ms"), found.get("model"), found.get("units")
    if mark is None or gate is None or not isinstance(left_ms, int) or not 0 <= left_ms <= LEFT_MS_MAX:
        return None
    named = [str(unit) for unit in units if _fit(unit, _COMMAND_NAME)] if isinstance(units, list) else []
    model = model[:_MODEL_MAX] if isinstance(model, str) else ""
    payer = found.get("payer", "")
    payer = payer[:_MODEL_MAX] if isinstance(payer, str) else ""
    return BanDocument(mark, gate, model, tuple(named[:_UNITS_MAX]), left_ms, payer)


class SharedBans:
    """One gate's part in it, under the name `gate`."""

    def __init__(self, containment: Containment, gate: str, now: Callable[[], float]) -> None:
        self._containment = containment
        self._gate = gate
        self._now = now

    def own(self) -> list[BanWrite]:
        """The bans of this gate."""
        return [self.row(ban, lifted=False) for ban in self._containment.bans.all() if not ban.gate]

    def row(self, ban: Ban, *, lifted: bool) -> BanWrite:
        """The document of a ban that begins, or was lifted."""
        left_ms = 0 if lifted else max(1, round(1000 * (ban.until - self._now())))
        written = {
            "poison": fingerprint_name(ban.fingerprint),
            "v": VERSION,
            "gate": self._gate,
            "model": ban.model[:_MODEL_MAX],
            "units": ban.units[:_UNITS_MAX],
            "left_ms": left_ms,
            "payer": ban.payer[:_MODEL_MAX],
        }
        mark, expiry_ms = fingerprint_name(ban.fingerprint), left_ms or LIFTED_MS
        return BanWrite(mark, orjson.dumps(written), expiry_ms, lifted, self._gate)

    def knows(self, mark: str) -> bool:
        """Whether that prompt is refused here."""
        return (
            _fit(mark, _COMMAND_MARK) is not None
            and self._containment.bans.find(int(mark, 16), self._now()) is not None
        )

    def received(self, document: Any, gates: Collection[str], left_ms: int | None = None) -> bool:
        """Apply a document of one of `gates`; False when it is ignored. `left_ms`: the time to live of its
        key.
        """
        written = read_ban(document) if isinstance(document, bytes) else None
        if written is None or written.gate not in gates or written.gate == self._gate:
            return False
        mark, contained = int(written.mark, 16), self._containment
        if not written.left_ms:
            contained.lift(mark, f"gate {written.gate}", tell=False)
            return True
        left_s = min(written.left_ms if left_ms is None else left_ms, written.left_ms) / 1000.0
        now = self._now()
        until = now + min(left_s, contained.ban_s)
        if until > now:
            contained.take(Ban(mark, written.model, now, until, written.units, written.gate, written.payer))
        return True


def _fit(found: Any, pattern: re.Pattern[str]) -> str | None:
    return found if isinstance(found, str) and pattern.fullmatch(found) else None


# What the gate wants of a Redis, however many servers it is: batches of commands, and one channel.
#
# Every command has one key, so that a Cluster can take each of them.


EXCHANGE_S = 1.0
"""How long one exchange may take before the connection is given up."""

Command = tuple[str | bytes | int, ...]


class RedisClient(Protocol):
    """One user's connections. Errors are those of redis-py, or TimeoutError."""

    async def exchange(self, commands: Sequence[Command], limit_s: float = EXCHANGE_S, /) -> list[Any]:
        """The answers to these commands; an error of the server stands in the place of an answer."""

    async def pubsub(self) -> PubSub:
        """For messages of a channel that any client of this Redis publishes."""

    async def disconnect(self) -> None:
        """Close all connections; the next exchange makes new ones."""


class ServerClient:
    """One server, or the primary that `sentinels` name, who are asked for each connection."""

    def __init__(self, redis: Redis, sentinels: Sequence[Redis] = ()) -> None:
        self._redis = redis
        self._sentinels = sentinels

    async def exchange(self, commands: Sequence[Command], limit_s: float = EXCHANGE_S) -> list[Any]:
        """The answers to these commands; an error of the server stands in the place of an answer."""
        batch = self._redis.pipeline(transaction=False)
        for command in commands:
            batch.execute_command(*command)
        # A cancelled exchange closes its connection, so no later one reads its answers.
        async with asyncio.timeout(limit_s):
            return await batch.execute(raise_on_error=False)

    async def pubsub(self) -> PubSub:
        """For messages of a channel."""
        return self._redis.pubsub(ignore_subscribe_messages=True)

    async def disconnect(self) -> None:
        """Close all connections. Raises the first error once all were tried."""
        pools = [each.connection_pool for each in (self._redis, *self._sentinels)]
        for ended in await asyncio.gather(*(pool.disconnect() for pool in pools), return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended


async def answered(
    client: RedisClient, commands: Sequence[Command], limit_s: float = EXCHANGE_S
) -> list[Any]:
    """As `exchange`, for commands that must all succeed. Raises the first error of the server."""
    answers = await client.exchange(commands, limit_s)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


# A Redis Cluster: each command goes to the node that has its key.
#
# 1. The table of slots is read from any node that answers: at first, after a failure, and when a node says
# that a slot has moved.
# 2. Commands of one exchange go to all nodes at the same time. One that a node redirects is sent once more.
# 3. PUBLISH goes to any node: the nodes pass it on to each other, and any of them has all messages. So the
#    one channel of the gates needs no sharded one, which would have to follow its slot.


NODE_S = 0.3
"""How long one node is waited for when the table is read."""
_KEY_OF_SCRIPT = 3


class ClusterSlots(NamedTuple):
    """Which node has which slots: from `firsts[i]` to `lasts[i]` it is `owners[i]`."""

    firsts: list[int]
    lasts: list[int]
    owners: list[Address]

    def owner(self, slot: int) -> Address:
        """Raises redis-py's ConnectionError for a slot that no node has."""
        at = bisect_right(self.firsts, slot) - 1
        if at < 0 or slot > self.lasts[at]:
            raise RedisConnectionError(f"no node of the cluster has slot {slot}")
        return self.owners[at]


class ClusterClient:
    """`seeds` are nodes to begin with, `open_node` makes the client of one. It connects when it is used."""

    def __init__(self, seeds: Sequence[Address], open_node: Callable[[Address], Redis]) -> None:
        self._seeds = tuple(seeds)
        self._open_node = open_node
        self._nodes: dict[Address, ServerClient] = {}
        self._slots: ClusterSlots | None = None

    async def exchange(self, commands: Sequence[Command], limit_s: float = EXCHANGE_S) -> list[Any]:
        """The answers to these commands; an error of a node stands in the place of an answer. Raises
        redis-py's ConnectionError when a node that is needed does not answer, or the cluster is down.
        """
        try:
            async with asyncio.timeout(limit_s):
                answers = await self._send(self._slots or await self._look(), commands)
                for number, answer in enumerate(answers):
                    if isinstance(answer, AskError):
                        answers[number] = await self._follow(commands[number], answer)
        except (RedisError, OSError, TimeoutError):
            self._slots = None
            raise
        return answers

    async def pubsub(self) -> PubSub:
        """Of the first node in the table."""
        async with asyncio.timeout(EXCHANGE_S):
            slots = self._slots or await self._look()
        return await self._node(slots.owners[0]).pubsub()

    async def disconnect(self) -> None:
        """Close all connections, and read the table again before the next exchange."""
        self._slots = None
        for node in self._nodes.values():
            with suppress(RedisError, OSError):
                await node.disconnect()

    async def _send(self, slots: ClusterSlots, commands: Sequence[Command]) -> list[Any]:
        parts: dict[Address, list[int]] = {}
        for number, command in enumerate(commands):
            parts.setdefault(_owner(slots, command), []).append(number)
        asked = (self._node(at).exchange([commands[n] for n in part]) for at, part in parts.items())
        answers: list[Any] = [None] * len(commands)
        for part, found in zip(
            parts.values(), await asyncio.gather(*asked, return_exceptions=True), strict=True
        ):
            if isinstance(found, BaseException):
                raise found
            for number, answer in zip(part, found, strict=True):
                if isinstance(answer, ClusterDownError):
                    raise RedisConnectionError(f"the cluster is down: {answer}")
                answers[number] = answer
        return answers

    async def _follow(self, command: Command, error: AskError) -> Any:
        """The answer of the node that another one has named."""
        if isinstance(error, MovedError):
            self._slots = None
        asking: list[Command] = [] if isinstance(error, MovedError) else [("ASKING",)]
        node = self._node(Address(error.host, int(error.port)))
        return (await node.exchange([*asking, command]))[-1]

    async def _look(self) -> ClusterSlots:
        """Read the table. Raises redis-py's ConnectionError when no node has one."""
        trouble = ""
        for at in dict.fromkeys((*self._nodes, *self._seeds)):
            try:
                (found,) = await self._node(at).exchange([("CLUSTER", "SLOTS")], NODE_S)
                self._slots = _table(found, at)
            except (RedisError, OSError, TimeoutError, ValueError) as error:
                trouble = f"{at}: {error or 'no answer'}"
                continue
            await self._keep(self._slots.owners)
            return self._slots
        raise RedisConnectionError(f"no node of the cluster answers with its slots; {trouble}")

    async def _keep(self, owners: Iterable[Address]) -> None:
        """Forget nodes that have no slots any more."""
        for at in self._nodes.keys() - set(owners):
            with suppress(RedisError, OSError):
                await self._nodes.pop(at).disconnect()

    def _node(self, at: Address) -> ServerClient:
        if at not in self._nodes:
            self._nodes[at] = ServerClient(self._open_node(at))
        return self._nodes[at]


def _owner(slots: ClusterSlots, command: Command) -> Address:
    word = command[0]
    if word in ("PUBLISH", "PING"):
        return slots.owners[0]
    key = command[_KEY_OF_SCRIPT if word == "EVAL" else 1]
    return slots.owner(key_slot(key if isinstance(key, bytes) else str(key).encode()))


def _table(found: Any, asked: Address) -> ClusterSlots:
    """The answer to CLUSTER SLOTS: `[first, last, [host, port, id, ...], replicas ...]` for each range.
    Raises ValueError, or the error of the server.
    """
    if isinstance(found, Exception):
        raise found
    try:
        rows = sorted((int(row[0]), int(row[1]), _address(row[2], asked)) for row in found)
    except (TypeError, IndexError, AttributeError) as error:
        raise ValueError("not a table of slots") from error
    if not rows:
        raise ValueError("it has no slots")
    return ClusterSlots([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])


def _address(node: Any, asked: Address) -> Address:
    """A node without a host is the one that was asked."""
    host = node[0].decode() if node[0] else asked.host
    return Address(host, int(node[1]))


# Where Redis is: one server, a primary that Sentinels know, or a Cluster; as the operator wrote it.


NO_URL = (
    "expected a URL such as redis://HOST:PORT/0, rediss://HOST:PORT/0, unix:///PATH, "
    "redis+sentinel://HOST:PORT,HOST:PORT/NAME or redis+cluster://HOST:PORT,HOST:PORT, without user and "
    "password: these have keys of their own (docs/redis.md)"
)
_SERVER = re.compile(r"rediss?://[^@/?#\s,]+(/\d*)?|unix:///[^@?#\s]+(\?db=\d+)?", re.ASCII)
_SENTINEL = re.compile(
    r"rediss?\+sentinel://(?P<hosts>[^@/?#\s]+)/(?P<name>[\w.-]+)(/(?P<db>\d{1,5}))?", re.ASCII
)
_CLUSTER = re.compile(r"rediss?\+cluster://(?P<hosts>[^@/?#\s]+)/?", re.ASCII)
_SENTINEL_PORT, _PORT = 26379, 6379


class RedisKind(Enum):
    """What answers there."""

    SERVER = "server"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """`hosts` are Sentinels, or nodes of a Cluster; `primary` is the name under which Sentinels know it."""

    text: str = field(repr=False)
    kind: RedisKind = RedisKind.SERVER
    hosts: tuple[Address, ...] = ()
    primary: str = ""
    database: int = 0

    @property
    def is_secured(self) -> bool:
        """Whether connections are TLS."""
        return self.text.startswith("rediss")


def read_url(text: str) -> RedisUrl:
    """Raises ValueError, without showing what may be a password."""
    if _SERVER.fullmatch(text):
        return RedisUrl(text)
    if found := _SENTINEL.fullmatch(text):
        hosts = _hosts(found["hosts"], _SENTINEL_PORT)
        return RedisUrl(text, RedisKind.SENTINEL, hosts, found["name"], int(found["db"] or 0))
    if found := _CLUSTER.fullmatch(text):
        return RedisUrl(text, RedisKind.CLUSTER, _hosts(found["hosts"], _PORT))
    raise ValueError(NO_URL)


def _hosts(text: str, port: int) -> tuple[Address, ...]:
    has_port = re.compile(r".*:\d+", re.ASCII)
    try:
        return tuple(address(one if has_port.fullmatch(one) else f"{one}:{port}") for one in text.split(","))
    except ValueError as error:
        raise ValueError(NO_URL) from error


# Connections to Redis: from a URL, with timeouts, and with errors that show no password.


_NO_TLS = Tls()
_COMMAND_REFUSED = "invalid username-password pair"
_SENTINEL_USER = "default"
"""With this name a Sentinel that wants no password accepts any."""

Connect = Callable[[], RedisClient]


def connector(access: RedisAccess, tls: Tls = _NO_TLS) -> Connect:
    """A factory of clients for the Redis at a URL. TLS is verified by `tls.ca`, with
    `tls.unit_cert` as client certificate.

    Raises ValueError when the URL is invalid or has a password, without showing it.
    """
    url = read_url(access.url)
    options = _options(access, url, tls)
    makers: dict[RedisKind, Connect] = {
        RedisKind.SERVER: lambda: ServerClient(Redis.from_url(url.text, **options)),
        RedisKind.SENTINEL: lambda: _by_sentinel(access, url, options),
        RedisKind.CLUSTER: lambda: ClusterClient(url.hosts, lambda at: _node(at, options)),
    }
    try:
        makers[url.kind]()
    except Exception as error:
        raise ValueError(NO_URL) from error
    return makers[url.kind]


def _options(access: RedisAccess, url: RedisUrl, tls: Tls) -> dict[str, Any]:
    """Of each connection."""
    options: dict[str, Any] = {
        "username": access.username,
        "password": access.password,
        "protocol": 2,
        "socket_connect_timeout": EXCHANGE_S,
        # A timeout for each answer doubles the cost of an exchange: the caller limits it as a whole.
        "socket_timeout": None,
        "retry": Retry(NoBackoff(), 0),
    }
    if not url.is_secured:
        return options
    secured: dict[str, Any] = {
        "ssl_ca_certs": tls.ca,
        "ssl_certfile": tls.unit_cert,
        "ssl_keyfile": tls.unit_key,
        "redis_connect_func": _note_certificate,
    }
    # A URL says itself that it wants TLS.
    return options | secured | ({} if url.kind is RedisKind.SERVER else {"ssl": True})


async def _note_certificate(connection: Any) -> None:
    """What redis-py does with a new connection; and when the certificate of the other end ends."""
    await connection.on_connect()
    note_shown("Redis", connection._writer.get_extra_info("peercert"))


def _by_sentinel(access: RedisAccess, url: RedisUrl, options: dict[str, Any]) -> ServerClient:
    """A client of the primary. Sentinels are asked one after the other; the one that answered is the first to
    be asked next time.
    """
    asking = options | {"socket_connect_timeout": NODE_S, "socket_timeout": NODE_S}
    asking |= {"username": _SENTINEL_USER if access.password else None}
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        [(at.host, at.port) for at in url.hosts], sentinel_kwargs=asking, **options
    )
    return ServerClient(sentinel.master_for(url.primary, db=url.database), sentinel.sentinels)


def _node(at: Address, options: dict[str, Any]) -> Redis:
    return Redis(host=at.host, port=at.port, **options)


def is_refusal(error: Exception) -> bool:
    """Whether the credentials were refused."""
    # While a connection is set up, redis-py turns the server's answer into a plain ConnectionError.
    return isinstance(error, (AuthenticationError, NoPermissionError)) or _COMMAND_REFUSED in str(error)


def refusal_reason(error: ResponseError) -> str:
    """Why Redis does not accept writes."""
    if isinstance(error, NoPermissionError):
        return "its access control list does not let this user write there: docs/redis.md has the rights"
    return "it is full, or read-only"


class Outage:
    """What was said of a Redis that is away. The first reason may be that of its loss (no answer), and
    another one keep it away (a certificate): that is said as well, once.
    """

    def __init__(self) -> None:
        self._is_explained = False

    def tells(self, why: str) -> bool:
        """Whether this reason is to be said, though the outage was told of."""
        is_news = not self._is_explained and bool(_LASTS.search(why))
        self._is_explained = self._is_explained or is_news
        return is_news


_LASTS = re.compile("certificate|SSL|TLS|Name or service|rejects these credentials", re.IGNORECASE)
"""What does not pass by itself."""


def in_words(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, (TimeoutError, RedisTimeoutError)):
        return f"no answer within {EXCHANGE_S:g} s"
    if is_refusal(error):
        return "it rejects these credentials"
    return one_line(f"{type(error).__name__}: {error}")[:200]
