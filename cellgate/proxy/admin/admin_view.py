"""What the admin port needs of the gate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cellgate.proxy.config.trusted_peers import Peers
from cellgate.proxy.control.conduct import Deed
from cellgate.proxy.control.containment import Containment
from cellgate.proxy.control.scaling_signals import Scaling
from cellgate.proxy.logs.events import EventLog
from cellgate.proxy.metrics.metrics import Metrics
from cellgate.proxy.rolling.roller import Roller
from cellgate.proxy.wire.failure import Failure
from cellgate.router.board import Board
from cellgate.router.unit_state import UnitState

Explain = Callable[[Mapping[str, str], bytes | None], dict[str, Any] | Failure]
Conduct = Callable[[UnitState, Deed, str], Awaitable[str]]
"""Has an operation done by the engine of a unit, in a mode (empty: the default); returns the mode."""


def _nobody_looks(_unit: str, _probe: str) -> float | None:
    return None


@dataclass(frozen=True, slots=True)
class AdminView:
    """`set_drain(unit, drained)` is False when there is no such unit; `due_s(unit, probe)` is in how many
    seconds a probe looks again, None when it does not; `queue_size` is how many requests wait for a unit;
    `full`: nobody can be accepted; `explain` is Choice.explain; `conduct` is Conductor.conduct;
    `history` is History.shown; `reload` reads the configuration again for a caller, returns what changed and
    raises ConfigError; `needs_tls`: callers of other machines have to use TLS;
    `roller` is there where rolls are configured.
    """

    board: Board
    events: EventLog
    metrics: Metrics
    now: Callable[[], float]
    stopping: Callable[[], bool]
    set_drain: Callable[[str, bool], bool]
    token: Callable[[], str | None]
    peers: Peers
    explain: Explain
    due_s: Callable[[str, str], float | None] = _nobody_looks
    queue_size: Callable[[], int] = int
    poison: Containment | None = None
    full: Callable[[], bool] = bool
    conduct: Conduct | None = None
    history: Callable[[], dict[str, Any]] = dict
    reload: Callable[[str], Awaitable[str]] | None = None
    needs_tls: Callable[[], bool] = bool
    roller: Roller | None = None
    scaling: Scaling | None = None
