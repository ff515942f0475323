"""Prompts that are refused for a while, by fingerprint: bounded, expiring. Pure: times are passed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ban:
    """A prompt that has ended units. `units` are those that it ended, `gate` the other gate that published
    it.

    `since` and `until` are times of this gate's loop, in seconds.
    """

    fingerprint: int
    model: str
    since: float
    until: float
    units: tuple[str, ...] = ()
    gate: str = ""


class Bans:
    """The valid bans, at most `limit`; `reached` is called for each that is dropped for a newer one."""

    def __init__(self, limit: int = 1024, reached: Callable[[], None] = lambda: None) -> None:
        self._limit = limit
        self._reached = reached
        self._bans: dict[int, Ban] = {}

    def __len__(self) -> int:
        return len(self._bans)

    def add(self, ban: Ban) -> bool:
        """Add a ban; False when one that lasts as long exists already."""
        known = self._bans.get(ban.fingerprint)
        if known is not None and known.until >= ban.until:
            return False
        self._bans.pop(ban.fingerprint, None)
        self._bans[ban.fingerprint] = ban
        if len(self._bans) > self._limit:
            self._reached()
            del self._bans[min(self._bans, key=lambda each: self._bans[each].until)]
        return True

    def find(self, fingerprint: int, now: float) -> Ban | None:
        """The ban on a prompt."""
        ban = self._bans.get(fingerprint)
        return ban if ban is not None and now < ban.until else None

    def lift(self, fingerprint: int) -> Ban | None:
        """Lift a ban; returns it, if it was valid."""
        return self._bans.pop(fingerprint, None)

    def tick(self, now: float) -> None:
        """Forget those that have ended."""
        for fingerprint in [each for each, ban in self._bans.items() if now >= ban.until]:
            del self._bans[fingerprint]

    def all(self) -> list[Ban]:
        """The valid bans, the oldest first."""
        return list(self._bans.values())
