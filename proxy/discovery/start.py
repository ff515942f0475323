"""Ties a gate to the sources of its units. The one place that knows both."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.discovery.follow import Discovery
from proxy.report.events import Action
from router.nouns import Evidence, Fleet

if TYPE_CHECKING:
    from proxy.gate import Gate


@dataclass(frozen=True, slots=True)
class _GateWorld:
    gate: Gate

    def now(self) -> float:
        return self.gate.now()

    def configure(self, fleet: Fleet) -> str:
        return self.gate.configure(fleet)

    def observe(self, evidence: Evidence) -> None:
        self.gate.watch.observe(evidence)

    def tell(self, action: Action) -> None:
        self.gate.events.add(action)


def discover(gate: Gate) -> Discovery:
    """Begin to follow the sources that `gate` is configured with, if any. The gate has started."""
    discovery = Discovery(_GateWorld(gate), random.Random())
    gate.metrics.sources = discovery.standing
    gate.take_over = lambda settings: discovery.take(settings.fleet, settings.sources)
    gate.take_over(gate.settings)
    return discovery
