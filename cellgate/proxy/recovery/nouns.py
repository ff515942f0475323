"""The nouns of recovery: incident, remedy, report."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cellgate.proxy.config.remedy import Remedy

Incident = Mapping[str, Any]
"""All that is known of a unit that is to be recovered, ready for JSON: see incident.py."""


class RecoveryResult(Enum):
    """How an attempt ended; label of `cellgate_recoveries_total`."""

    OK = "ok"
    FAILED = "failed"
    TIMEOUT = "timeout"
    FLOODED = "flooded"
    CANCELLED = "cancelled"
    """The unit came back, or the gate must not act any more, before anything was done."""
    CUT_OFF = "cut_off"
    """The gate ended while the command was running."""
    UNRECORDED = "unrecorded"
    """The audit log could not be written, so nothing was done."""
    REFUSED = "refused"
    """The orchestrator refused it, or has nothing that the unit is made of, so nothing was done."""
    RETRIED = "retried"
    """The engine's own fault tolerance has recovered the unit, so it was not restarted."""
    DRY_RUN = "dry_run"
    GAVE_UP = "gave_up"


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """The result of one attempt. `detail` is for people; `output` is the end of what was printed."""

    result: RecoveryResult
    detail: str
    output: str = ""


Act = Callable[[Remedy, Incident], Awaitable[RecoveryReport]]
"""Executes a remedy, within its `timeout_s`; raises only CancelledError."""
AuditRecord = Callable[[str, Mapping[str, Any]], Awaitable[None]]
"""Appends a line to the audit log at a path. Raises OSError when it is not on the disk."""
