"""An admin port on a free port, for tests over real sockets."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import aiohttp

from cellgate.policies.prefix_affinity import PrefixAffinity
from cellgate.proxy.admin.pages import AdminView, admin_server
from cellgate.proxy.config.settings import HeaderNames, Peers
from cellgate.proxy.control.containment import Containment
from cellgate.proxy.control.explain import RoutingExplain
from cellgate.proxy.control.stored_responses import StoredResponses
from cellgate.proxy.observe.counters import Metrics
from cellgate.proxy.observe.events import EventLog
from cellgate.proxy.observe.exposition import Exposition
from cellgate.router.board import Board
from cellgate.router.nouns import Cell, Evidence, Fleet, Node, Role, Rules, Sign, Strength, Unit
from cellgate.router.pick import Router
from cellgate.router.queue import FairRules, Queue

NODES = (Node("a1-0", Role.LEADER), Node("a1-1", Role.FOLLOWER))
FLEET = Fleet(
    (Cell("a", 2.0),),
    (
        Unit("a1", "a", "http://127.0.0.1:8101", models=("tiny",), nodes=NODES),
        Unit("a2", "a", "http://127.0.0.1:8102"),
    ),
)
RELAYED = {"X-Forwarded-For": "192.0.2.9"}
NOBODY = Peers()


@dataclass
class Port:
    """An admin port on a free port, its Board, and a client."""

    board: Board
    events: EventLog
    client: aiohttp.ClientSession
    url: str
    stopping: bool = False
    now: float = 100.0
    poison: Containment | None = None

    async def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and JSON of a GET."""
        async with self.client.get(self.url + path, headers=headers) as reply:
            return reply.status, await reply.json()

    async def post(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and JSON of a POST."""
        async with self.client.post(self.url + path, headers=headers) as reply:
            return reply.status, await reply.json()

    def observe(self, unit: str, sign: Sign, strength: Strength, source: str, reason: str) -> None:
        """Let the Board and the log of events know something."""
        consequence = self.board.observe(Evidence(unit, sign, strength, source, reason, self.now))
        if consequence.flip is not None:
            self.events.add(consequence.flip, consequence.evicted)


@asynccontextmanager
async def admin_port(
    token: str | None = None, pages: Callable[[Any], Mapping[str, Any]] = lambda _: {}
) -> AsyncIterator[Port]:
    """A port that listens; `pages` are those of an extra, for what it knows of a control plane."""
    board = Board(Rules())
    board.configure(FLEET, 90.0)
    events = EventLog(lambda: 1_700_000_000.0, 2, lambda *_: None)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as client:
        port = Port(board, events, client, "")
        none = cast("Any", None)
        port.poison = Containment(board, none, events, lambda: port.now, none, answered=len, ban_s=600.0)
        metrics = Metrics(board)
        metrics.include(Exposition(metrics, waiting=lambda: 0, connections=dict).collect)
        router = Router(board, PrefixAffinity(), random.Random(1), Queue(FairRules()))
        stored, rng = StoredResponses(board), random.Random(1)
        choice = RoutingExplain(router, stored, HeaderNames(), "prefix_affinity", lambda: port.now, rng)
        plane = SimpleNamespace(
            board=board,
            events=events,
            router=router,
            now=lambda: port.now,
            set_drain=lambda name, drained: board.drain(name, drained=drained),
        )
        view = AdminView(
            board=board,
            events=events,
            metrics=metrics,
            now=plane.now,
            stopping=lambda: port.stopping,
            set_drain=plane.set_drain,
            token=lambda: token,
            peers=NOBODY,
            due_s=lambda unit, probe: {("a1", "canary"): 0.8}.get((unit, probe), math.inf),
            explain=choice.explain,
            poison=port.poison,
            pages=pages(plane),
        )
        server = admin_server(view)
        listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        port.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        try:
            yield port
        finally:
            listening.close()
            events.close()
            await server.close()
