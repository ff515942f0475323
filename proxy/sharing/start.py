"""Ties a gate to Redis. The one place that knows both."""

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
from cellgate.proxy.discovery.redis import Feed
from cellgate.proxy.gate import Gate
from cellgate.proxy.logs.log import log_line
from cellgate.proxy.sharing.address import own_url
from cellgate.proxy.sharing.bans import SharedBans
from cellgate.proxy.sharing.connect import Connect, connector
from cellgate.proxy.sharing.fleet_router import FleetRouter
from cellgate.proxy.sharing.link import RedisLink
from cellgate.proxy.sharing.metrics import RedisMetrics
from cellgate.proxy.sharing.prefixes import PrefixSharing
from cellgate.proxy.sharing.roster import Roster
from cellgate.proxy.sharing.schema import Names, Seen, View
from cellgate.proxy.sharing.sync import Sharing
from cellgate.router.nouns import Flip

_GRAIN_S = 0.001


def share(gate: Gate, access: RedisAccess, feed: Feed) -> RedisLink | None:
    """Begin to share what `gate` knows, or, where all its units are others', to go by what they share.

    `feed` takes their units. A URL that is none costs a line in the log and no more.
    """
    try:
        connect = connector(access, gate.settings.tls)
    except ValueError as error:
        log_line("error", f"redis: {error}; this gate goes by what it sees itself")
        return None
    link_by = partial(_link, gate, connect, Names(access.prefix))
    routes = any(isinstance(source, RedisSource) for source in gate.settings.sources)
    link = _route(gate, feed, link_by) if routes else _share(gate, link_by)
    link.start()
    gate.metrics.include(RedisMetrics(link, gate.board))
    return link


def _link(
    gate: Gate,
    connect: Connect,
    names: Names,
    roster: Roster,
    views: Callable[[], Iterable[View]],
    on_flip: Callable[[Seen], None],
    *,
    all_cells: bool = False,
    prefixes: PrefixSharing | None = None,
) -> RedisLink:
    bans = SharedBans(gate.containment, roster.own, gate.now)
    link = RedisLink(
        connect,
        roster.own,
        views,
        roster,
        now=gate.now,
        rng=random.Random(),
        on_flip=on_flip,
        tell=lambda line: log_line("warning", line),
        names=names,
        all_cells=all_cells,
        bans=bans,
        prefixes=prefixes,
    )
    gate.containment.on_ban = lambda ban, lifted: link.banned(bans.row(ban, lifted=lifted))
    return link


def _share(gate: Gate, link_by: Callable[..., RedisLink]) -> RedisLink:
    roster, loop = Roster(_gate_name()), asyncio.get_running_loop()
    url = ""

    def gate_url() -> str:
        nonlocal url
        # It is known as soon as the gate listens, which may be later.
        if not url and gate.port:
            url = own_url(gate.settings, gate.port)
        return url

    sharing = Sharing(
        gate.board,
        roster.own,
        roster,
        gate.now,
        gate.watch.observe,
        gate.metrics.recent_ttft_s,
        gate_url=gate_url,
        is_stopping=gate.is_stopping,
    )
    prefixes = PrefixSharing(gate.board, roster.own, roster, gate.now)
    link = link_by(roster, sharing.views, sharing.heard, prefixes=prefixes)

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
    return link


def _route(gate: Gate, feed: Feed, link_by: Callable[..., RedisLink]) -> RedisLink:
    # It has no unit of its own, and so nothing to tell.
    roster = Roster(_gate_name())
    router = FleetRouter(gate, roster, feed)
    gate.on_tick.append(router.tick)
    return link_by(roster, tuple, router.heard, all_cells=True)


def _gate_name() -> str:
    """Another one for each process: what a gate wrote before it was started anew is not its own."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:80].lstrip(".-") or "gate"
    return f"{host}-{os.getpid()}-{random.getrandbits(32):08x}"
