"""A client's connection without a loop or sockets: reads in, turns of the loop one by one, work counted."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.settings import Limits
from cellgate.proxy.http.body_memory import BodyMemory
from cellgate.proxy.http.client import ResponseClient
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.http.heads import own_response
from cellgate.proxy.http.request import Request
from cellgate.proxy.http.server import ClientConnection
from cellgate.proxy.http.slow_readers import Backlogs
from cellgate.proxy.http.turns import ReadScheduler
from tests.cost.bench import counted
from tests.wire.rig import Wire


class Door:
    """The `Host` of one connection, which answers each request at once, or (`holds`) never. `turns` has the
    bytecodes of each turn, `answered` how many requests were begun in it. Doors with the same
    schedulers are of one loop, which is not theirs to turn.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        holds: bool = False,
        at: float = 1.0,
        read_scheduler: ReadScheduler | None = None,
        start_scheduler: ReadScheduler | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.routing_fields: frozenset[bytes] = frozenset()
        self.memory = BodyMemory(self.limits.bodies_bytes, self.limits.body_bytes)
        self.clients: dict[ClientConnection, None] = {}
        self.requests: list[Request] = []
        self.failures: list[Failure] = []
        self.turns: list[int] = []
        self.answered: list[int] = []
        self.time = at
        self._holds = holds
        self._soon: deque[Callable[[], None]] = deque()
        self.read_scheduler = read_scheduler or ReadScheduler(
            self._soon.append, LIMITS.request_bytes_per_turn
        )
        self.start_scheduler = start_scheduler or ReadScheduler(
            self._soon.append, LIMITS.request_bytes_per_turn
        )
        self.wire = Wire()
        self.client = ClientConnection(self)
        self.client.connection_made(cast(asyncio.Transport, self.wire))

    def own_lines(self, _request: Request) -> bytes:
        return b""

    def turns_away(self, request: Request) -> Failure | None:
        return None

    def payer(self, peer: str, forwarded_for: bytes) -> str:
        return forwarded_for.decode() or peer

    def body_payer(self, peer: str, request: Request) -> str:
        return peer

    backlogs = Backlogs()

    def now(self) -> float:
        return self.time

    def exchange(self, client: ResponseClient, request: Request) -> Answered:
        self.requests.append(request)
        return Answered(client, request, holds=self._holds)

    def shows_internals(self, peer: str) -> bool:
        return True

    def refused(self, peer: str, failure: Failure) -> None:
        self.failures.append(failure)

    def defect(self, what: str, error: Exception) -> None:
        raise error

    def feed(self, reads: Iterable[bytes]) -> None:
        """Hand over reads while the connection takes them, and let turns pass until nothing is left to do."""
        for data in reads:
            if self.wire.closed or not self.wire.reading:
                return
            self._turn(partial(self.client.data_received, data))
            self.rest()

    def rest(self) -> None:
        """Let turns pass until nothing is left to do."""
        while self._soon:
            self._turn(self._soon.popleft())

    def _turn(self, act: Callable[[], None]) -> None:
        before = len(self.requests)
        with counted() as counts:
            act()
        self.turns.append(counts.total())
        self.answered.append(len(self.requests) - before)


class Answered:
    """An exchange that ends as it starts, or never."""

    def __init__(self, client: ResponseClient, request: Request, *, holds: bool) -> None:
        self._client, self._request, self._holds = client, request, holds

    def start(self) -> None:
        if not self._holds:
            self._client.send(own_response(200, b"{}", close=False))
            self._client.finish(self._request, keep_alive=True)

    def crashed(self, error: Exception) -> None:
        raise error

    def client_left(self) -> None:
        """It is over."""

    def client_paused(self, paused: bool) -> None:
        """It has nothing to pause."""

    def is_awaited(self) -> bool:
        return False

    def stop(self, failure: Failure) -> None:
        """It is over."""

    def tick(self, now: float) -> None:
        """It has no clock."""
