"""The successor's side: what a gate inherits from the one that started it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

import orjson

from cellgate.proxy.handover.channel import ANSWER_S, HELLO, READY, VARIABLE, receive
from cellgate.proxy.handover.view import VERSION, InheritedView


class NoInheritanceError(Exception):
    """What was to be inherited did not come."""


class Inheritance:
    """Listeners by name, `view`, and the attempts of recovery."""

    def __init__(self, sock: socket.socket, document: Any, listeners: list[socket.socket]) -> None:
        self._sock = sock
        self._listeners: dict[str, list[socket.socket]] = {}
        for name, count in document["listeners"].items():
            self._listeners[name] = [listeners.pop(0) for _ in range(count)]
        known = document["known"]
        self.view = InheritedView(known["view"])
        self.courses: dict[str, Any] = known["courses"] if known["view"]["version"] == VERSION else {}

    def take(self, name: str) -> list[socket.socket]:
        """The listeners of that name; none if there are none, as when the address is another one now."""
        return self._listeners.pop(name, [])

    def leave_to_child(self) -> None:
        """A child of this process uses the inheritance, and reports when clients are accepted."""
        self._sock.close()
        for unwanted in self._listeners.values():
            for listener in unwanted:
                listener.close()

    async def accept(self) -> list[str] | None:
        """Report that clients are accepted. Returns the units that are drained now; None: the gate has
        ended.
        """
        for unwanted in self._listeners.values():
            for listener in unwanted:
                listener.close()
        return await asyncio.to_thread(self._accept)

    def _accept(self) -> list[str] | None:
        with self._sock, suppress(OSError, ValueError):
            self._sock.sendall(READY)
            drained: list[str] = receive(self._sock)[0]
            return drained
        return None


def inherit(environ: MutableMapping[str, str] = os.environ) -> Inheritance | None:
    """The inheritance, if another gate started this process. Raises NoInheritanceError."""
    # Not for child processes.
    descriptor = environ.pop(VARIABLE, "")
    if not descriptor:
        return None
    try:
        sock = socket.socket(fileno=int(descriptor))
        sock.set_inheritable(False)
        sock.settimeout(ANSWER_S)
        sock.sendall(HELLO)
        return Inheritance(sock, *receive(sock))
    except (OSError, ValueError, KeyError, IndexError, TypeError, orjson.JSONDecodeError) as error:
        raise NoInheritanceError(f"{VARIABLE}={descriptor}: nothing can be taken over: {error!r}") from None
