"""What a unit's prefix cache is believed to hold: an LRU of chained block hashes, one per unit. Pure.

Rules:
1. It is closed: a block is held only while all blocks before it are. So the longest known beginning of a
   prompt is found by halving, and no block is kept that nothing leads to.
2. It never holds more than `limit` blocks, at most 152 bytes each: a dict of ints below 2^60, in the order of
   use, whose table has at most six places for an entry.
3. It is a belief: recorded at dispatch, taken back when the attempt came to nothing, weighed by `trust`,
   which follows what the engine says it found. A unit that starts anew holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

MAX_BLOCKS = 1 << 18
"""The most that is kept of one unit: 40 MB for 32 million tokens."""
DEFAULT_KV_TOKENS = 500_000
"""Taken for the size of a KV cache that nobody has told."""

_TRUST_STEP = 0.05
_EVICT_SHARE = 32
"""The oldest go by one part in so many at a time: finding them walks over what was touched since."""


def blocks_for(kv_tokens: float, bytes_per_token: float, block_bytes: int) -> int:
    """How many blocks of prompt a KV cache of so many tokens holds: at least 1, at most MAX_BLOCKS."""
    return int(min(max(kv_tokens * bytes_per_token / block_bytes, 1.0), MAX_BLOCKS))


class PrefixCache:
    """The blocks that one unit is believed to hold, least recently used first."""

    __slots__ = ("_blocks", "_records", "limit", "trust")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.trust = 1.0
        """The share of the expected hits that the engine has found of late."""
        # Block -> the number of the record that used it last; the order of the dict is the order of use.
        self._blocks: dict[int, int] = {}
        self._records = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, blocks: Sequence[int]) -> int:
        """How many blocks at the beginning of a prompt are held."""
        held = self._blocks
        if not blocks or blocks[0] not in held:
            return 0
        # By halving, and not by bisect: its key would be a call for each step.
        low, high = 1, len(blocks)
        if blocks[-1] in held:
            return high
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in held:
                low = middle + 1
            else:
                high = middle
        return low

    def record(self, blocks: Sequence[int]) -> int:
        """Note that a prompt goes to this unit; returns the record's number, which `forget` takes."""
        held, number = self._blocks, self._records + 1
        self._records = number
        # The last block first: what comes before it is then the more recently used, and outlives it.
        for block in reversed(blocks[: self.limit]):
            held.pop(block, None)
            held[block] = number
        self._evict()
        return number

    def forget(self, blocks: Sequence[int], known: int, number: int) -> None:
        """Take back a record that came to nothing: what it added to the `known` blocks that were held before.

        Blocks that a later record has used as well stay, and so do all before them.
        """
        held = self._blocks
        for block in reversed(blocks[known:]):
            last = held.get(block)
            if last == number:
                del held[block]
            elif last is not None:
                return

    def correct(self, expected: float, found: float) -> None:
        """Take over how many cached tokens an engine found where so many were expected (raw, not trusted)."""
        if expected > 0.0:
            self.trust += _TRUST_STEP * (min(max(found / expected, 0.0), 1.0) - self.trust)

    def resize(self, limit: int) -> None:
        """Hold at most so many blocks from now on."""
        self.limit = limit
        self._evict()
        # A table that has grown does not shrink by itself.
        self._blocks = dict(self._blocks.items())

    def purge(self) -> None:
        """The unit has started anew: it holds nothing."""
        self._blocks = {}
        self.trust = 1.0

    def _evict(self) -> None:
        held = self._blocks
        if len(held) <= self.limit:
            return
        spare = len(held) - self.limit + self.limit // _EVICT_SHARE
        for block in list(islice(held, spare)):
            del held[block]
