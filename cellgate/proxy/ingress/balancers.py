"""Counts the load balancers that ask for the gate or one of its units: each may use only its part. Pure.

They are known by what comes to the agent port, which is theirs alone: the address, and the name that stands
behind the question. A request of a client says nothing of them, whatever is written in it.
"""

from __future__ import annotations

from cellgate.proxy.config.limits import LIMITS, reached

SEEN_S = 30.0
"""A balancer without checks for this long is gone: fifteen checks at HAProxy's default of 2 s."""


class Balancers:
    """Which balancer asked for what (a unit's name, or `gate`), and when last."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], float] = {}

    def asked(self, about: str, who: str, now: float) -> None:
        """One asks. Of more than `LIMITS.balancers` the one that was heard longest ago is forgotten."""
        seen = self._seen
        seen.pop((about, who), None)
        seen[about, who] = now
        while now - next(iter(seen.values())) > SEEN_S:
            del seen[next(iter(seen))]
        if self.count(about, now) > LIMITS.balancers:
            reached("balancers")
            del seen[next(key for key in seen if key[0] == about)]

    def count(self, about: str, now: float) -> int:
        """How many ask for it now; at least 1."""
        return max(1, sum(a == about and now - at <= SEEN_S for (a, _), at in self._seen.items()))
