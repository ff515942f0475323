"""Metrics of KV events, by unit that publishes them; none without one."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cellgate.proxy.kv_events.followers import KvEventFollowers
from cellgate.proxy.metrics.families import counter, gauge

FAULTS = ("broken", "disconnects", "gaps", "malformed", "restarts")


class KvEventMetrics(Collector):
    """What `following` follows."""

    def __init__(self, following: KvEventFollowers) -> None:
        self._following = following

    def collect(self) -> Iterator[Metric]:
        """All families."""
        units = [(state.unit.name, known, counts) for state, known, counts in self._following]
        yield gauge(
            "kv_events_used",
            "1 while the unit's KV events decide what its prefix cache holds; 0: the gate goes by belief.",
            ("unit",),
            (((unit,), known.is_used()) for unit, known, _ in units),
        )
        yield gauge(
            "kv_events_blocks",
            "Blocks of the unit's KV cache that are known from its events.",
            ("unit",),
            (((unit,), len(known)) for unit, known, _ in units),
        )
        yield counter(
            "kv_events_messages",
            "Messages of KV events that were applied.",
            ("unit",),
            (((unit,), counts["messages"]) for unit, _, counts in units),
        )
        yield counter(
            "kv_events_faults",
            "Faults of a unit's KV events, by kind; events that do not fit are `strange`.",
            ("unit", "fault"),
            (
                row
                for unit, known, counts in units
                for row in [((unit, "strange"), known.strange), *(((unit, f), counts[f]) for f in FAULTS)]
            ),
        )
        yield counter(
            "kv_events_prompts",
            "Prompts sent to the unit that were looked for in its events, by whether they were found.",
            ("unit", "result"),
            (
                row
                for unit, known, _ in units
                for row in (((unit, "found"), known.found), ((unit, "missed"), known.missed))
            ),
        )
