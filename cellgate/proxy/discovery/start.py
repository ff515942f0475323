"""Ties a control plane to the sources of its units. The one place that knows both."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cellgate.proxy.config.settings import PACKAGES, RedisSource, Settings
from cellgate.proxy.discovery import FOLLOW
from cellgate.proxy.discovery.base import Feed, Found
from cellgate.proxy.discovery.follow import Discovery
from cellgate.proxy.observe.counters import gauge
from cellgate.proxy.observe.events import Action
from cellgate.router.nouns import Evidence, Fleet

if TYPE_CHECKING:
    from cellgate.proxy.control.plane import Plane


@dataclass(frozen=True, slots=True)
class _PlaneWorld:
    plane: Plane

    def now(self) -> float:
        return self.plane.now()

    def configure(self, fleet: Fleet) -> str:
        return self.plane.configure(fleet)

    def observe(self, evidence: Evidence) -> None:
        self.plane.prober.observe(evidence)

    def tell(self, action: Action) -> None:
        self.plane.events.add(action)


class DiscoveryMetrics(Collector):
    """Which sources work."""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery

    def collect(self) -> Iterator[Metric]:
        """The one family."""
        text = "1 while a source of units works; at 0 its last units are kept."
        rows = (((title,), up) for title, up in self._discovery.connected().items())
        yield gauge("discovery_up", text, ("source",), rows)


def preload(settings: Settings) -> None:
    """Import what the sources need at start: later, half a second of imports would delay streams."""
    for source in settings.sources:
        if source.kind in PACKAGES:
            importlib.import_module(PACKAGES[source.kind][0])


def discover(plane: Plane, feed: Feed) -> Discovery:
    """Begin to follow the sources that `plane` is configured with, if any. It has begun.

    `feed` has the units of Redis, for a gate whose units come from there.
    """
    follow = {**FOLLOW, RedisSource.kind: lambda _: feed.follow()}
    discovery = Discovery(_PlaneWorld(plane), random.Random(), follow)
    plane.metrics.include(DiscoveryMetrics(discovery))
    plane.take_over = lambda settings: discovery.take(settings.fleet, settings.sources)
    plane.take_over(plane.settings)
    plane.remember = lambda fleet: discovery.remember(Found(fleet.units, fleet.cells))
    return discovery
