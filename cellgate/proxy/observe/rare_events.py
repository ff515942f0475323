"""Events that somebody else could cause as often as it likes: one is told, and the others are counted in the
next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cellgate.proxy.observe.events import Action, EventLog

AGAIN_S = 600.0
"""The same of the same unit or cell is told again after so long."""
RARE_EVENTS_KEPT = 1024
"""So many are remembered; of more, the one told longest ago is forgotten."""


class RareEvents:
    """Those of one gate."""

    def __init__(self, events: EventLog, now: Callable[[], float]) -> None:
        self._events = events
        self._now = now
        self._reported: dict[tuple[str, str | None, str | None], tuple[float, int]] = {}
        """When each was told, and how often it has happened since."""

    def add(self, action: Action) -> None:
        """It has happened: tell it, or count it."""
        what, now = (action.kind, action.unit, action.cell), self._now()
        at, more = self._reported.get(what, (-AGAIN_S, 0))
        if now - at < AGAIN_S:
            self._reported[what] = at, more + 1
            return
        self._reported.pop(what, None)
        self._reported[what] = now, 0
        if len(self._reported) > RARE_EVENTS_KEPT:
            del self._reported[next(iter(self._reported))]
        since = f"; {more} more times since the last such event" if more else ""
        self._events.add(replace(action, detail=action.detail + since))
