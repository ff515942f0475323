"""Lookups of units that fail: whether the name is at fault, or the resolver of this gate.

A resolver that says that there is no such name has answered. One that fails, while it finds the name of
another unit, does its work as well: what fails is relative to the same question elsewhere.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from cellgate.proxy.http.errors import Failure, FailureKind

COMPARE_S = 5.0
"""After a failure the name of another unit is looked up this often at most."""
NAMES_KEPT = 1024
_NO_SUCH_NAME = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})


class Lookups:
    """Those of one process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._found: dict[str, float] = {}
        self._missed: dict[str, float] = {}
        self._compare_at = 0.0
        self._comparing: asyncio.Task[None] | None = None

    def found(self, host: str) -> None:
        """A connection to `host` was made."""
        self._missed.pop(host, None)
        # The newest is the last, so that the oldest gives way.
        self._found.pop(host, None)
        self._found[host] = self._loop.time()
        if len(self._found) > NAMES_KEPT:
            del self._found[next(iter(self._found))]

    def failure(self, host: str, where: str, error: socket.gaierror) -> Failure:
        """What it means that `host`, in `where` (HOST:PORT), was not found."""
        now = self._loop.time()
        since = self._missed.setdefault(host, now)
        if len(self._missed) > NAMES_KEPT:
            del self._missed[next(iter(self._missed))]
        if error.errno in _NO_SUCH_NAME:
            return Failure(FailureKind.UNKNOWN_NAME, f"DNS has no name {host} (of {where}): {error.strerror}")
        others = [
            other for other, at in self._found.items() if at > since and other not in (host, *self._missed)
        ]
        if others:
            message = f"DNS does not find {host} (of {where}), but {others[0]}: {error.strerror}"
            return Failure(FailureKind.UNKNOWN_NAME, message)
        self._compare(host, now)
        return Failure(FailureKind.NO_RESOURCES, f"the name in {where} cannot be resolved: {error.strerror}")

    def _compare(self, host: str, now: float) -> None:
        """Look up another name, once in a while."""
        other = next((name for name in reversed(self._found) if name != host), None)
        if other is not None and now >= self._compare_at and self._comparing is None:
            self._compare_at = now + COMPARE_S
            self._comparing = self._loop.create_task(self._look_up(other), name="names of units")

    async def _look_up(self, host: str) -> None:
        try:
            with suppress(OSError):
                await self._loop.getaddrinfo(host, None)
                self.found(host)
        finally:
            self._comparing = None

    def close(self) -> None:
        if self._comparing is not None:
            self._comparing.cancel()
