"""All units that other gates publish in Redis: sharing/ reads them, discovery follows (docs/fleet.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from cellgate.proxy.discovery.base import Found


class Feed:
    """Passes the units found in Redis to their follower. One for each gate.

    `on_taken` is called once the gate has taken over what was found.
    """

    def __init__(self) -> None:
        self._found: Found | None = None
        self._news = asyncio.Event()
        self.on_taken: Callable[[], None] = lambda: None

    def put(self, found: Found) -> None:
        """This is all there is now."""
        if found != self._found:
            self._found = found
            self._news.set()

    async def follow(self) -> AsyncGenerator[Found, None]:
        """Each fleet, once it is another than the last. While Redis is gone the last holds."""
        while True:
            await self._news.wait()
            self._news.clear()
            assert self._found is not None
            yield self._found
            self.on_taken()
