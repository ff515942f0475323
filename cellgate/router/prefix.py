"""The assumed contents of a unit's prefix cache: an LRU of chained block hashes, one per unit. Pure.

Rules:
1. It is closed: a block is held only while all blocks before it are. So the longest known beginning of a
   prompt is found by halving, and no block is kept that nothing leads to.
2. It never holds more than `limit` blocks, at most 152 bytes each: a dict of ints below 2^60, in the order of
   use, whose table has at most six places for an entry.
3. It is an estimate: recorded at dispatch, withdrawn when all attempts that used a block failed, weighted by
   `trust`, which follows the cached tokens that the engine reports. A restarted unit holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

MAX_BLOCKS = 1 << 18
"""The most that is kept of one unit: 40 MB for 32 million tokens."""
DEFAULT_KV_TOKENS = 500_000
"""Assumed size of a KV cache that is not known."""

_TRUST_STEP = 0.05
_EVICT_SHARE = 32
"""One part in this many is evicted at a time, because finding the oldest walks over recently used ones."""


def blocks_for(kv_tokens: float, bytes_per_token: float, block_bytes: int) -> int:
    """How many blocks of prompt a KV cache of so many tokens holds: at least 1, at most MAX_BLOCKS."""
    return int(min(max(kv_tokens * bytes_per_token / block_bytes, 1.0), MAX_BLOCKS))


class PrefixCache:
    """The blocks that one unit is believed to hold, least recently used first."""

    __slots__ = ("_blocks", "_generation", "_unproven", "limit", "trust")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.trust = 1.0
        """The share of the expected hits that the engine has found of late."""
        # Block -> whether an attempt that used it has shown something, in the order of use.
        self._blocks: dict[int, bool] = {}
        self._unproven: dict[int, int] = {}
        """How many attempts that have shown nothing yet use a block, where none has shown anything."""
        self._generation = 1

    def __len__(self) -> int:
        return len(self._blocks)

    def recent(self, most: int) -> list[int]:
        """The blocks that were used last, the last one first."""
        return list(islice(reversed(self._blocks), most))

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

    def lacks(self, _block: int) -> bool:
        """Whether a block is known not to be held: belief never knows that."""
        return False

    def is_awaited(self, block: int) -> bool:
        """Whether it is held only for attempts that have shown nothing yet."""
        return self._blocks.get(block) is False

    def record(self, blocks: Sequence[int]) -> int:
        """Record that a prompt is sent to this unit; `prove` or `forget` must be called once with the
        result.
        """
        held, unproven = self._blocks, self._unproven
        # The last block first: the blocks before it are then used more recently, and are evicted later.
        for block in reversed(blocks[: self.limit]):
            held[block] = is_proven = held.pop(block, False)
            if not is_proven:
                unproven[block] = unproven.get(block, 0) + 1
        if len(held) > self.limit:
            self._evict()
        return self._generation

    def prove(self, blocks: Sequence[int], generation: int) -> None:
        """The attempt of a record has committed: its prompt was computed here."""
        held, unproven = self._blocks, self._unproven
        for block in reversed(blocks) if generation == self._generation else ():
            if unproven.pop(block, 0):
                if block in held:
                    held[block] = True
            elif block in held:
                # Another has proven it, and with it all before it.
                return

    def forget(self, blocks: Sequence[int], generation: int) -> None:
        """The attempt of a record failed: blocks that no other attempt has used are dropped."""
        held, unproven = self._blocks, self._unproven
        for block in reversed(blocks) if generation == self._generation else ():
            users = unproven.get(block, 0)
            if users > 1:
                unproven[block] = users - 1
            elif users:
                del unproven[block]
                held.pop(block, None)
            elif block in held:
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
        self._unproven = dict(self._unproven.items())

    def purge(self) -> None:
        """The unit has restarted: its cache is empty."""
        self._blocks, self._unproven = {}, {}
        self._generation += 1
        self.trust = 1.0

    def _evict(self) -> None:
        held = self._blocks
        if len(held) <= self.limit:
            return
        spare = len(held) - self.limit + self.limit // _EVICT_SHARE
        for block in list(islice(held, spare)):
            del held[block]
