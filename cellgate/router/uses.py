"""Which kinds of requests clients send, so that canaries ask for these kinds. Pure.

A kind is a path, whether it is streamed, and a model. It is in use for USED_S after it was last answered
somewhere: only what a unit has answered can be expected of the others.
"""

from __future__ import annotations

from collections.abc import Iterator

from cellgate.router.nouns import Ask, Use
from cellgate.router.unit_state import Lease, UnitState

USED_S = 600.0
USES_KEPT = 64
"""Kinds that are kept: the last ones."""
LOOKED_AT = 64
"""Requests of a unit that are looked at for one that waits."""
HANGS_S = 2.0
"""A request that waits for so long, while later ones are answered, may hang alone."""
LATER_S = 0.25
"""A request that came so much later was not under way at the same time."""


class Uses:
    """The kinds in use at one gate."""

    def __init__(self) -> None:
        self._at: dict[Use, float] = {}
        self._plain_at: dict[str, float] = {}
        """When the last plain request that a unit has answered was sent to it."""

    def note(self, state: UnitState, now: float) -> None:
        """Look at what a unit has just answered: its last plain answer, and the last request it has."""
        if (plain := state.costs.last_plain) is not None:
            self._note(plain[0].ask, plain[2])
            self._plain_at[state.unit.name] = plain[0].opened_at
        last = next(reversed(state.leases), None)
        if last is not None and last.committed:
            self._note(last.ask, now)

    def of(self, state: UnitState, now: float) -> Iterator[Use]:
        """What is in use of what a unit serves, the last first."""
        for use, at in reversed(self._at.items()):
            if now - at <= USED_S and state.serves_model(use.model or None):
                yield use

    def answers_since(self, state: UnitState, since: float) -> bool:
        """Whether a unit has answered a request that came after `since`: what was there before cannot be
        waiting behind others then. A unit of several queues shows nothing.
        """
        later = since + LATER_S
        if state.ranks.count:
            return False
        if self._plain_at.get(state.unit.name, -1.0) > later:
            return True
        last = zip(reversed(state.leases), range(LOOKED_AT), strict=False)
        return any(lease.committed and lease.opened_at > later for lease, _ in last)

    def hanging(self, state: UnitState, now: float) -> Lease | None:
        """A request of a unit that waits, while a later one was answered."""
        for lease, _ in zip(state.leases, range(LOOKED_AT), strict=False):
            if not (lease.committed or lease.evicted or lease.paused):
                is_old = now - lease.opened_at > HANGS_S
                return lease if is_old and self.answers_since(state, lease.opened_at) else None
        return None

    def _note(self, ask: Ask, at: float) -> None:
        use = use_of(ask)
        if use.route and at > self._at.get(use, -1.0):
            self._at.pop(use, None)
            self._at[use] = at
            if len(self._at) > USES_KEPT:
                del self._at[next(iter(self._at))]


def use_of(ask: Ask) -> Use:
    return Use(ask.route, ask.stream, ask.model or "")
