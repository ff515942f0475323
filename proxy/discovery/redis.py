"""All units that other gates publish in Redis: the source of a gate that is a fleet's router (docs/fleet.md).

What Redis says is read by the gate's own line to it; here it only becomes a fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import ClassVar

from cellgate.proxy.discovery.base import Found


def _nobody_waits() -> None:
    """Nobody is to be told."""


class Feed:
    """Hands what was found from the line to Redis to whoever follows the source."""

    def __init__(self) -> None:
        self._found: Found | None = None
        self._news = asyncio.Event()
        # A function with a name, for the configuration comes from another process, pickled.
        self.on_taken: Callable[[], None] = _nobody_waits
        """Called once the gate has taken over what was found."""

    def put(self, found: Found) -> None:
        """This is all there is now."""
        if found != self._found:
            self._found = found
            self._news.set()

    async def next(self) -> Found:
        """What is found, once that is another thing than the last time."""
        await self._news.wait()
        self._news.clear()
        assert self._found is not None
        return self._found


@dataclass(frozen=True, slots=True)
class RedisSource:
    """There is one at most, and `feed` is no part of its configuration."""

    kind: ClassVar[str] = "redis"
    gone_is_dead: ClassVar[bool] = False

    feed: Feed = field(default_factory=Feed, compare=False, repr=False)

    @property
    def title(self) -> str:
        """The only one of its kind."""
        return "redis"

    async def follow(self) -> AsyncGenerator[Found, None]:
        """Each fleet that there is. While Redis is gone the last one holds."""
        while True:
            yield await self.feed.next()
            self.feed.on_taken()
