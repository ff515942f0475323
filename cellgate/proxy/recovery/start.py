"""Ties recovery to a control plane, its processes and the network. The one place that knows them all."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from cellgate.proxy.recovery import audit
from cellgate.proxy.recovery.acting import Acting
from cellgate.proxy.recovery.caution import reason_to_wait
from cellgate.proxy.recovery.nouns import Act
from cellgate.proxy.recovery.recovery import Recovery, RecoveryPorts

if TYPE_CHECKING:
    from cellgate.proxy.control.plane import Plane

TROUBLE_S = 10.0
"""A gate that could not open a connection this recently, by its own fault, does not act."""


def attend(plane: Plane, act: Act, acting: Acting) -> Recovery:
    """Begin to recover the units of `plane`; `act` carries out remedies, `acting` knows which gate acts."""
    gate_faults, trouble_at = 0, -TROUBLE_S

    def waits(now: float) -> str:
        nonlocal gate_faults, trouble_at
        if (seen := plane.stall_watch.gate_faults) != gate_faults:
            gate_faults, trouble_at = seen, now
        gate_fault = now - trouble_at < TROUBLE_S
        return reason_to_wait(plane.board, now, stopping=plane.is_stopping(), gate_fault=gate_fault)

    ports = RecoveryPorts(
        plane.now,
        time.time,
        waits,
        act,
        audit.record,
        plane.events.add,
        plane.conductor.retry,
        acting,
    )
    recovery = Recovery(
        plane.board, plane.settings.remedies, ports, random.Random(), plane.metrics.recoveries
    )
    plane.ticker.looks.append(recovery.tick)
    return recovery
