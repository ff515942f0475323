"""A client and the exchange that answers its request, as each sees the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cellgate.proxy.http.errors import Failure
    from cellgate.proxy.http.request import Request


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
    unit it was.

    `write` checks nothing, and must not be used once the client has left. `hint` sends heads that come before
    that of the response.
    """

    peer: str
    secure: bool
    shows_internals: bool

    def write(self, data: bytes, /) -> None: ...
    def send(self, data: bytes) -> None: ...
    def hint(self, heads: bytes) -> None: ...
    def finish(self, request: Request, *, keep_alive: bool) -> None: ...
    def abort(self, exchange: ClientExchange, request: Request) -> None: ...
    def cut(self) -> None: ...
