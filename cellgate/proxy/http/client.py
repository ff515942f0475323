"""A client and the exchange that answers its request, as each sees the other, and what clients share.

In this order: `ClientExchange`, `ResponseClient`, `ConnectionHost`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from cellgate.proxy.config.settings import Limits
    from cellgate.proxy.http.body_memory import BodyMemory
    from cellgate.proxy.http.errors import Failure
    from cellgate.proxy.http.request import Request
    from cellgate.proxy.http.slow_readers import Backlogs
    from cellgate.proxy.http.turns import ReadScheduler


class ClientExchange(Protocol):
    """What a connection knows of the exchange that answers its request."""

    def start(self) -> None: ...
    def crashed(self, error: Exception) -> None: ...
    def client_left(self) -> None: ...
    def client_paused(self, paused: bool) -> None: ...
    def is_awaited(self) -> bool:
        """Whether others wait for the slot that it holds."""

    def stop(self, failure: Failure) -> None: ...
    def tick(self, now: float) -> None: ...


class ResponseClient(Protocol):
    """What an exchange knows of its client. `secure`: by TLS; `shows_internals`: its answers tell which
    unit it was. `look_at`: before that time its clocks need not be looked at.

    `write` checks nothing, and must not be used once the client has left. `hint` sends heads that come before
    that of the response.
    """

    peer: str
    secure: bool
    shows_internals: bool
    look_at: float

    def write(self, data: bytes, /) -> None: ...
    def send(self, data: bytes) -> None: ...
    def hint(self, heads: bytes) -> None: ...
    def finish(self, request: Request, *, keep_alive: bool) -> None: ...
    def abort(self, exchange: ClientExchange, request: Request) -> None: ...
    def cut(self) -> None: ...


class ConnectionHost(Protocol):
    """What the connections of one listener share, and who answers their requests: the gateway. Without this
    port the room `http` would import all that answers a request. No request waits for a large read before it
    begins: there is a scheduler for each.
    """

    limits: Limits
    routing_fields: frozenset[bytes]
    memory: BodyMemory
    clients: dict[Any, None]
    """The connections themselves (`ClientConnection`, server.py)."""
    read_scheduler: ReadScheduler
    start_scheduler: ReadScheduler
    backlogs: Backlogs

    @property
    def payer(self) -> Callable[[str, bytes], str]: ...
    def now(self) -> float: ...
    def exchange(self, client: ResponseClient, request: Request) -> ClientExchange: ...
    def own_lines(self, request: Request) -> bytes:
        """Header lines of any answer to `request`, of which only a part may have come."""

    def refused(self, peer: str, failure: Failure) -> None: ...
    def defect(self, what: str, error: Exception) -> None: ...
    def shows_internals(self, peer: str) -> bool: ...
    def turns_away(self, request: Request) -> Failure | None:
        """Why the body of a request is not worth reading; None: it is."""

    def body_payer(self, peer: str, request: Request) -> str:
        """Who pays for the memory of a body while it arrives (see router/shares.py)."""
