"""Ties recovery to a control plane, its processes and the network. The one place that knows them all."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from cellgate.proxy.config.remedy import Remedy
from cellgate.proxy.recovery import audit, command
from cellgate.proxy.recovery.caution import reason_to_wait
from cellgate.proxy.recovery.nouns import Incident, RecoveryReport
from cellgate.proxy.recovery.recovery import Recovery, RecoveryPorts

if TYPE_CHECKING:
    import ssl

    from cellgate.proxy.control.plane import Plane

TROUBLE_S = 10.0
"""A gate that could not open a connection this recently, by its own fault, does not act."""


def attend(plane: Plane, tls: Callable[[], ssl.SSLContext]) -> Recovery:
    """Begin to recover the units of `plane`; `tls` creates the context that verifies webhooks."""
    gate_faults, trouble_at = 0, -TROUBLE_S

    async def act(remedy: Remedy, about: Incident) -> RecoveryReport:
        if remedy.command:
            return await command.run(remedy, about)
        # Imported late: its HTTP client takes 10 MB, which most gates do not need.
        webhook = await asyncio.to_thread(import_module, "cellgate.proxy.recovery.webhook")
        report: RecoveryReport = await webhook.caller(tls())(remedy, about)
        return report

    def waits(now: float) -> str:
        nonlocal gate_faults, trouble_at
        if (seen := plane.stall_watch.gate_faults) != gate_faults:
            gate_faults, trouble_at = seen, now
        gate_fault = now - trouble_at < TROUBLE_S
        return reason_to_wait(plane.board, now, stopping=plane.is_stopping(), gate_fault=gate_fault)

    ports = RecoveryPorts(
        plane.now, time.time, waits, act, audit.record, plane.events.add, plane.conductor.retry
    )
    recovery = Recovery(
        plane.board, plane.settings.remedies, ports, random.Random(), plane.metrics.recoveries
    )
    plane.ticker.looks.append(recovery.tick)
    return recovery
