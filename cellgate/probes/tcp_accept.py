"""TCP: the node accepts a connection at an address."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import ClassVar

from cellgate.probes.base import ProbeContext
from cellgate.probes.node import NodeReport, NodeState, NodeTalk


@dataclass(frozen=True, slots=True)
class TcpProbe(NodeTalk):
    """Connects to `address` (HOST:PORT), sends nothing and closes.

    It proves a listening process, not a working one: the kernel accepts for a process that is blocked.
    """

    kind: ClassVar[str] = "tcp"
    address: str

    @property
    def about(self) -> str:
        """The address."""
        return self.address

    async def ask(self, context: ProbeContext) -> NodeReport:
        """Whether the address accepts."""
        transport, _ = await context.net.connect(self.address, asyncio.Protocol, timeout_s=self.timeout_s)
        transport.abort()
        return NodeReport(NodeState.GOOD, "it accepts connections")
