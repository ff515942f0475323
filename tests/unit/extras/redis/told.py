"""What a gate is told by Redis, at one look."""

from __future__ import annotations

from collections.abc import Mapping

from cellgate.extras.redis.reports import Seen
from cellgate.extras.redis.roster import Roster, RosterKey


def answered(roster: Roster, seen: Mapping[RosterKey, Seen], now: float) -> None:
    """Redis has answered with these reports."""
    roster.answered(now)
    for key, one in seen.items():
        roster.update(key, one, now)
