"""Ties a control plane to Redis. The one place that knows both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from functools import partial

from cellgate.proxy.config.settings import TICK_S, RedisAccess, RedisSource
from cellgate.proxy.control.plane import Plane
from cellgate.proxy.discovery.base import Feed
from cellgate.proxy.observe.log import log_line
from cellgate.proxy.redis.address import own_url
from cellgate.proxy.redis.commands import Connect, SharedBans, connector
from cellgate.proxy.redis.fleet import FleetRouter
from cellgate.proxy.redis.link import RedisLink, RedisMetrics
from cellgate.proxy.redis.reports import Names, Roster, Seen, UnitReport
from cellgate.proxy.redis.sharing import PrefixSharing, SharedLimits, Sharing
from cellgate.router.board import Flip

_GRAIN_S = 0.001


def share(
    plane: Plane, port: Callable[[], int], access: RedisAccess, feed: Feed, gate: str
) -> RedisLink | None:
    """Begin to share the reports of `plane`, or, as a fleet router, to use those of others.

    `port` is the one for clients; 0: not known yet. `feed` takes the units of others, `gate` is the name of
    this one. An invalid URL is only logged.
    """
    try:
        connect = connector(access, plane.settings.tls)
    except ValueError as error:
        log_line("error", f"redis: {error}; this gate uses only its own observations")
        return None
    link_by = partial(_link, plane, connect, Names(access.prefix))
    routes = any(isinstance(source, RedisSource) for source in plane.settings.sources)
    link = _route(plane, feed, gate, link_by) if routes else _share(plane, port, gate, link_by)
    link.start()
    plane.metrics.include(RedisMetrics(link, plane.board))
    if (accounting := plane.accounting) is not None:
        names, gates = Names(access.prefix), lambda: link.peers() + 1
        accounting.share(
            SharedLimits(accounting.ledger, connect, names, gates, plane.events.add, random.Random())
        )
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


def _share(plane: Plane, port: Callable[[], int], gate: str, link_by: Callable[..., RedisLink]) -> RedisLink:
    roster, loop = Roster(gate), asyncio.get_running_loop()
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

    plane.on_flip.append(flipped)
    plane.ticker.looks.append(tick)
    return link


def _route(plane: Plane, feed: Feed, gate: str, link_by: Callable[..., RedisLink]) -> RedisLink:
    # It has no units of its own to report.
    roster = Roster(gate)
    router = FleetRouter(plane, roster, feed)
    plane.on_flip.append(router.flipped)
    plane.ticker.looks.append(router.tick)
    return link_by(roster, tuple, router.heard, all_cells=True)
