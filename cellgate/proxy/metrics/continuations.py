"""Results of streams that a unit broke: each is counted, and one event for each unit sums them up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum

from cellgate.proxy.logs.events import Action, EventLog

REPORT_AFTER_S = 1.0
"""A unit breaks its streams together: the event follows this long after the first."""


class ContinuationKind(Enum):
    """What kind of stream a unit broke."""

    TEXT = "text"
    """Of chat or completions, as are the next ones; with nothing but text."""
    TOOLS = "tools"
    """It may call tools, and has not yet."""
    TOOL_CALL = "tool_call"
    """It has shown a tool call, or a part of one."""
    REASONING = "reasoning"
    """It has shown reasoning."""
    LOGPROBS = "logprobs"
    PENALTIES = "penalties"
    CONSTRAINED = "constrained"
    """A grammar, a forced tool call or something else shapes it."""
    MESSAGES = "messages"
    RESPONSES = "responses"
    OTHER = "other"


class ContinuationResult(Enum):
    """The result of a broken stream."""

    CONTINUED = "continued"
    """Another unit resumed it to its end, or until that one broke it as well, or its client left."""
    COMPLETED = "completed"
    """The text was complete; the gate sent the last events."""
    NOT_CONTINUABLE = "not_continuable"
    """Its request, its events or the configuration do not allow it."""
    REFUSED = "refused"
    """The other unit could not resume it, or could not prove it."""
    NO_UNIT = "no_unit"
    CLIENT_LEFT = "client_left"


Count = Callable[[str, ContinuationKind, ContinuationResult], None]


class Continuations:
    """Collects all results. `count` is called for each."""

    def __init__(self, count: Count, events: EventLog) -> None:
        self._count = count
        self._events = events
        self._unreported: dict[str, Counter[str]] = {}
        self._due: dict[str, float] = {}

    def record(self, unit: str, kind: ContinuationKind, result: ContinuationResult, reason: str = "") -> None:
        """The result of a stream that `unit` broke, and why it was not resumed."""
        self._count(unit, kind, result)
        what = result.value.replace("_", " ")
        self._unreported.setdefault(unit, Counter())[f"{what} ({reason})" if reason else what] += 1

    def tick(self, now: float) -> None:
        """Report events that are due; called a few times a second."""
        for unit in list(self._unreported):
            if now < self._due.setdefault(unit, now + REPORT_AFTER_S):
                continue
            counts = self._unreported.pop(unit)
            del self._due[unit]
            detail = ", ".join(f"{count} {what}" for what, count in counts.most_common(5))
            self._events.add(Action("broken_streams", "gate", unit, detail))
