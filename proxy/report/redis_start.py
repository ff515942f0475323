"""Ties a gate to Redis. The one place that knows both."""

from __future__ import annotations

import asyncio
import os
import random
import re
import socket

from proxy.gate import TICK_S, Gate
from proxy.report.collectors import RedisMetrics
from proxy.report.log import log_line
from proxy.report.redis_connect import connector
from proxy.report.redis_link import RedisLink
from proxy.report.redis_roster import Roster
from proxy.report.redis_schema import Names
from proxy.report.redis_sharing import Sharing
from proxy.settings import RedisAccess
from router.nouns import Flip

_GRAIN_S = 0.001


def share(gate: Gate, access: RedisAccess) -> RedisLink | None:
    """Begin to share what `gate` knows. A URL that is none costs a line in the log and no more."""
    try:
        connect = connector(access, gate.settings.tls)
    except ValueError as error:
        log_line("error", f"redis: {error}; this gate goes by what it sees itself")
        return None
    name = _gate_name()
    roster, loop = Roster(name), asyncio.get_running_loop()
    sharing = Sharing(gate.board, name, roster, gate.now, gate.watch.observe, gate.metrics.recent_ttft_s)
    link = RedisLink(
        connect,
        name,
        sharing.views,
        roster,
        now=gate.now,
        rng=random.Random(),
        on_flip=sharing.heard,
        tell=lambda line: log_line("warning", line),
        names=Names(access.prefix),
    )

    def flipped(flip: Flip) -> None:
        view = sharing.view(flip)
        if view is not None:
            link.flipped(view)

    def tick(now: float) -> None:
        gate.board.others = sharing.tick(now)
        # What a gate that is gone had open counts until it expires, and not until the tick after.
        if (expiry_s := roster.expires_at(now) - now) < TICK_S:
            loop.call_later(expiry_s + _GRAIN_S, forget)

    def forget() -> None:
        gate.board.others = sharing.tick(gate.now())

    gate.on_flip = flipped
    gate.on_tick.append(tick)
    link.start()
    gate.metrics.include(RedisMetrics(link, gate.board))
    return link


def _gate_name() -> str:
    """Another one for each process: what a gate wrote before it was started anew is not its own."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:80].lstrip(".-") or "gate"
    return f"{host}-{os.getpid()}-{random.getrandbits(32):08x}"
