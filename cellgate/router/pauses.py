"""Pauses: how long a unit under work has lately shown nothing before it went on by itself. Pure.

What one unit of a pool has shown is believed of all: they run the same software. So pauses that all have,
each in its turn (garbage collection, compilation, a shared disk), are nobody's fault after the first.

In this order: `Pauses`, `Longest`, `LongWaits`.
"""

from __future__ import annotations

from collections import deque

KEPT_S = 120.0
"""For so long a pause is remembered."""
LONGEST_S = 8.0
"""What was silent for longer has not paused: it hung, and was cured."""
PAUSES_KEPT = 16
CANARIES_KEPT = 64
LATE_ERROR, LATE_MAX = 0.0001, 16
"""So seldom canaries in a row are late by chance when anything follows; so many always mean something."""
FEW_CANARIES = 16
"""Of fewer answered canaries it is not known how often they are late."""
OVERTAKEN_MAX_S, STILL_WAITS_MAX_S = 60.0, 30.0
"""Waits for a first token from which it is learnt that some are long; and those that are not over: a request
that has waited longer may be lost.
"""


class Pauses:
    """The last pauses that a unit, or a peer of it, has ended by itself.

    `since` is when the silence began that lasts now, on the process that had `restarted` then; below 0: none
    is watched.
    """

    __slots__ = ("_ended", "restarted", "since")

    def __init__(self) -> None:
        self._ended = Longest()
        self.since = -1.0
        self.restarted: tuple[str, float] | None = None

    def longest_s(self, at: float) -> float:
        """The longest that had ended not long before `at`; 0: none."""
        return self._ended.at(at)

    def watch(self, since: float, restarted: tuple[str, float] | None) -> None:
        """It has been silent since then."""
        self.since, self.restarted = since, restarted

    def end(self, progress_at: float, restarted: tuple[str, float] | None) -> float:
        """The silence is over: for how long it was, if it was a pause; else 0."""
        since, self.since = self.since, -1.0
        pause_s = progress_at - since
        return pause_s if 0.0 < pause_s <= LONGEST_S and restarted == self.restarted else 0.0

    def learn(self, pause_s: float, at: float) -> None:
        """A pause has ended, here or at a peer."""
        self._ended.add(pause_s, at)


class Longest:
    """The longest of what was seen lately."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()
        """When, and for how long: the longest first, and after each one only later ones."""

    def at(self, now: float) -> float:
        """Of what was seen not long before; 0: nothing was."""
        return next((length_s for at, length_s in self._seen if now - at < KEPT_S), 0.0)

    def add(self, length_s: float, at: float) -> None:
        seen = self._seen
        while seen and seen[-1][1] <= length_s:
            seen.pop()
        while seen and at - seen[0][0] >= KEPT_S:
            seen.popleft()
        if len(seen) < PAUSES_KEPT:
            seen.append((at, length_s))


class LongWaits(Longest):
    """Waits for a first token of units of one kind; how often canaries were late, where only they tell."""

    __slots__ = ("_canaries", "_late_now", "still_at")

    def __init__(self) -> None:
        super().__init__()
        self.still_at = -KEPT_S
        """When all that had work were last seen to show nothing."""
        self._canaries: deque[tuple[float, int]] = deque(maxlen=CANARIES_KEPT)
        """When one was answered, and after how many late ones in a row."""
        self._late_now: dict[str, tuple[float, int]] = {}
        """Of each unit: when the last one was late, and how many in a row, that are not explained yet."""

    def knows_few(self, now: float) -> bool:
        """Whether so few were answered lately that more would tell something."""
        return sum(now - at < KEPT_S for at, _ in self._canaries) < FEW_CANARIES

    def has_late(self, unit: str) -> bool:
        """Whether late ones of this unit are not explained yet."""
        return unit in self._late_now

    def answered(self, unit: str, now: float, late: int = 0) -> None:
        """A canary was answered in time, where nothing else told; `late` ones before it, or those of which
        nothing was known, were so by chance.
        """
        _, unknown = self._late_now.pop(unit, (now, 0))
        self._canaries.append((now, max(late, unknown)))

    def forget(self, unit: str) -> None:
        """Late ones of this unit mean something else."""
        self._late_now.pop(unit, None)

    def is_chance(self, unit: str, late: int, now: float, least_s: float, *, is_young: bool) -> bool:
        """So many in a row were late: whether these, and one more, are chance as far as others have shown.
        Requests that have waited for longer than `least_s` show that there is chance.
        """
        if late >= LATE_MAX:
            return False
        self._late_now[unit] = now, late
        if len(self._late_now) > CANARIES_KEPT:
            del self._late_now[next(iter(self._late_now))]
        known = [count for at, count in self._canaries if now - at < KEPT_S]
        beside = ((at, count) for name, (at, count) in self._late_now.items() if name != unit)
        by_chance = sum(known) + sum(count for at, count in beside if now - at < STILL_WAITS_MAX_S)
        if not by_chance and self.at(now) < least_s:
            # Nothing says that it is chance.
            return is_young
        share = (by_chance + 1) / (by_chance + len(known) + 2)
        return float(share ** (late + 1)) > LATE_ERROR
