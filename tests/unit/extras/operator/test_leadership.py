"""What gates that agree on who acts write into a Redis that was replaced."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, cast

from cellgate.extras.operator.leadership import Document, Leadership
from cellgate.extras.operator.leadership_scripts import KEEP_MS
from cellgate.extras.redis_client.redis_names import Names
from cellgate.extras.redis_client.servers import Command, RedisClient

# What a gate writes again into a Redis that does not know it any more.

BEGAN_MS = 1_751_328_000_000
FIRST_DOCUMENT = 12
"""Of the words of the command: after EVAL, the script, one key, and eight arguments."""


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
        return [(b"", 0, 0, self.now_ms, rows, b"")]


def document(at_ms: int) -> bytes:
    return b"%d:x" % at_ms


def test_what_redis_has_lost_is_written_again_unless_it_is_too_old() -> None:
    redis, heard = Documents(), list[Document]()
    leadership = Leadership(
        lambda: cast("RedisClient", redis),
        "g1",
        Names(),
        now=lambda: 0.0,
        rng=random.Random(1),
        on_leading=lambda _scope, _token: None,
        on_document=heard.append,
    )

    def written_again() -> list[bytes]:
        """By the gate that asks."""
        asyncio.run(leadership._ask(["c"]))
        return redis.told

    old = {b"u%03d" % n: document(BEGAN_MS) for n in range(100)}
    new = {b"v": document(BEGAN_MS + 1000)}
    redis.known = {b"u000": document(BEGAN_MS)}
    assert written_again() == []
    redis.known = {}
    assert [written_again() for _ in range(3)] == [[], [document(BEGAN_MS)], []]
    redis.known = old | new
    written_again()
    redis.now_ms += KEEP_MS + 1
    redis.known = {}
    # What is too old keeps nothing else out.
    assert [written_again() for _ in range(3)] == [[], list(new.values()), []]
    assert len(heard) == 101
