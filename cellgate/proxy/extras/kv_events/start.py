"""Ties KV events to a control plane, where the package for them is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from cellgate.proxy.config.settings import KV_EVENTS_PACKAGES
from cellgate.proxy.control.plane import Plane

if TYPE_CHECKING:
    from cellgate.proxy.extras.kv_events.follow import KvEventFollowers


def follow_kv_events(plane: Plane) -> KvEventFollowers | None:
    """Follow the units of `plane`; None without the packages. Needs a running loop."""
    if not all(map(find_spec, KV_EVENTS_PACKAGES)):
        return None
    # Imported late: most gates do not have it.
    from cellgate.proxy.extras.kv_events.follow import KvEventFollowers, KvEventMetrics

    following = KvEventFollowers(
        plane.board, lambda state: plane.reach.probe_transport(state).fetch, plane.now
    )
    plane.ticker.looks.append(following.tick)
    plane.metrics.include(KvEventMetrics(following))
    return following
