"""The blocks that one rank of an engine holds, as its KV events tell. Pure.

An engine names a block by a hash of its own. Here a block also has a chain hash, of all tokens up to its end
(and the LoRA adapter, the cache salt, images), so that units can be compared. Its low bits are the block's
depth, 1 for the first block of a prompt. Rules:
1. An engine that computes two equal prompts at once stores a hash twice and removes it twice: it is counted.
2. A block whose parent is not known cannot be placed, and is left out.
3. "Not held" is never concluded from silence, only from a removal: what was stored before this gate listened
   is not known. At most as many removals are remembered as blocks may be held. A prompt can be found among
   them as well: how many tokens it had is told with the end of its answer, and its end is evicted first.
4. At most `limit` blocks are held: 150 bytes each (a million: `tests/unit/router/test_kv_index.py`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4
"""A token id in `Stored.tokens`: unsigned, 32 bits, in the machine's own order."""
BLOCKS_MAX = 1 << 20
"""The most blocks of all units together: 160 MB."""
LEAVES_MAX = 1 << 14
"""So many ends of stored runs are remembered: a minute or more of a busy unit."""
CANDIDATES_MAX = 8
"""A prompt that could be more runs than this is not looked for."""

_HASH = (1 << 60) - 1
"""An int of two digits: 32 bytes."""
_INDEX_DEPTH = (1 << 16) - 1
_INDEX_EVICT_SHARE = 8


