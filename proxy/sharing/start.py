"""Ties a control plane to Redis. The one place that knows both."""

from __future__ import annotations

import asyncio
import os
import random
import re
import socket
from collections.abc import Callable, Iterable
from functools import partial

from cellgate.proxy.config.settings import TICK_S, RedisAccess
from cellgate.proxy.config.sources import RedisSource
from cellgate.proxy.control.plane import Plane
from cellgate.proxy.discovery.redis import Feed
from cellgate.proxy.logs.log import log_line
from cellgate.proxy.sharing.address import own_url
from cellgate.proxy.sharing.bans import SharedBans
from cellgate.proxy.sharing.connect import Connect, connector
from cellgate.proxy.sharing.fleet_router import FleetRouter
from cellgate.proxy.sharing.metrics import RedisMetrics
from cellgate.proxy.sharing.prefixes import PrefixSharing
from cellgate.proxy.sharing.redis_link import RedisLink
from cellgate.proxy.sharing.roster import Roster
from cellgate.proxy.sharing.sync import Sharing
from cellgate.proxy.sharing.unit_report import Names, Seen, UnitReport
from cellgate.router.flip import Flip

_GRAIN_S = 0.001


def share(plane: Plane, port: Callable[[], int], access: RedisAccess, feed: Feed) -> RedisLink | None:
    """Begin to share the reports of `plane`, or, as a fleet router, to use those of others.

    `port` is the one for clients; 0: not known yet. `feed` takes the units of others. An invalid URL is only
    logged.
    """
    try:
        connect = connector(access, plane.settings.tls)
    except ValueError as error:
        log_line("error", f"redis: {error}; this gate uses only its own observations")
        return None
    link_by = partial(_link, plane, connect, Names(access.prefix))
    routes = any(isinstance(source, RedisSource) for source in plane.settings.sources)
    link = _route(plane, feed, link_by) if routes else _share(plane, port, link_by)
    link.start()
    plane.metrics.include(RedisMetrics(link, plane.board))
    return link


def _link(
    plane: Plane,
    connect: Connect,
    names: Names,
    roster: Roster,
    reports: Callable[[], Iterable[UnitReport]],
    on_flip: Callable[[Seen], None],
    *,
    all_cells: bool = False,
    prefixes: PrefixSharing | None = None,
) -> RedisLink:
    bans = SharedBans(plane.containment, roster.own, plane.now)
    link = RedisLink(
        connect,
        roster.own,
        reports,
        roster,
        now=plane.now,
        rng=random.Random(),
        on_flip=on_flip,
        tell=lambda line: log_line("warning", line),
        names=names,
        all_cells=all_cells,
        bans=bans,
        prefixes=prefixes,
    )
    plane.containment.on_ban = lambda ban, lifted: link.banned(bans.row(ban, lifted=lifted))
    return link


def _share(plane: Plane, port: Callable[[], int], link_by: Callable[..., RedisLink]) -> RedisLink:
    roster, loop = Roster(_gate_name()), asyncio.get_running_loop()
    url = ""

    def gate_url() -> str:
        nonlocal url
        # It is known once the gate listens, which may be later.
        if not url and port():
            url = own_url(plane.settings, port())
        return url

    sharing = Sharing(
        plane.board,
        roster.own,
        roster,
        plane.now,
        plane.prober.observe,
        plane.metrics.recent_ttft_s,
        gate_url=gate_url,
        is_stopping=plane.is_stopping,
    )
    prefixes = PrefixSharing(plane.board, roster.own, roster, plane.now)
    link = link_by(roster, sharing.reports, sharing.heard, prefixes=prefixes)

    def flipped(flip: Flip) -> None:
        report = sharing.report(flip)
        if report is not None:
            link.flipped(report)

    def tick(now: float) -> None:
        plane.board.elsewhere = sharing.tick(now)
        # Attempts of an ended gate count until its report expires, not until the next tick.
        if (expiry_s := roster.expires_at(now) - now) < TICK_S:
            loop.call_later(expiry_s + _GRAIN_S, forget)

    def forget() -> None:
        plane.board.elsewhere = sharing.tick(plane.now())

    plane.on_flip = flipped
    plane.ticker.looks.append(tick)
    return link


def _route(plane: Plane, feed: Feed, link_by: Callable[..., RedisLink]) -> RedisLink:
    # It has no units of its own to report.
    roster = Roster(_gate_name())
    router = FleetRouter(plane, roster, feed)
    plane.ticker.looks.append(router.tick)
    return link_by(roster, tuple, router.heard, all_cells=True)


def _gate_name() -> str:
    """A new id for each process, so that a restarted gate does not take old reports for its own."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:80].lstrip(".-") or "gate"
    return f"{host}-{os.getpid()}-{random.getrandbits(32):08x}"
