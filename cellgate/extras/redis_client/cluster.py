"""`ClusterClient`: a Redis Cluster, of which each command goes to the node that has its key.

1. The table of slots is read from any node that answers: at first, after a failure, and when a node says
   that a slot has moved.
2. Commands of one exchange go to all nodes at the same time. One that a node redirects is sent once more.
3. PUBLISH goes to any node: the nodes pass it on to each other, and any of them has all messages. So the
   one channel of the gates needs no sharded one, which would have to follow its slot.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from cellgate.extras.redis_client.servers import EXCHANGE_S, Command, ServerClient
from cellgate.proxy.config.settings import Address

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
