"""Who holds how many slots of a pool, and how much of what it has to compute: while others wait, nobody
gets more than a share. Pure.

Who pays for a request is an address, or where there are keys, the tenant of one: a client cannot choose.
1. While somebody waits who holds less than an equal share, whoever holds more gets nothing more.
2. A payer that holds more than `HOG_PART` of all slots may have filled them for long. So whoever holds less
   than a share may go above the limits of the units, as one that lost its unit may.
3. Nor does anybody wait for prompts of a payer that has claimed more than `HOG_PART` of all that is to be
   computed, if its own are less than a share: what a prompt takes is estimated from what its client sent.
4. While several ask for a pool, each of its units has at most `UNREAD_BYTES` of the prompts of one of them
   that it has not answered yet, or one prompt. What is in its prefix cache counts little (`to_read`).
   Prompts of clients that have left count until the unit has answered one that it got later, because it
   reads them all the same.
5. Alone anybody may have everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import inf

from cellgate.router.cost_model import BLOCK_BYTES
from cellgate.router.nouns import Ask
from cellgate.router.unit_state import Lease, UnitState

ADDRESS = "address "
"""How the name of a payer begins that is an address: what it says of its priority is only its word."""
HOG_PART = 0.25
COUNTED_FOR_S = 0.05
"""Counting goes through all leases, and only while units are full."""

UNREAD_BYTES = 64 << 10
"""About what a unit reads in the time of a few steps: more would not keep it busier."""
EACH_BYTES = 1024
"""What each prompt counts as, beside its bytes."""
CACHED_PART = 1 / 16
"""A cached byte counts so much: it is parsed and turned into tokens, but not computed. A turn of an agent is
nearly all cached, and several are one step of their unit."""
LONG_BYTES = 256 << 10
LONG_WAITS_S = 0.5
"""A prompt of which more bytes are to be read waits for so long at most until a unit has answered the prompts
of others: else it would come between them and their first tokens."""
ABANDONED_S = 1.0
"""After so long a unit has read what a client sent that left, whether it has answered anybody or not."""
PLAIN_S = 0.25
"""After so long it has read what is to be answered as a whole."""
ACTIVE_S = 1.0
"""Who has asked so long ago still counts as one that asks."""

Waiting = tuple[str, int]
"""A payer that waits, and the priority."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The slots of a pool at a time; `claimed` are tokens of prompts that have shown nothing yet."""

    counted_at: float
    slots: float
    held: Counter[str]
    claimed: Counter[str]

    @classmethod
    def count(cls, states: Iterable[UnitState], now: float) -> Shares:
        """Those of units that take requests."""
        usable = [state for state in states if state.is_usable()]
        held, claimed = Counter[str](), Counter[str]()
        for state in usable:
            for lease in state.leases:
                held[lease.ask.payer] += 1
                if not lease.committed:
                    claimed[lease.ask.payer] += lease.job.uncached_tokens
        return cls(now, sum(state.limit for state in usable), held, claimed)

    def is_fresh(self, now: float) -> bool:
        """Whether it may still be used."""
        return now - self.counted_at < COUNTED_FOR_S

    def barred(self, waiting: Collection[Waiting]) -> dict[str, int]:
        """Payers above their share while others wait below: they get nothing for this priority or above."""
        payers = {payer for payer, _ in waiting}
        share = self.slots / max(len(payers | self.held.keys()), 1)
        below = {payer for payer in payers if self.held[payer] < share}
        if not below or len(payers) < 2:
            return {}
        best = min(priority for payer, priority in waiting if payer in below)
        over = payers - below
        return {payer: -(1 << 62) if payer.startswith(ADDRESS) else best for payer in over if payer}

    def borrowers(self, waiting: Collection[Waiting]) -> set[Waiting]:
        """Those of all who wait that may go above the limits, or past what others have claimed."""
        if not self.held:
            return set()
        may = (self.may_borrow, self.may_overtake)
        return {each for each in waiting if any(rule(each, waiting) for rule in may)}

    def may_borrow(self, who: Waiting, waiting: Collection[Waiting]) -> bool:
        """Whether a payer may go above the limits: it holds less than a share, another one hogs, and nobody
        waits whose key gives a better priority.
        """
        return _has_less(self.held, self.slots, 0, who, waiting)

    def may_overtake(self, who: Waiting, waiting: Collection[Waiting], tokens: int = 0) -> bool:
        """The same for what is to be computed, where its prompt has so many tokens."""
        return _has_less(self.claimed, sum(self.claimed.values()), tokens, who, waiting)


