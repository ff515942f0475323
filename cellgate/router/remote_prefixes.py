"""Prefixes that other gates have proven at units, and what this gate has to tell them of its own. Pure.

The hash of a block covers everything before it. So a few hashes represent a whole prompt: the position of a
known hash in another prompt is the length of the common prefix.

Like `PrefixCache` it is an estimate that only makes a unit cheaper. It is limited in number and time; a
restarted unit is forgotten. A gate that has ended is not, because the prompts that it has seen computed are
still cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain

EXPIRES_S = 600.0
"""What was reported is believed for at most so long, and for half of it at least unless there is too much of
it."""
HASHES_MAX = 1 << 16
"""So many hashes are kept at most (10 MB)."""
REPORT_AGAIN_S = 120.0
"""What is proven again is reported again after so long, or up to twice that: others still know it."""
PENDING_MAX = 256
"""So many proven prompts wait to be reported; the newest ones count."""

Proven = tuple[str, Sequence[int], int]
"""A unit, the blocks of a prompt, and how many of them an earlier one had."""

_NOWHERE: Mapping[str, int] = {}
_STEPS = tuple(sorted({size for power in range(13) for size in (1 << power, 3 << power >> 1)}))
"""1, 2, 3, 4, 6, 8, 12, ...: who shares a beginning for the first time knows two thirds of it or more."""


class RemotePrefixes:
    """By block hash: the units where another gate has proven a prompt that has it.

    In two generations, of which the older one is dropped as a whole. What a unit has lost by a restart stays
    there under a number that stands for no unit any more. So nothing here walks over all that is known.
    """

    __slots__ = (
        "_answer",
        "_asked",
        "_bits",
        "_free",
        "_gone",
        "_gone_before",
        "_names",
        "_older",
        "_recent",
        "_turned_at",
    )

    def __init__(self) -> None:
        self._names: list[str] = []
        """By number of a bit: the unit; empty: it stands for none any more."""
        self._bits: dict[str, int] = {}
        self._free: list[int] = []
        self._gone: list[int] = []
        self._gone_before: list[int] = []
        """Numbers that are free when what they may occur in has been dropped."""
        self._recent: dict[int, int] = {}
        """The units of a block, a bit for each."""
        self._older: dict[int, int] = {}
        self._turned_at = 0.0
        self._asked: Sequence[int] | None = None
        self._answer = _NOWHERE

    def __len__(self) -> int:
        return len(self._recent) + len(self._older)

    def take(self, unit: str, blocks: Iterable[int], now: float) -> None:
        """Another gate tells that `unit` holds all that these blocks stand for."""
        self.expire(now)
        self._asked = None
        bit, recent = self._bit(unit), self._recent
        for block in blocks:
            recent[block] = recent.get(block, 0) | bit

    def match(self, blocks: Sequence[int]) -> Mapping[str, int]:
        """By unit: how many blocks at the beginning of a prompt are there; units with none are left out."""
        if blocks is self._asked:
            # The same prompt is looked for in several steps of one choice.
            return self._answer
        recent, older = self._recent, self._older
        hits = recent.keys() & blocks
        if older:
            hits |= older.keys() & blocks
        self._asked, self._answer = blocks, self._held(blocks, hits) if hits else _NOWHERE
        return self._answer

    def _held(self, blocks: Sequence[int], hits: Set[int]) -> Mapping[str, int]:
        recent, older, names, known = self._recent, self._older, self._names, 0
        held: dict[str, int] = {}
        for place in reversed([place for place, block in enumerate(blocks, 1) if block in hits]):
            block = blocks[place - 1]
            units = (recent.get(block, 0) | older.get(block, 0)) & ~known
            known |= units
            while units:
                if name := names[(units & -units).bit_length() - 1]:
                    held[name] = place
                units &= units - 1
        return held

    def forget(self, unit: str) -> None:
        """The unit has started anew, or is no more: it holds nothing."""
        if (bit := self._bits.pop(unit, None)) is not None:
            self._names[bit.bit_length() - 1] = ""
            self._asked = None
            self._gone.append(bit)

    def expire(self, now: float) -> None:
        """Drop what is too old, or too much."""
        age_s = now - self._turned_at
        if age_s >= EXPIRES_S / 2 or len(self._recent) >= HASHES_MAX // 2:
            # What came while nobody looked may be too old already.
            self._older = self._recent if age_s < EXPIRES_S else {}
            self._recent, self._turned_at, self._asked = {}, now, None
            self._free += self._gone_before
            self._gone_before, self._gone = self._gone, []

    def _bit(self, unit: str) -> int:
        bit = self._bits.get(unit)
        if bit is None:
            if not self._free:
                self._names.append("")
                self._free.append(1 << (len(self._names) - 1))
            bit = self._bits[unit] = self._free.pop()
            self._names[bit.bit_length() - 1] = unit
        return bit


class ProvenPrefixes:
    """What this gate has newly proven at units, until it is reported."""

    __slots__ = ("_count", "_pending", "_reported", "_reported_before", "_turned_at")

    def __init__(self) -> None:
        self._pending: deque[Proven] = deque(maxlen=PENDING_MAX)
        self._reported: dict[str, set[int]] = {}
        self._reported_before: dict[str, set[int]] = {}
        """By unit: what was reported in this generation, and in the one before."""
        self._count = 0
        self._turned_at = 0.0

    def record(self, unit: str, blocks: Sequence[int], shared: int) -> None:
        """A prompt was computed at `unit`; its first `shared` blocks were of an earlier one, wherever."""
        self._pending.append((unit, blocks, shared))

    def forget(self, unit: str) -> None:
        """The unit has started anew, or is no more: what it held is not reported, and may be
        reported again.
        """
        self._pending = deque((row for row in self._pending if row[0] != unit), maxlen=PENDING_MAX)
        self._reported.pop(unit, None)
        self._reported_before.pop(unit, None)

    def take(self, most: int, now: float) -> dict[str, list[int]]:
        """By unit: at most `most` hashes that were not reported of late. The newest prompts come first: where
        they branched off from others and where they end; then steps on the way, for who branches off there.
        """
        if now - self._turned_at >= REPORT_AGAIN_S or self._count >= HASHES_MAX // 2:
            self._reported_before, self._reported, self._count, self._turned_at = self._reported, {}, 0, now
        news: dict[str, list[int]] = {}
        rows = list(reversed(self._pending))
        self._pending.clear()
        for unit, block in chain(_ends(rows), _steps(rows)):
            reported = self._reported.setdefault(unit, set())
            if block in reported or block in self._reported_before.get(unit, ()):
                continue
            reported.add(block)
            news.setdefault(unit, []).append(block)
            most -= 1
            self._count += 1
            if most <= 0:
                break
        return news


def _ends(rows: Iterable[Proven]) -> Iterator[tuple[str, int]]:
    for unit, blocks, shared in rows:
        if shared:
            yield unit, blocks[shared - 1]
        yield unit, blocks[-1]


def _steps(rows: Iterable[Proven]) -> Iterator[tuple[str, int]]:
    for unit, blocks, _ in rows:
        for size in _STEPS:
            if size >= len(blocks):
                break
            yield unit, blocks[size - 1]
