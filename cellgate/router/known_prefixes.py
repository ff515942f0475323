"""What the prefix cache of a unit that publishes KV events holds: known by its events, else believed. Pure.

Rules:
1. Events decide about blocks of which they tell: a block that was stored is held, one that was removed is
   not. About all others, and about prompts that the unit is computing now, belief (prefix.py) decides.
2. Events count only while they prove true: the prompts that this gate sends must appear in them. Those of
   another unit or of another model do not, and change nothing.
3. A rank whose events are interrupted has no say. A unit has a prompt if one of its ranks has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cellgate.router.kv_index import Cleared, Event, KvIndex
from cellgate.router.kv_lessons import Lessons, Taught
from cellgate.router.prefix import PrefixCache

PROVEN = 0.5
"""The share of prompts that must have appeared in the events of late."""
LATE_S = 0.25
"""Events of a prompt come at most so much later than its first token."""
PENDING_MAX = 64
PER_TICK = 16
"""So many prompts are looked for at once; one takes 50 us for 1,000 blocks."""

_STEP = 0.2


class Computed(NamedTuple):
    """A prompt that the unit has computed between two times. It is `length` blocks of bytes long, of which
    `blocks` are the full ones; `cached` tokens of it were found in its cache (None: not reported).
    """

    blocks: Sequence[int]
    length: float
    tokens: int
    cached: int | None
    since: float
    until: float


class KnownPrefixes:
    """The indexes of all ranks of one unit, beside what is believed of it. `proven` (0 to 1) is the share of
    its prompts that have appeared in its events of late.
    """

    __slots__ = (
        "_indexes",
        "_lessons",
        "_live",
        "_live_ranks",
        "_pending",
        "believed",
        "found",
        "incarnation",
        "missed",
        "proven",
    )

    def __init__(self, believed: PrefixCache, lessons: Lessons) -> None:
        self.believed = believed
        self.proven = 0.0
        self.incarnation = 0
        """How many times the unit has restarted."""
        self.found = 0
        self.missed = 0
        """How many prompts have appeared in the events, and how many have not."""
        self._lessons = lessons
        self._indexes: dict[int, KvIndex] = {}
        self._live_ranks: frozenset[int] = frozenset()
        self._live: tuple[tuple[KvIndex, Taught], ...] = ()
        self._pending: deque[Computed] = deque(maxlen=PENDING_MAX)

    def __len__(self) -> int:
        return sum(map(len, self._indexes.values()))

    @property
    def strange(self) -> int:
        """How many events could not be applied."""
        return sum(index.strange for index in self._indexes.values())

    # -- for routing ---------------------------------------------------------------------------------------

    def match(self, blocks: Sequence[int]) -> int:
        """How many blocks at the beginning of a prompt the unit holds."""
        believed = self.believed.match(blocks)
        if not self.is_used():
            return believed
        known = max([_held(blocks, taught, index.held) for index, taught in self._live])
        if known >= believed or self.believed.is_awaited(blocks[believed - 1]):
            return max(known, believed)
        return known if self._lacks(blocks[known]) else believed

    def lacks(self, block: int) -> bool:
        """Whether a block is known not to be held."""
        return self.is_used() and self._lacks(block)

    def is_used(self) -> bool:
        """Whether its events decide."""
        return bool(self._live) and self.proven >= PROVEN

    def _lacks(self, block: int) -> bool:
        return all(taught.get(block) in index.gone for index, taught in self._live)

    # -- from events ---------------------------------------------------------------------------------------

    def rank(self, rank: int, limit: int) -> KvIndex:
        """The index of a rank, made when it is first asked for; it holds at most `limit` blocks."""
        index = self._indexes.setdefault(rank, KvIndex(limit))
        index.limit = limit
        return index

    def apply(self, rank: int, event: Event, now: float) -> None:
        """An event of a rank has come."""
        index = self._indexes[rank]
        is_new = not index.block_tokens
        index.apply(event, now)
        if is_new and index.block_tokens:
            self._set_live(self._live_ranks)
        if type(event) is Cleared and len(self._indexes) == 1:
            self.believed.purge()

    def resume(self, rank: int) -> None:
        """The events of a rank are complete, as far back as its index goes."""
        self._set_live(self._live_ranks | {rank})

    def suspend(self, rank: int) -> None:
        """The events of a rank are interrupted."""
        self._set_live(self._live_ranks - {rank})

    def _set_live(self, ranks: frozenset[int]) -> None:
        self._live_ranks = ranks
        sized = ((self._indexes[rank], self._indexes[rank].block_tokens) for rank in sorted(ranks))
        self._live = tuple((index, self._lessons.of(size)) for index, size in sized if size)

    def forget(self) -> None:
        """The unit has restarted: it holds nothing, and who publishes must prove it again."""
        for index in self._indexes.values():
            index.clear()
        self._pending.clear()
        self.proven = 0.0
        self.incarnation += 1

    # -- from answers --------------------------------------------------------------------------------------

    def note(self, computed: Computed) -> None:
        """An answer has told how many tokens its prompt had."""
        if self._live:
            self._pending.append(computed)

    def tick(self, now: float) -> None:
        """Look for the prompts whose events must have come by now."""
        pending = self._pending
        for _ in range(PER_TICK):
            if not pending or now < pending[0].until + LATE_S:
                return
            self._learn(pending.popleft())

    def _learn(self, computed: Computed) -> None:
        must = False
        for index, _ in self._live:
            size = index.block_tokens
            full = computed.tokens // size
            chain = index.prompt(full, computed.since, computed.until + LATE_S) if full else None
            if chain is not None:
                self.found += 1
                self.proven += _STEP * (1.0 - self.proven)
                if chain and computed.blocks:
                    self._lessons.teach(
                        size, computed.blocks, computed.tokens / size / computed.length, chain
                    )
                return
            must = must or (computed.cached is not None and full > computed.cached // size)
        if must:
            self.missed += 1
            self.proven -= _STEP * self.proven


def _held(blocks: Sequence[int], taught: Taught, held: Mapping[int, int]) -> int:
    """How many blocks at the beginning of a prompt are held, by halving, as PrefixCache.match."""
    low, high = 0, len(blocks)
    while low < high:
        middle = (low + high + 1) // 2
        if taught.get(blocks[middle - 1]) in held:
            low = middle
        else:
            high = middle - 1
    return low
