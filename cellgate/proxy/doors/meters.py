"""Meters: how much of a limit was used in a window of the clock. Pure; amounts are whole numbers.

A meter stands alone, or is one of several gates that share a counter (sharing/shared_limits.py). A sharing
meter spends only what it holds: slices that were taken from the counter in the background, so no request
waits for them. Rules:
1. `spent` never passes `held`, but by one request, and only where nobody holds the rest: a slice may be
   smaller than a request.
2. In a new window, until the counter has answered, each gate holds half of its even share.
3. A meter that has lost the counter stands alone: each gate then passes at most the whole limit.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import Enum

MINUTE_S, DAY_S = 60.0, 86_400.0


class Period(Enum):
    """The windows of the clock, in UTC."""

    MINUTE = "minute"
    DAY = "day"
    MONTH = "month"

    def window(self, at: float) -> tuple[float, float]:
        """When the window of a time begins and ends, in seconds since 1970."""
        if self is Period.MONTH:
            month = datetime.fromtimestamp(at, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
            return month.timestamp(), (month + timedelta(days=32)).replace(day=1).timestamp()
        length_s = MINUTE_S if self is Period.MINUTE else DAY_S
        begins_at = at // length_s * length_s
        return begins_at, begins_at + length_s


class Meter:
    """One limit, from `at` on, of one gate or of several `gates` (0: it stands alone). `spent` is what this
    gate has used in the window.

    Of a sharing meter: `taken` is what this gate has taken from the counter, `held` what of that counts,
    `free` what no gate has taken, as far as is known.
    """

    __slots__ = (
        "_looked",
        "begins_at",
        "ends_at",
        "free",
        "held",
        "is_alone",
        "limit",
        "period",
        "spent",
        "taken",
    )

    def __init__(self, limit: int, period: Period, at: float, gates: int = 0) -> None:
        self.limit = limit
        self.period = period
        self.roll(at, gates)

    def roll(self, at: float, gates: int) -> None:
        """A new window begins."""
        self.begins_at, self.ends_at = self.period.window(at)
        self.spent = self.taken = self._looked = 0
        self.is_alone = not gates
        self.held = self.limit // (2 * gates) if gates else self.limit
        self.free = self.limit - self.held

    def has_room(self, amount: int) -> bool:
        """Whether so much more may be used."""
        room = self.held - self.spent
        return amount <= room or (room >= 0 and amount <= room + self.free)

    @property
    def left(self) -> int:
        """What may still be used, by all gates together, as far as is known."""
        return max(0, self.held - self.spent + self.free)

    @property
    def is_low(self) -> bool:
        """Whether it should look at the counter soon: it has not in this window, or what it holds is used,
        and there is something to be taken.
        """
        return not self.taken or (self.spent >= self.held and self.free > 0)

    def change(self, limit: int) -> None:
        """It has another limit from now on."""
        more, self.limit = limit - self.limit, limit
        if self.is_alone:
            self.held = limit
            return
        self.free += more
        if self.free < 0:
            self.held, self.free = self.held + self.free, 0

    # -- sharing -------------------------------------------------------------------------------------------

    def to_take(self, gates: int) -> int:
        """What to take from the counter now; less than 0: what to give back.

        It is what was used and is not taken yet, and a slice for the next requests: twice what was used since
        the last call, between a quarter and a half of an even share of what is left.
        """
        left, new = self.left, self.spent - self._looked
        self._looked = self.spent
        slice_ = max(1, left // (4 * gates), min(2 * new, left // (2 * gates)))
        return self.spent + min(left, slice_) - self.taken

    def took(self, amount: int, total: int) -> None:
        """So much was taken, and the counter is at `total` now."""
        # A counter that has forgotten (Redis came back empty) is told all of it again.
        self.is_alone = False
        self.taken = self.taken + amount if total >= self.taken + amount else amount
        self.held = self.taken - max(0, total - self.limit)
        self.free = max(0, self.limit - total)

    def stand_alone(self) -> None:
        """The counter is lost: only what this gate has used counts."""
        self.is_alone = True
        self.held, self.free = self.limit, 0
