"""Which views of other gates still hold: what Redis says, and what its silence does not say. Pure.

1. While Redis does not answer, the last view holds, however old.
2. A document may be missing because Redis has just come back empty: it counts as missed only after Redis has
   answered for three heartbeats without it.
3. And even then the gate that wrote it is asked: only one that is not ready either takes its views along.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from proxy.report.redis_schema import EXPIRY_HEARTBEATS, HEARTBEAT_S, Merged, Seen, View, merge

Key = tuple[str, str]
"""(unit, gate)"""


class Roster:
    """The views that hold, by unit and gate. `own` is the gate that reads: what it wrote is no news to it."""

    def __init__(self, own: str, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._own = own
        self._patience_s = EXPIRY_HEARTBEATS * heartbeat_s
        self._views: dict[Key, tuple[View, float]] = {}
        self._answering_since: float | None = None

    def answered(self, seen: Mapping[Key, Seen], now: float) -> None:
        """Redis has answered, and this is all that there is."""
        if self._answering_since is None:
            self._answering_since = now
        for key, one in seen.items():
            self.told(key, one, now)

    def told(self, key: Key, one: Seen, now: float) -> None:
        """One view has come, by an answer or by itself. An older one than is known changes nothing."""
        known, at = self._views.get(key), now - one.age_s
        if key[1] != self._own and (known is None or at >= known[1]):
            self._views[key] = one.view, at

    def silent(self) -> None:
        """Redis does not answer. What was known holds."""
        self._answering_since = None

    def missed(self, now: float) -> set[str]:
        """The gates with a view that should have been renewed by now: it is time to ask them."""
        if self._answering_since is None or now - self._answering_since < self._patience_s:
            return set()
        return {gate for (_, gate), (_, at) in self._views.items() if now - at > self._patience_s}

    def not_ready(self, gate: str, now: float) -> None:
        """A gate that was missed does not answer either, or is not ready: its views that are old end."""
        for key in [key for key in self._missed_keys(now) if key[1] == gate]:
            del self._views[key]

    def of(self, unit: str, now: float) -> Merged | None:
        """What the other gates together say of a unit."""
        return merge([Seen(view, now - at) for (name, _), (view, at) in self._views.items() if name == unit])

    def others_in_flight(self, unit: str, now: float) -> int:
        """Requests that the other gates have there. What is too old to be so any more does not count."""
        return sum(
            view.in_flight
            for (name, _), (view, at) in self._views.items()
            if name == unit and now - at <= self._patience_s
        )

    def units(self) -> set[str]:
        """All units that any gate has told of."""
        return {unit for unit, _ in self._views}

    def _missed_keys(self, now: float) -> Iterator[Key]:
        if self.missed(now):
            yield from (key for key, (_, at) in self._views.items() if now - at > self._patience_s)
