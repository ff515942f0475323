"""Which client connections make way for others when descriptors run short. Pure.

First those that have never asked anything, then those that wait for their next request, then those whose head
is long in coming; of each the oldest. Nobody whose request is whole, or whose body comes, is touched, nor who
has been idle for a moment only: its request may be on its way.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest

from cellgate.proxy.wire.downstream import ClientConnection

QUIET_S = 0.1
"""Who has been idle for so long may make way."""
SLOW_HEAD_S = 2.0
"""And so may a head that has been coming for so long."""


def first_to_close(clients: Iterable[ClientConnection], most: int, now: float) -> list[ClientConnection]:
    """At most so many connections that may be closed, the first to go first."""
    ranked: list[tuple[int, float, int, ClientConnection]] = []
    for order, client in enumerate(clients):
        if client.is_idle():
            if now - client.idle_since >= QUIET_S:
                ranked.append((client.has_asked, client.idle_since, order, client))
        elif client.is_slow(now, SLOW_HEAD_S):
            ranked.append((2, client.idle_since, order, client))
    return [client for *_, client in nsmallest(most, ranked)]