class KvIndex:
    """The blocks of one rank. `block_tokens`: 0 before it stored one; `strange`: events not applicable."""

    def __init__(self, limit: int = BLOCKS_MAX) -> None:
        self.limit = limit
        self.block_tokens = 0
        self.strange = 0
        self.clear()

    def clear(self) -> None:
        self._chains: dict[int, int] = {}
        """By the engine's hash: the chain hash."""
        self.held: dict[int, int] = {}
        """The chain hashes that are held, with that of the block before."""
        self._again: dict[int, int] = {}
        """By either hash: how many times more than once it was stored."""
        self.gone: dict[int, int] = {}
        """Chain hashes that were removed, the oldest first, with that of the block before."""
        self._leaf_at: list[float] = []
        self._leaves: list[int] = []
        """When a run of blocks was stored, and the chain hash of its last one."""

    def __len__(self) -> int:
        return len(self._chains)

    def apply(self, event: Event, now: float) -> None:
        match event:
            case Stored():
                self._store(event, now)
            case Removed(blocks):
                self._remove(blocks)
            case Cleared():
                self.clear()

    def _store(self, event: Stored, now: float) -> None:
        chains = self._chains
        if not event.tokens:
            self._copy(event.blocks)
            return
        chain = root(event.block_tokens, event.lora) if event.parent is None else chains.get(event.parent)
        if chain is None or self._does_not_fit(event, chain):
            self.strange += 1
            return
        self.block_tokens = event.block_tokens
        held, gone, again, extra, tokens = self.held, self.gone, self._again, event.extra, event.tokens
        size, at = event.block_tokens * TOKEN_BYTES, 0
        for number, block in enumerate(event.blocks):
            before = chain
            chain = chains.get(block)
            if chain is not None:
                again[block] = again.get(block, 0) + 1
            else:
                chain = following(before, tokens[at : at + size], extra[number] if extra else b"")
                chains[block] = chain
                if chain in held:
                    again[chain] = again.get(chain, 0) + 1
                else:
                    held[chain] = before
                    gone.pop(chain, None)
            at += size
        self._remember(chain, now)

    def _does_not_fit(self, event: Stored, chain: int) -> bool:
        """Whether it contradicts itself, or what came before, or the limits."""
        count = len(event.blocks)
        return (
            event.block_tokens <= 0
            or self.block_tokens not in (0, event.block_tokens)
            or len(event.tokens) != count * event.block_tokens * TOKEN_BYTES
            or (event.extra is not None and len(event.extra) != count)
            or depth_of(chain) + count > _INDEX_DEPTH
            or len(self._chains) + count > self.limit
        )

    def _copy(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block in self._chains:
                self._again[block] = self._again.get(block, 0) + 1

    def _remember(self, leaf: int, now: float) -> None:
        self._leaf_at.append(now)
        self._leaves.append(leaf)
        if len(self._leaves) > 2 * LEAVES_MAX:
            del self._leaf_at[:LEAVES_MAX], self._leaves[:LEAVES_MAX]

    def _remove(self, blocks: Sequence[int]) -> None:
        chains, held, gone, again = self._chains, self.held, self.gone, self._again
        for block in blocks:
            if again and block in chains and self._is_left(block):
                continue
            chain = chains.pop(block, None)
            if chain is not None and not (again and self._is_left(chain)):
                gone[chain] = held.pop(chain)
        if len(self.gone) > self.limit:
            for chain in list(islice(self.gone, self.limit // _INDEX_EVICT_SHARE + 1)):
                del self.gone[chain]

    def _is_left(self, name: int) -> bool:
        """Count one removal; whether it was stored more often."""
        times = self._again.get(name, 0)
        if times > 1:
            self._again[name] = times - 1
        elif times:
            del self._again[name]
        return times > 0

    def prompt(self, blocks: int, since: float, until: float) -> list[int] | None:
        """The chain hashes of a prompt of so many full blocks, of which the last one was stored between these
        times: as far as all runs agree that it could be. None: there is no such run, or too many.
        """
        first, last = bisect_left(self._leaf_at, since), bisect_right(self._leaf_at, until)
        leaves = {leaf for leaf in self._leaves[first:last] if leaf & _INDEX_DEPTH == blocks}
        if not leaves or len(leaves) > CANDIDATES_MAX:
            return None
        return self._common(leaves)

    def _common(self, leaves: set[int]) -> list[int] | None:
        """The chain hashes from the first block to the last that all `leaves` follow, which have one depth;
        None: one of those before them is not remembered any more.
        """
        while len(leaves) > 1:
            leaves = {self._before(leaf) for leaf in leaves}
        found, chain = [], leaves.pop()
        while chain & _INDEX_DEPTH:
            found.append(chain)
            chain = self._before(chain)
        found.reverse()
        return found if chain or not found else None

    def _before(self, chain: int) -> int:
        """The block before one that is, or was, held; 0: neither."""
        return self.held.get(chain) or self.gone.get(chain, 0)


class Stored(NamedTuple):
    """Blocks that follow one another, behind `parent` (None: the first of a prompt).

    `tokens` are the ids of all of them, empty for a copy in another tier of memory. `extra`: by block, what
    else its contents depend on; None: nothing.
    """

    blocks: Sequence[int]
    parent: int | None
    tokens: bytes
    block_tokens: int
    lora: bytes = b""
    extra: Sequence[bytes] | None = None


class Removed(NamedTuple):
    """Blocks that are not held any more."""

    blocks: Sequence[int]


class Cleared(NamedTuple):
    """Nothing is held any more."""


Event = Stored | Removed | Cleared


def depth_of(chain: int) -> int:
    """How many blocks of a prompt a chain hash stands for."""
    return chain & _INDEX_DEPTH


def root(block_tokens: int, lora: bytes) -> int:
    """What the first block of a prompt follows. Its depth is 0."""
    return xxh3_64_intdigest(lora, block_tokens) & _HASH & ~_INDEX_DEPTH


def following(chain: int, tokens: bytes, extra: bytes = b"") -> int:
    """The chain hash of the block of these tokens behind `chain`."""
    seed = xxh3_64_intdigest(extra, chain) if extra else chain
    return (xxh3_64_intdigest(tokens, seed) << 16 & _HASH) | ((chain & _INDEX_DEPTH) + 1)


# Which block of tokens a block of a prompt's bytes ends in, learnt from prompts that engines stored. Pure.
#
# A request has hashes of blocks of 512 bytes, an engine has blocks of some tokens, and the gate has no
# tokenizer. When an answer tells how many tokens its prompt had, and the engine stored a run of just so many
# blocks meanwhile, that run is the prompt. Its tokens are taken as evenly spread over its bytes. Where two
# prompts begin alike and that would point into the part in which they differ, the last block that both have
# counts: so what is shared is exact to a block of bytes.


LESSONS_MAX = 1 << 18
"""So many blocks of bytes are known at most (26 MB); the ones not seen for longest go first."""
SIZES_MAX = 4
"""Engines of one gate have at most so many sizes of blocks."""

Taught = dict[int, int]
"""By hash of a block of bytes: the chain hash (kv_index.py) of the block of tokens that it ends in."""


class Lessons:
    """By tokens of an engine's block: what its blocks are for prompts. Common to all units."""

    __slots__ = ("_by_size", "count")

    def __init__(self) -> None:
        self._by_size: dict[int, Taught] = {}
        self.count = 0
        """How many prompts were learnt from."""

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
                return
            found.append(chain[shared - 1])
        # The last first: of one prompt the beginning is kept for longest.
        for block, one in zip(reversed(blocks[:count]), reversed(found), strict=True):
            taught.pop(block, None)
            taught[block] = one
        self.count += 1
        if len(taught) > LESSONS_MAX:
            for block in list(islice(taught, LESSONS_MAX // _INDEX_EVICT_SHARE)):
                del taught[block]
