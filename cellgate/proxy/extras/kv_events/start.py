"""KV events and a control plane. Imported once a unit may publish some, if the packages are installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.extras.kv_events.follow import KvEventFollowers, KvEventMetrics

if TYPE_CHECKING:
    from cellgate.proxy.control.plane import Plane


def follow_kv_events(plane: Plane) -> KvEventFollowers:
    """Follow the units of `plane`. Needs a running loop."""
    following = KvEventFollowers(
        plane.board, lambda state: plane.reach.probe_transport(state).fetch, plane.now
    )
    plane.ticker.looks.append(following.tick)
    plane.metrics.include(KvEventMetrics(following))
    return following
