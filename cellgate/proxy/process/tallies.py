"""What any process of a gate counts: workers report to the control process, which shows the sum."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TallyFamily:
    """One family of `/metrics`, a counter. `known`: rows that are shown from the start, with 0."""

    text: str
    labels: tuple[str, ...]
    known: tuple[tuple[str, ...], ...] = ()


RELOADS = "reloads"
NAMED = "named_requests"
FALLBACKS = "fallbacks"
GUARDRAIL = "guardrail_verdicts"

FAMILIES = {
    RELOADS: TallyFamily(
        "Times that files were read again while the gate runs; refused: what was in use stays.",
        ("what", "result"),
        tuple(
            (what, result)
            for what in ("configuration", "certificates", "keys")
            for result in ("taken", "refused")
        ),
    ),
    NAMED: TallyFamily(
        "Requests for a name of `models`, by the model that was to serve them first.", ("name", "model")
    ),
    FALLBACKS: TallyFamily(
        "Requests that fell back to another name, because no unit could serve the one before.",
        ("name", "fallback"),
    ),
    GUARDRAIL: TallyFamily(
        "Questions to the guardrail by their result: a verdict, or why there was none.",
        ("phase", "result"),
        tuple(
            (phase, result)
            for phase in ("request", "answer")
            for result in (
                "allowed",
                "denied",
                "changed",
                "timeout",
                "unreachable",
                "nonsense",
                "too_many",
                "too_large",
                "unreadable",
            )
        ),
    ),
}
"""By name. Values of labels come from the configuration or from a table, never from a client."""

TallyKey = tuple[str, ...]
"""The family, and the values of its labels."""

TALLIES: Counter[TallyKey] = Counter(
    {(name, *row): 0 for name, family in FAMILIES.items() for row in family.known}
)
"""What this process has counted since it began."""


def tally(family: str, *labels: str) -> None:
    """Count one."""
    TALLIES[family, *labels] += 1
