"""TCP: the node accepts a connection at an address."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import ClassVar

from cellgate.probes.base import Patient
from cellgate.probes.node import NodeProbe, Said, Word


@dataclass(frozen=True, slots=True)
class TcpProbe(NodeProbe):
    """Connects to `address` (HOST:PORT), sends nothing and closes.

    It proves a listening process, not a working one: the kernel accepts for a process that stands still.
    """

    kind: ClassVar[str] = "tcp"
    address: str

    @property
    def about(self) -> str:
        """The address."""
        return self.address

    async def ask(self, patient: Patient) -> Said:
        """Whether the address accepts."""
        transport, _ = await patient.net.connect(self.address, asyncio.Protocol, timeout_s=self.timeout_s)
        transport.abort()
        return Said(Word.GOOD, "it accepts connections")
