"""Which client connections are closed first when file descriptors run short. Pure.

First those that have never sent a request, then those that are idle between requests, then those with a slow
head; of each the oldest. A connection with a complete request or an arriving body is never closed, nor one
that was idle for only a moment: its next request may be on its way.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest

from cellgate.proxy.wire.downstream import ClientConnection

QUIET_S = 0.1
"""A connection that has been idle for this long may be closed."""
SLOW_HEAD_S = 2.0
"""So may one whose head has been arriving for this long."""


def first_to_close(clients: Iterable[ClientConnection], most: int, now: float) -> list[ClientConnection]:
    """At most `most` connections that may be closed, in their order."""
    ranked: list[tuple[int, float, int, ClientConnection]] = []
    for order, client in enumerate(clients):
        if client.is_idle():
            if now - client.idle_since >= QUIET_S:
                ranked.append((client.has_asked, client.idle_since, order, client))
        elif client.is_slow(now, SLOW_HEAD_S):
            ranked.append((2, client.idle_since, order, client))
    return [client for *_, client in nsmallest(most, ranked)]