def _has_less(
    held: Counter[str], total: float, more: int, who: Waiting, waiting: Collection[Waiting]
) -> bool:
    payer, priority = who
    if not payer or not held:
        return False
    if not payer.startswith(ADDRESS) and any(other < priority for _, other in waiting):
        return False
    share = total / len(held.keys() | {payer})
    hog, most = held.most_common(1)[0]
    return hog not in ("", payer) and most > HOG_PART * total and held[payer] + more < share


class Asking:
    """Which pools several payers ask for. `only` is who has asked lately, if that was a single one."""

    __slots__ = ("_changed_at", "_last", "_pools", "only")

    def __init__(self) -> None:
        self.only: str | None = None
        self._last: str | None = None
        self._changed_at = -inf
        self._pools: dict[str, tuple[str, float]] = {}
        """Who asked for it last, and when that became another one."""

    def note(self, payer: str, pool: str, now: float) -> bool:
        """One asks who is not `only`: whether several ask for that pool."""
        if payer != self._last:
            self._changed_at = now if self._last is not None else -inf
            self._last = payer
        self.only = payer if now - self._changed_at >= ACTIVE_S else None
        before, _ = self._pools.get(pool, (payer, -inf))
        if before != payer or pool not in self._pools:
            self._pools[pool] = payer, now if before != payer else -inf
        return self.has_several(pool, now)

    def has_several(self, pool: str, now: float) -> bool:
        """Whether another one than the last has asked for a pool not long ago."""
        return pool in self._pools and now - self._pools[pool][1] < ACTIVE_S


def to_read(state: UnitState, ask: Ask, cached_blocks: int) -> float:
    """How many bytes a unit reads of a prompt of which it holds so many blocks, as far as others wait for
    that. It has yet to compute those that it holds only for prompts that it has not answered.
    """
    proven = state.costs.prefixes.proven(ask.blocks, cached_blocks) if cached_blocks else 0
    cached = min(proven * BLOCK_BYTES, ask.prompt_bytes)
    return EACH_BYTES + ask.prompt_bytes - cached * (1.0 - CACHED_PART)


def left_to_read(lease: Lease) -> float:
    """The same of a prompt that was sent."""
    if lease.split is None:
        return to_read(lease.unit_state, lease.ask, lease.job.cached_blocks)
    # Another unit computes it.
    return EACH_BYTES + lease.ask.prompt_bytes * CACHED_PART


def is_crowded(state: UnitState, ask: Ask, size: float, now: float, waited_s: float = 0.0) -> bool:
    """Whether a unit has so much to read of the payer of an ask that it is to get no more now; or others wait
    for it whose prompts are to be read before one that takes it long. `size`: what it has to read of the ask.
    """
    payer, is_long = ask.payer, size > LONG_BYTES and waited_s < LONG_WAITS_S
    left = state.unread.left(now, ABANDONED_S)
    unread = sum(prompt.size for prompt in left if prompt.payer == payer)
    for lease in state.leases:
        if lease.committed:
            continue
        if lease.ask.payer != payer:
            if is_long and now - lease.opened_at < LONG_WAITS_S:
                return True
            continue
        # Nothing shows when a plain answer has begun.
        if lease.ask.stream or (lease.opened_at >= state.unread.until and now - lease.opened_at < PLAIN_S):
            unread += left_to_read(lease)
    return unread > 0 and unread + size > UNREAD_BYTES
