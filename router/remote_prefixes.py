"""Prefixes that other gates have proven at units, and what this gate has to tell them of its own. Pure.

The hash of a block stands for all that comes before it. So a few hashes tell of a whole prompt: whoever gets
a prompt that has one of them knows how long the common beginning is from where it stands in his own prompt.

It is a belief as `PrefixCache` is: it makes a unit cheaper, and no more. It is bounded in number and in time;
a unit that starts anew is forgotten. A gate that is gone is not: what it has seen computed is still there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

EXPIRES_S = 600.0
"""What was told is believed for at most so long, and for at least half of it if there is room."""
HASHES_MAX = 1 << 17
"""So many hashes are kept at most (20 MB), and of each half the half that came last."""
TOLD_AGAIN_S = 120.0
"""What is proven again is told again after so long, or up to twice that. Whoever heard of it still knows it."""
PENDING_MAX = 256
"""So many proven prompts wait to be told of; the newest ones count."""

_NOWHERE: Mapping[str, int] = {}
_STEPS = tuple(sorted({size for power in range(13) for size in (1 << power, 3 << power >> 1)}))
"""1, 2, 3, 4, 6, 8, 12, ...: of a beginning that is shared for the first time, two thirds are known or more."""


class RemotePrefixes:
    """By block hash: the units where another gate has proven a prompt that has it.

    In two generations, of which the older one is dropped as a whole: that takes no look at each entry.
    """

    __slots__ = ("_bits", "_names", "_older", "_recent", "_turned_at")

    def __init__(self) -> None:
        self._names: list[str] = []
        self._bits: dict[str, int] = {}
        self._recent: dict[int, int] = {}
        """The units of a block, a bit for each."""
        self._older: dict[int, int] = {}
        self._turned_at = 0.0

    def __len__(self) -> int:
        return len(self._recent) + len(self._older)

    def take(self, unit: str, blocks: Iterable[int], now: float) -> None:
        """Another gate tells that `unit` holds all that these blocks stand for."""
        bit = self._bit(unit)
        recent = self._recent
        for block in blocks:
            recent[block] = recent.get(block, 0) | bit
        self.expire(now)

    def match(self, blocks: Sequence[int]) -> Mapping[str, int]:
        """By unit: how many blocks at the beginning of a prompt are there; nothing of those that have none."""
        recent, older = self._recent, self._older
        hits = recent.keys() & blocks
        if older:
            hits |= older.keys() & blocks
        if not hits:
            return _NOWHERE
        held: dict[str, int] = {}
        known = 0
        for place in range(len(blocks), 0, -1):
            if (block := blocks[place - 1]) not in hits:
                continue
            units = (recent.get(block, 0) | older.get(block, 0)) & ~known
            known |= units
            while units:
                held[self._names[(units & -units).bit_length() - 1]] = place
                units &= units - 1
            hits.discard(block)
            if not hits:
                break
        return held

    def forget(self, unit: str) -> None:
        """The unit has started anew, or is no more: it holds nothing."""
        if bit := self._bits.get(unit, 0):
            for blocks in (self._recent, self._older):
                for block, units in list(blocks.items()):
                    if units == bit:
                        del blocks[block]
                    elif units & bit:
                        blocks[block] = units ^ bit

    def expire(self, now: float) -> None:
        """Drop what is too old, or too much."""
        if now - self._turned_at >= EXPIRES_S / 2 or len(self._recent) > HASHES_MAX // 2:
            # What came while nobody looked is as old as a generation may be, or older.
            self._older = self._recent if now - self._turned_at < EXPIRES_S else {}
            self._recent, self._turned_at = {}, now

    def _bit(self, unit: str) -> int:
        bit = self._bits.get(unit)
        if bit is None:
            bit = self._bits[unit] = 1 << len(self._names)
            self._names.append(unit)
        return bit


class ProvenPrefixes:
    """What this gate has newly proven at units, until it is told."""

    __slots__ = ("_pending", "_told", "_told_before", "_turned_at")

    def __init__(self) -> None:
        self._pending: deque[tuple[str, Sequence[int], int]] = deque(maxlen=PENDING_MAX)
        self._told: set[tuple[str, int]] = set()
        self._told_before: set[tuple[str, int]] = set()
        self._turned_at = 0.0

    def note(self, unit: str, blocks: Sequence[int], shared: int) -> None:
        """A prompt was computed at `unit`; its first `shared` blocks were of an earlier one, wherever."""
        self._pending.append((unit, blocks, shared))

    def forget(self, unit: str) -> None:
        """The unit has started anew, or is no more: what it held is not told, and may be told again."""
        self._pending = deque((row for row in self._pending if row[0] != unit), maxlen=PENDING_MAX)
        self._told = {row for row in self._told if row[0] != unit}
        self._told_before = {row for row in self._told_before if row[0] != unit}

    def take(self, most: int, now: float) -> dict[str, list[int]]:
        """By unit: at most `most` hashes that were not told of late. The newest prompts come first: where
        they branched off from others and where they end; then steps on the way, for who branches off there.
        """
        if now - self._turned_at >= TOLD_AGAIN_S or len(self._told) > HASHES_MAX // 2:
            self._told_before, self._told, self._turned_at = self._told, set(), now
        news: dict[str, list[int]] = {}
        rows = list(reversed(self._pending))
        self._pending.clear()
        for unit, block in chain(_ends(rows), _steps(rows)):
            if most <= 0:
                break
            row = unit, block
            if row in self._told or row in self._told_before:
                continue
            self._told.add(row)
            news.setdefault(unit, []).append(block)
            most -= 1
        return news


def _ends(rows: Iterable[tuple[str, Sequence[int], int]]) -> Iterator[tuple[str, int]]:
    for unit, blocks, shared in rows:
        if shared:
            yield unit, blocks[shared - 1]
        yield unit, blocks[-1]


def _steps(rows: Iterable[tuple[str, Sequence[int], int]]) -> Iterator[tuple[str, int]]:
    for unit, blocks, _ in rows:
        for size in _STEPS:
            if size >= len(blocks):
                break
            yield unit, blocks[size - 1]
