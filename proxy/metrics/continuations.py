"""What became of streams that a unit broke: counted once it is known, told as one event a unit later on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum

from cellgate.proxy.logs.events import Action, EventLog

REPORT_AFTER_S = 1.0
"""A unit breaks its streams together: what became of them is told so long after the first."""


class ContinuationResult(Enum):
    """What became of a stream that was broken in the middle."""

    CONTINUED = "continued"
    """Another unit went on with it to its end, or until that one broke it as well, or its client left."""
    COMPLETED = "completed"
    """All of the text had been shown; the gate said the rest."""
    NOT_CONTINUABLE = "not_continuable"
    """Its request or its events do not allow it, or it was switched off."""
    REFUSED = "refused"
    """The other unit could not go on, or not provably."""
    NO_UNIT = "no_unit"
    CLIENT_LEFT = "client_left"


class Continuations:
    """Takes note of them all. `count` is told of each."""

    def __init__(self, count: Callable[[str, ContinuationResult], None], events: EventLog) -> None:
        self._count = count
        self._events = events
        self._unreported: dict[str, Counter[str]] = {}
        self._due: dict[str, float] = {}

    def record(self, unit: str, result: ContinuationResult, reason: str = "") -> None:
        """The result of a stream that `unit` broke, and why it was not resumed."""
        self._count(unit, result)
        what = result.value.replace("_", " ")
        self._unreported.setdefault(unit, Counter())[f"{what} ({reason})" if reason else what] += 1

    def tick(self, now: float) -> None:
        """Tell what is due; called a few times a second."""
        for unit in list(self._unreported):
            if now < self._due.setdefault(unit, now + REPORT_AFTER_S):
                continue
            counts = self._unreported.pop(unit)
            del self._due[unit]
            detail = ", ".join(f"{count} {what}" for what, count in counts.most_common(5))
            self._events.add(Action("broken_streams", "gate", unit, detail))
