"""What a gate writes again into a Redis that does not know it any more."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, cast

from cellgate.proxy.redis.commands import Command, RedisClient
from cellgate.proxy.redis.leadership import KEEP_MS, Document, Leadership
from cellgate.proxy.redis.reports import Names

BEGAN_MS = 1_751_328_000_000
FIRST_DOCUMENT = 8
"""Of the words of the command: after EVAL, the script, one key, and four arguments."""


class Documents:
    """A Redis with the documents of one scope, which answers HOLD as the script does."""

    def __init__(self) -> None:
        self.now_ms = BEGAN_MS
        self.known: dict[bytes, bytes] = {}
        self.told: list[bytes] = []

    async def exchange(self, commands: Sequence[Command], _limit_s: float = 1.0) -> list[Any]:
        (command,) = commands
        names, texts = command[FIRST_DOCUMENT::2], command[FIRST_DOCUMENT + 1 :: 2]
        self.told = [cast("bytes", text) for text in texts]
        self.known |= zip((str(name).encode() for name in names), self.told, strict=True)
        self.known = {
            name: text
            for name, text in self.known.items()
            if int(text.partition(b":")[0]) + KEEP_MS >= self.now_ms
        }
        rows = [part for row in self.known.items() for part in row]
        return [(b"", 0, 0, self.now_ms, rows)]


class Gate:
    """A gate that asks about one scope."""

    def __init__(self, redis: Documents) -> None:
        self.redis = redis
        self.heard: list[Document] = []
        self.leadership = Leadership(
            lambda: cast("RedisClient", redis),
            "g1",
            Names(),
            now=lambda: 0.0,
            rng=random.Random(1),
            on_leading=lambda _scope, _token: None,
            on_document=self.heard.append,
        )

    def ask(self) -> list[bytes]:
        """Ask; returns the documents that it has written again."""
        asyncio.run(self.leadership._ask(["c"]))
        return self.redis.told


def document(at_ms: int) -> bytes:
    return b"%d:x" % at_ms


def test_what_redis_has_lost_is_written_again() -> None:
    redis = Documents()
    gate = Gate(redis)
    redis.known = {b"u1": document(BEGAN_MS)}
    assert gate.ask() == []
    redis.known = {}
    assert gate.ask() == []
    assert gate.ask() == [document(BEGAN_MS)]
    assert gate.ask() == []


def test_what_is_too_old_for_redis_is_not_written_again_and_keeps_nothing_else_out() -> None:
    redis = Documents()
    gate = Gate(redis)
    old = {b"u%03d" % n: document(BEGAN_MS) for n in range(100)}
    new = {b"v": document(BEGAN_MS + 1000)}
    redis.known = old | new
    gate.ask()
    redis.now_ms += KEEP_MS + 1
    redis.known = {}
    gate.ask()
    assert gate.ask() == list(new.values())
    assert gate.ask() == []
    assert len(gate.heard) == 101
