"""File descriptors: the limit of this process, whether it is enough, and admission while they run short.

While they run short, idle connections are closed for new clients. When there are none, it is better to let a
client wait in the accept queue than to accept one that cannot be served, or is dropped by the system. So
accepting pauses while enough descriptors are left for the work in flight: streams continue, probes run, the
admin port answers.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable

from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.settings import Settings

OWN = 64
"""Used by a process without clients: listeners, probes of a few units, the admin port."""
FOR_A_WORKER = 2
"""For each worker a socket to the supervisor, or to the control process; and another one during a
replacement."""
FOR_A_REQUEST = 2
"""A connection to the client, and one to the unit."""
KEPT_PART = 16
"""One in this many is reserved for work in flight; but at least `KEPT_LEAST`."""
KEPT_LEAST = 8
FRESH_S = 0.5
"""After this time a new client has its connection to a unit, or needs none yet."""
EPISODE_S = 60.0
"""A shortage this soon after another one has the same reason, and is not logged again."""

_ANY = 1 << 30
_HOW = "LimitNOFILE= under systemd, or --ulimit nofile= with docker"


def allowed() -> int | None:
    """The limit of this process; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def in_use() -> int:
    """How many are in use."""
    return len(os.listdir("/proc/self/fd"))


def check(workers: int) -> None:
    """Raises ConfigError, in one line, when `workers` need more descriptors than are allowed."""
    most = allowed()
    needed = OWN + (FOR_A_WORKER * workers if workers > 1 else 0)
    if most is not None and needed > most:
        room = max(1, (most - OWN) // FOR_A_WORKER)
        fit = f" (enough for {room})" if workers > 1 else ""
        need = f"workers: {workers} requires {needed} file descriptors, and the limit is {most}{fit}"
        raise ConfigError([f"{need}; {how()}"])


def shortage(settings: Settings) -> str:
    """A warning at start when units take more requests than there are descriptors for; else empty."""
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
    """Decides how many clients are accepted. `tell` is called for a shortage. `make_room` closes at most so
    many idle connections, and returns how many it closed.

    Counting takes a while (0.1 ms for a thousand), so it is repeated only after half of the remaining ones
    may have been used.
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
        """How many more clients may be accepted at once; called for each new client."""
        if self._most is None:
            return _ANY
        if now - self._fresh_since > FRESH_S:
            self._fresh, self._fresh_since = 0, now
        self._fresh += 1
        self._credit -= 1
        if self._credit >= 0:
            return 1 + self._credit
        used = self._count()
        # Each recent client may be about to open another one.
        left = self._most - self._kept - used - min(self._fresh, used)
        self._credit = left // (2 * FOR_A_REQUEST)
        if left >= 0:
            return 1 + self._credit
        # These are free with the next turn of the loop; until then the reserve is used.
        freed = self._make_room(max(FOR_A_REQUEST, self._kept // 2))
        self._credit = freed // FOR_A_REQUEST
        if now - self._short_at >= EPISODE_S:
            self._tell(
                f"{used} of {self._most} file descriptors are in use: connections without a request are "
                "closed for new ones, and no client is accepted while there are none to close"
            )
        self._short_at = now
        # Accept one, and read from it first, or it would be the next idle one to be closed.
        return min(freed, 1)
