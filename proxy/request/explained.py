"""The exchange of a request that asks why it goes where it goes: `x-cellgate-explain: 1`.

The answer carries what its unit was taken to cost (docs/routing.md). Which units there are and how busy is
for trusted peers to know; from anybody else it is refused and counted, as a request is that names its unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.request.exchange import Exchange
from cellgate.proxy.request.placement import may_place
from cellgate.proxy.request.routes import RouteKind
from cellgate.proxy.request.routing_explain import header_line
from cellgate.proxy.wire.failure import Failure, Kind
from cellgate.router.lease import Lease

if TYPE_CHECKING:
    from cellgate.proxy.gate import Gate
    from cellgate.proxy.wire.downstream import ClientConnection
    from cellgate.proxy.wire.request import Request


class ExplainedExchange(Exchange):
    """Answers one such request."""

    __slots__ = ("_line",)

    def __init__(self, gate: Gate, client: ClientConnection, request: Request) -> None:
        super().__init__(gate, client, request)
        self._line = b""

    def start(self) -> None:
        """As for any request, if it may know."""
        gate, fields = self._gate, self._request.fields
        if self._route.kind is RouteKind.OWN or may_place(
            self._client.peer, fields, gate.peers, gate.settings.admin_token
        ):
            super().start()
            return
        gate.metrics.forged += 1
        reason = "only trusted peers may ask why a request goes to a unit; see `trusted`"
        self._answer.refuse(Failure(Kind.NOT_TRUSTED, reason))

    def _attempt(self, lease: Lease, *, fresh: bool = False) -> None:
        if not fresh:
            self._line = self.explanation(lease)
        super()._attempt(lease, fresh=fresh)

    def explanation(self, lease: Lease) -> bytes:
        """The header line that tells why the attempt of a lease that was just opened goes there."""
        return header_line(lease, lease.opened_at - self._request.received_at)

    def extra_lines(self) -> bytes:
        """The gate's own lines in the head of the answer."""
        return super().extra_lines() + self._line
