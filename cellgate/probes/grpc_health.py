"""gRPC: the node's health service says SERVING. How it is called: grpc_call.py."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import ClassVar

from cellgate.probes.base import FetchError, ProbeContext, Trouble
from cellgate.probes.nodes import NodeReport, NodeTalk

_LATE_S = 0.1
"""A timeout that fires this late shows that the gate's event loop was blocked."""


@dataclass(frozen=True, slots=True)
class GrpcProbe(NodeTalk):
    """Calls Check at `address` (HOST:PORT) for `service`; empty: the server as a whole."""

    kind: ClassVar[str] = "grpc"
    address: str
    service: str = ""

    @property
    def about(self) -> str:
        """The address, and the service if one is asked for."""
        return f"{self.address} {self.service}".rstrip()

    async def ask(self, context: ProbeContext) -> NodeReport:
        """The answer of the health service."""
        from cellgate.probes.grpc_call import HealthCall

        deadline = context.now() + self.timeout_s
        transport, call = await context.net.connect(
            self.address, lambda: HealthCall(self.address, self.service), timeout_s=self.timeout_s
        )
        ended = asyncio.ensure_future(call.ended.wait())
        try:
            await asyncio.wait((ended,), timeout=max(0.0, deadline - context.now()))
        finally:
            ended.cancel()
            transport.abort()
        if not call.ended.is_set():
            if context.now() > deadline + _LATE_S:
                raise FetchError(Trouble.OWN, "the gate's event loop was blocked")
            raise FetchError(Trouble.TIMEOUT, "no answer in time")
        return call.said()
