"""Descriptors: how many this process may have, whether they are enough, who comes in while they run short.

While they run short, connections without a request are closed for those who come. When there are none, a
client that waits to be accepted is better off than one that is accepted and cannot be served, or is dropped
as the system does when none is left. So accepting pauses while there is still room for what is under way:
streams go on, probes are made, the admin port answers.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable

from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.settings import Settings

OWN = 64
"""Of a process without any client: listeners, probes of a few units, the admin port."""
FOR_A_WORKER = 2
"""A worker's socket to the one that starts it, or to the control process; and another while it is
replaced."""
FOR_A_REQUEST = 2
"""A connection to the client, and one to the unit."""
KEPT_PART = 16
"""Of those allowed, one in so many is kept for what is under way; but at least `KEPT_LEAST`."""
KEPT_LEAST = 8
FRESH_S = 0.5
"""By then a client that came has its connection to a unit, or needs none yet."""
EPISODE_S = 60.0
"""Descriptors that run short again so soon after are short for the same reason: it is told once."""

_ANY = 1 << 30
_HOW = "LimitNOFILE= under systemd, or --ulimit nofile= with docker"


def allowed() -> int | None:
    """How many this process may have; None: as many as it likes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def in_use() -> int:
    """How many it has."""
    return len(os.listdir("/proc/self/fd"))


def check(workers: int) -> None:
    """Raises ConfigError, in one line, when so many processes need more descriptors than are allowed."""
    most = allowed()
    needed = OWN + (FOR_A_WORKER * workers if workers > 1 else 0)
    if most is not None and needed > most:
        room = max(1, (most - OWN) // FOR_A_WORKER)
        fit = f" (enough for {room})" if workers > 1 else ""
        need = f"workers: {workers} requires {needed} file descriptors, and the limit is {most}{fit}"
        raise ConfigError([f"{need}; {how()}"])


def shortage(settings: Settings) -> str:
    """What to say at start when units take more requests than there are descriptors for; empty: nothing."""
    most, wanted = allowed(), sum(unit.max_in_flight for unit in settings.fleet.units)
    room = ((most or 0) - OWN) // FOR_A_REQUEST * settings.workers
    if most is None or room >= wanted:
        return ""
    each = " each" if settings.workers > 1 else ""
    return (
        f"{most} file descriptors{each} are enough for about {max(room, 0)} requests at a time, but the "
        f"units take {wanted} (max_in_flight); further clients wait to be accepted; {how()}"
    )


def how() -> str:
    """How an operator raises the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "no limit" if hard == resource.RLIM_INFINITY else str(hard)
    return f"raise it with `ulimit -n` (up to {most} without privileges), {_HOW}"


class Descriptors:
    """Says who may come in. `tell` is told of a shortage. `make_room` closes idle connections, at most so
    many, and says how many it has.

    To count those in use takes a while (0.1 ms for a thousand), so it is done anew only after half of those
    that were left may have been taken.
    """

    def __init__(
        self,
        most: int | None,
        tell: Callable[[str], None],
        make_room: Callable[[int], int],
        count: Callable[[], int] = in_use,
    ) -> None:
        self._most = most
        self._kept = max(KEPT_LEAST, most // KEPT_PART) if most is not None else 0
        self._tell = tell
        self._make_room = make_room
        self._count = count
        self._credit = 0
        self._fresh = 0
        self._fresh_since = 0.0
        self._short_at = -EPISODE_S

    def has_room(self, now: float) -> int:
        """How many more clients may be accepted at once; called for each who comes."""
        if self._most is None:
            return _ANY
        if now - self._fresh_since > FRESH_S:
            self._fresh, self._fresh_since = 0, now
        self._fresh += 1
        self._credit -= 1
        if self._credit >= 0:
            return 1 + self._credit
        used = self._count()
        # Whoever came just now may be about to open another one; but no more of them than are here.
        left = self._most - self._kept - used - min(self._fresh, used)
        self._credit = left // (2 * FOR_A_REQUEST)
        if left >= 0:
            return 1 + self._credit
        # Those are free with the next turn of the loop; until then it is what is kept that they come from.
        freed = self._make_room(max(FOR_A_REQUEST, self._kept // 2))
        self._credit = freed // FOR_A_REQUEST
        if now - self._short_at >= EPISODE_S:
            self._tell(
                f"{used} of {self._most} file descriptors are in use: connections without a request are "
                "closed for new ones, and no client is accepted while there are none to close"
            )
        self._short_at = now
        # One, and then those who were let in are to be heard, or they would be the next to make way.
        return min(freed, 1)
