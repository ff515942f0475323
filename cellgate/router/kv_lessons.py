"""Which block of tokens a block of a prompt's bytes ends in, learnt from prompts that engines stored. Pure.

A request has hashes of blocks of 512 bytes, an engine has blocks of some tokens, and the gate has no
tokenizer. When an answer tells how many tokens its prompt had, and the engine stored a run of just so many
blocks meanwhile, that run is the prompt. Its tokens are taken as evenly spread over its bytes. Where two
prompts begin alike and that would point into the part in which they differ, the last block that both have
counts: so what is shared is exact to a block of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

LESSONS_MAX = 1 << 18
"""So many blocks of bytes are known at most (26 MB); the ones not seen for longest go first."""
SIZES_MAX = 4
"""Engines of one gate have at most so many sizes of blocks."""
_EVICT_SHARE = 8

Taught = dict[int, int]
"""By hash of a block of bytes: the chain hash (kv_index.py) of the block of tokens that it ends in."""


class Lessons:
    """By tokens of an engine's block: what its blocks are for prompts. Common to all units."""

    __slots__ = ("_by_size", "conflicts", "count")

    def __init__(self) -> None:
        self._by_size: dict[int, Taught] = {}
        self.count = 0
        """How many prompts were learnt from."""
        self.conflicts = 0
        """How many contradicted all that was known of their beginning, and taught nothing."""

    def of(self, block_tokens: int) -> Taught:
        """What is known for engines with blocks of so many tokens."""
        known = self._by_size.get(block_tokens)
        if known is None:
            if len(self._by_size) >= SIZES_MAX:
                return {}
            known = self._by_size[block_tokens] = {}
        return known

    def teach(self, block_tokens: int, blocks: Sequence[int], spread: float, chain: Sequence[int]) -> None:
        """A prompt of these blocks of bytes was stored as `chain`, or began so; `spread` are the blocks of
        tokens in one of bytes.
        """
        taught = self.of(block_tokens)
        depths = {one: depth for depth, one in enumerate(chain, 1)}
        count = min(len(blocks), int((len(chain) + 1) / spread))
        found: list[int] = []
        shared = 0
        for number, block in enumerate(blocks[:count], 1):
            known = taught.get(block)
            if known is None:
                shared = max(shared, min(max(int(number * spread), 1), len(chain)))
            else:
                shared = max(shared, depths.get(known, 0))
            if not shared:
                # Nothing of what was known is so: this is another prompt, or another tokenizer.
                self.conflicts += 1
                return
            found.append(chain[shared - 1])
        # The last first: of one prompt the beginning is kept for longest.
        for block, one in zip(reversed(blocks[:count]), reversed(found), strict=True):
            taught.pop(block, None)
            taught[block] = one
        self.count += 1
        if len(taught) > LESSONS_MAX:
            for block in list(islice(taught, LESSONS_MAX // _EVICT_SHARE)):
                del taught[block]
