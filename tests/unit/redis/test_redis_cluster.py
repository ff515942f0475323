"""A Cluster of which one node tells the slots: where commands go, and what redirections and failures do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError
from redis.exceptions import ConnectionError as RedisConnectionError

from cellgate.proxy.config.settings import Address
from cellgate.proxy.redis.commands import ClusterClient

A, B = Address("a", 1), Address("b", 2)
HALF = 8192
LOW, HIGH = "cellgate:cells", "cellgate:flips"


class Nodes:
    """Node `a` has the lower half of the slots; `says` may answer for a node instead."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.owners = [(0, HALF - 1, A), (HALF, 16383, B)]
        self.says: Callable[[str, str], Any] = lambda at, word: f"{word} at {at}"

    def client(self) -> ClusterClient:
        return ClusterClient([A], lambda at: cast(Redis, _Node(self, at.host)))

    def answer(self, at: str, command: tuple[Any, ...]) -> Any:
        self.asked.append((at, str(command[0])))
        if command[0] == "CLUSTER":
            return [[first, last, [at.host.encode(), at.port, b"id"]] for first, last, at in self.owners]
        return self.says(at, str(command[0]))

    def looks(self) -> int:
        return sum(word == "CLUSTER" for _, word in self.asked)


class _Node:
    def __init__(self, nodes: Nodes, host: str) -> None:
        self.nodes, self.host, self.connection_pool = nodes, host, self

    def pipeline(self, *, transaction: bool) -> _Batch:
        assert not transaction
        return _Batch(self)

    async def disconnect(self) -> None:
        """Nothing to do."""


class _Batch:
    def __init__(self, node: _Node) -> None:
        self.node, self.commands = node, list[tuple[Any, ...]]()

    def execute_command(self, *words: Any) -> None:
        self.commands.append(words)

    async def execute(self, *, raise_on_error: bool) -> list[Any]:
        assert not raise_on_error
        answers = [self.node.nodes.answer(self.node.host, command) for command in self.commands]
        if isinstance(answers[0], RedisConnectionError):
            raise answers[0]
        return answers


def exchange(client: ClusterClient, *commands: tuple[str, ...]) -> list[Any]:
    return asyncio.run(client.exchange(commands))


def test_each_command_goes_to_the_node_that_has_its_key() -> None:
    nodes = Nodes()
    at = {True: "a", False: "b"}
    client = nodes.client()
    for key in (LOW, HIGH):
        owner = at[key_slot(key.encode()) < HALF]
        script = ("EVAL", "return 1", "1", key)
        assert exchange(client, ("GET", key), script) == [f"GET at {owner}", f"EVAL at {owner}"]
    assert exchange(client, ("PUBLISH", HIGH, "x")) == ["PUBLISH at a"]
    assert nodes.looks() == 1


def test_a_moved_slot_is_followed_at_once_and_the_table_is_read_again() -> None:
    nodes = Nodes()
    client = nodes.client()
    nodes.owners = [(0, 16383, A)]
    nodes.says = lambda at, word: MovedError("5 b:2") if at == "a" else f"{word} at {at}"
    assert exchange(client, ("GET", LOW)) == ["GET at b"]
    nodes.owners = [(0, 16383, B)]
    assert exchange(client, ("GET", LOW)) == ["GET at b"]
    assert nodes.looks() == 2
    assert nodes.asked[-1] == ("b", "GET")


def test_a_slot_that_is_being_moved_is_asked_for_at_its_new_node() -> None:
    nodes = Nodes()
    nodes.owners = [(0, 16383, A)]
    nodes.says = lambda at, word: AskError("5 b:2") if at == "a" else f"{word} at {at}"
    assert exchange(nodes.client(), ("GET", LOW)) == ["GET at b"]
    assert nodes.asked[-2:] == [("b", "ASKING"), ("b", "GET")]


def test_a_node_that_fails_fails_the_exchange_and_the_table_is_read_again() -> None:
    nodes = Nodes()
    nodes.owners = [(0, 16383, B)]
    client = nodes.client()
    nodes.says = lambda _at, _word: RedisConnectionError("gone")
    with pytest.raises(RedisConnectionError, match="gone"):
        exchange(client, ("GET", LOW))
    nodes.owners, nodes.says = [(0, 16383, A)], lambda at, word: f"{word} at {at}"
    assert exchange(client, ("GET", LOW)) == ["GET at a"]


def test_a_slot_of_nobody_is_an_error_of_the_connection() -> None:
    nodes = Nodes()
    nodes.owners = [(0, 1, A)]
    with pytest.raises(RedisConnectionError, match="no node of the cluster has slot"):
        exchange(nodes.client(), ("GET", LOW))
