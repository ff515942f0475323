"""The listeners of a gate by purpose and address: inherited from the previous gate, or opened."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from cellgate.proxy.config.settings import Address, Settings
from cellgate.proxy.handover.inheritance import Inheritance
from cellgate.proxy.process.listeners import BACKLOG, listen

LISTEN, ADMIN, AGENT_CHECK = "listen", "admin", "agent_check"

Listeners = Mapping[str, Sequence[socket.socket]]
"""By what they are for: `listen`, `admin`, `agent_check`, each followed by the address as configured."""


def listening_for(listeners: Listeners, purpose: str) -> Sequence[socket.socket]:
    """Those of `listeners` that are for this."""
    return next(found for name, found in listeners.items() if name.startswith(purpose))


async def listeners_of(settings: Settings, heritage: Inheritance | None) -> Listeners:
    """The listeners: inherited if the address is the same, else new. Raises OSError."""
    wanted = {LISTEN: settings.listen, ADMIN: settings.admin, AGENT_CHECK: settings.agent_check}
    found: dict[str, Sequence[socket.socket]] = {}
    for purpose, address in wanted.items():
        if address is not None:
            name = f"{purpose} {address}"
            inherited = heritage.take(name) if heritage is not None else []
            with _binding(address):
                found[name] = inherited or await listen(address, BACKLOG)
    return found


@contextmanager
def _binding(address: Address) -> Iterator[None]:
    """Add the address to an OSError."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise OSError(error.errno, reason, str(address)) from error
