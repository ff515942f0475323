"""What is done about the units of a cell that stay DOWN, as it is configured. recovery/ does it."""

from __future__ import annotations

from dataclasses import dataclass

from cellgate.proxy.config.unit_actions import UnitAction

BACKOFF_MAX_S = 3600.0


@dataclass(frozen=True, slots=True)
class Remedy:
    """What is done about the units of one cell that stay DOWN.

    `audit` is the file that gets a line for all that is done.
    after_s (60): so long a unit is DOWN first; timeout_s (30): what takes longer is killed.
    max_parallel (1), max_share (0.5): so many units, and so large a share of the cell, at one time; one
    unit is always allowed. attempts (3): then the gate gives up.
    backoff_s (600): how long a unit is given to come back, doubled with each attempt. `dry_run` (off): all
    but the deed.
    """

    audit: str
    action: UnitAction
    after_s: float = 60.0
    timeout_s: float = 30.0
    max_parallel: int = 1
    max_share: float = 0.5
    attempts: int = 3
    backoff_s: float = 600.0
    dry_run: bool = False

    def patience_s(self, tries: int) -> float:
        """How long a unit is given to come back after so many attempts; after none, as after the first."""
        return min(self.backoff_s * 2.0 ** max(0, tries - 1), max(self.backoff_s, BACKOFF_MAX_S))

    def has_room(self, busy: int, units: int) -> bool:
        """Whether one more unit of a cell of so many may be recovered, when `busy` of them are."""
        return busy < self.max_parallel and (busy == 0 or busy + 1 <= self.max_share * units)


@dataclass(frozen=True, slots=True)
class LeasePlace:
    """Where gates without Redis agree on who acts: a namespace of Kubernetes (empty: the gate's own).

    `kubeconfig` empty: the account of the gate's pod, else the user's file.
    """

    namespace: str = ""
    kubeconfig: str = ""
