"""Reports of containment: JSON for operators, and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cellgate.proxy.control.containment import Containment, fingerprint_name
from cellgate.proxy.metrics.families import counter, gauge
from cellgate.router.bans import Ban

_COUNTS = {
    "deaths": "Attempts that ended with the loss of their unit or of its connection.",
    "ended": "Requests that were ended because units had died of their prompt.",
    "refused": "Requests that were refused because of their prompt, before a unit got them.",
    "bans": "Prompts that this gate decided to refuse.",
}


def listing(containment: Containment, now: float) -> dict[str, Any]:
    """The prompts that are refused, and how many are suspected."""
    return {
        "ban_s": containment.ban_s,
        "bans": [_entry(ban, now) for ban in containment.bans.all()],
        "suspects": sum(
            record.is_suspect and not record.ended for record in containment.ledger.records.values()
        ),
        "held": containment.held,
    }


def _entry(ban: Ban, now: float) -> dict[str, Any]:
    return {
        "fingerprint": fingerprint_name(ban.fingerprint),
        "model": ban.model,
        "units": list(ban.units),
        "age_s": round(now - ban.since, 1),
        "left_s": round(ban.until - now, 1),
        "gate": ban.gate,
    }


class PoisonMetrics(Collector):
    """The metrics of containment."""

    def __init__(self, containment: Containment) -> None:
        self._containment = containment

    def collect(self) -> Iterator[Metric]:
        """All families."""
        contained = self._containment
        for name, text in _COUNTS.items():
            yield counter(f"poison_{name}", text, (), [((), contained.counts[name])])
        records = contained.ledger.records.values()
        for name, text, value in (
            (
                "poison_banned",
                "Prompts that are refused now, by this gate or by others.",
                len(contained.bans),
            ),
            (
                "poison_suspects",
                "Prompts that were in flight when two units died and are still suspected.",
                sum(record.is_suspect for record in records),
            ),
            (
                "poison_held",
                "Requests that wait until a suspected prompt is proven or cleared.",
                contained.held,
            ),
        ):
            yield gauge(name, text, (), [((), value)])
