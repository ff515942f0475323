"""Adds up a usage log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class UsageTotal:
    """What the requests of one key, tenant or model have used; of `estimated` ones the engine did not say."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated: int = 0
    cost: float = 0.0


def totals(rows: Iterable[Mapping[str, Any]], by: str, since: str, until: str) -> dict[str, UsageTotal]:
    """The totals by a field of the lines, from `since` on and before `until` (times as in the log)."""
    found: dict[str, UsageTotal] = {}
    for row in rows:
        if not since <= row["time"] < until:
            continue
        total = found.setdefault(str(row[by]), UsageTotal())
        total.requests += 1
        total.prompt_tokens += row["prompt_tokens"]
        total.completion_tokens += row["completion_tokens"]
        total.estimated += bool(row["is_estimated"])
        total.cost += row["cost"]
    return dict(sorted(found.items()))
