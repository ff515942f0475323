"""The assumed contents of a unit's prefix cache: an LRU of chained block hashes, one per unit. Pure.

Rules:
1. It is closed: a block is held only while all blocks before it are. So the longest known beginning of a
   prompt is found by halving, and no block is kept that nothing leads to.
2. It never holds more than `limit` blocks, at most 220 bytes each: a dict of ints below 2^60, whose table has
   at most six places for an entry (152), and the runs that they are in, one for four of them (60).
3. It is an estimate: recorded at dispatch, withdrawn when all attempts that used a block failed, weighted by
   `trust`, which follows the cached tokens that the engine reports. A restarted unit holds nothing.

In this order: `PrefixCache`, `SharedPrefixes`, `KnownPrefixes`, `RemotePrefixes`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, islice, zip_longest
from typing import NamedTuple

from cellgate.router.kv_index import Cleared, Event, KvIndex, Lessons, Taught

PREFIX_MAX_BLOCKS = 1 << 18
"""The most that is kept of one unit: 40 to 58 MB for 32 million tokens."""
DEFAULT_KV_TOKENS = 500_000
"""Assumed size of a KV cache that is not known."""

_TRUST_STEP = 0.05
_PREFIX_EVICT_SHARE = 32
"""One part in this many is evicted at a time, because finding the oldest walks over recently used ones."""
_RUN_BLOCKS, _RUNS = 4, 64
"""There is at most one run for so many blocks, and so many more."""


def blocks_for(kv_tokens: float, bytes_per_token: float, block_bytes: int) -> int:
    """How many blocks of prompt a KV cache of so many tokens holds: at least 1, at most PREFIX_MAX_BLOCKS."""
    return int(min(max(kv_tokens * bytes_per_token / block_bytes, 1.0), PREFIX_MAX_BLOCKS))


class _Run:
    """Blocks that follow one another and were used together. `above` is the run before them, `below` is how
    many runs go on from it.
    """

    __slots__ = ("above", "below", "blocks")

    def __init__(self, above: _Run | None, blocks: Sequence[int], below: int = 0) -> None:
        self.above, self.blocks, self.below = above, list(blocks), below


class PrefixCache:
    """The blocks that one unit is believed to hold, least recently used first.

    They are a tree of runs. So what a session has said before is one run or a few, and a turn that goes on
    from it costs what is new.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._most_runs = limit // _RUN_BLOCKS + _RUNS
        self.trust = 1.0
        """The share of the expected hits that the engine has found recently."""
        self._runs: dict[int, _Run] = {}
        """By block."""
        self._order: dict[_Run, None] = {}
        """In the order of use; a run comes after all that go on from it."""
        self._unproven: dict[int, int] = {}
        """How many attempts that have shown nothing yet use a block, where none has shown anything."""
        self._generation = 1

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def objects(self) -> int:
        """How many objects it consists of: each block is one, a run has three."""
        return len(self._runs) + 3 * len(self._order)

    def recent(self, most: int) -> list[int]:
        """The blocks that were used last, the last one first."""
        return list(islice(chain.from_iterable(run.blocks for run in reversed(self._order)), most))

    def match(self, blocks: Sequence[int]) -> int:
        """How many blocks at the beginning of a prompt are held."""
        held = self._runs
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

    def branches(self, block: int) -> int:
        """In how many ways the prompts that are held go on behind a block."""
        run = self._runs.get(block)
        if run is None:
            return 0
        return run.below if run.blocks[-1] == block else 1

    def lacks(self, _block: int) -> bool:
        """Whether a block is known not to be held: belief never knows that."""
        return False

    def is_awaited(self, block: int) -> bool:
        """Whether it is held only for attempts that have shown nothing yet."""
        return block in self._unproven and block in self._runs

    def proven(self, blocks: Sequence[int], held: int) -> int:
        """How many of the `held` blocks at the beginning of a prompt are not only awaited."""
        if not held or not self.is_awaited(blocks[held - 1]):
            return held
        low, high = 0, held - 1
        while low < high:
            middle = (low + high) // 2
            if self.is_awaited(blocks[middle]):
                high = middle
            else:
                low = middle + 1
        return low

    def record(self, blocks: Sequence[int]) -> int:
        """Record that a prompt, of a block at least, is sent to this unit; `prove` or `forget` must be called
        once with the result.
        """
        order, last = self._order, blocks[-1]
        run = self._runs.get(last)
        is_new = run is None or run.blocks[-1] != last
        if is_new:
            blocks = blocks[: self.limit]
            run, last = self._extend(blocks), blocks[-1]
        if last in self._unproven:
            self._use_unproven(blocks)
        while run is not None:
            # Those before it are then used more recently, and are evicted later.
            del order[run]
            order[run] = None
            run = run.above
        if is_new and (len(self._runs) > self.limit or len(order) > self._most_runs):
            self._evict()
        return self._generation

    def prove(self, blocks: Sequence[int], generation: int) -> None:
        """The attempt of a record has committed: its prompt was computed here."""
        held, unproven = self._runs, self._unproven
        for block in reversed(blocks) if generation == self._generation else ():
            if not unproven.pop(block, 0) and block in held:
                # Another has proven it, and with it all before it.
                return

    def forget(self, blocks: Sequence[int], generation: int) -> None:
        """The attempt of a record failed: blocks that no other attempt has used are dropped."""
        held, unproven = self._runs, self._unproven
        for block in reversed(blocks) if generation == self._generation else ():
            users = unproven.get(block, 0)
            if users > 1:
                unproven[block] = users - 1
            elif users:
                del unproven[block]
                if block in held:
                    self._drop(held[block], 1)
            elif block in held:
                return

    def correct(self, expected: float, found: float) -> None:
        """Take over how many cached tokens an engine found where so many were expected (raw, not trusted)."""
        if expected > 0.0:
            self.trust += _TRUST_STEP * (min(max(found / expected, 0.0), 1.0) - self.trust)

    def resize(self, limit: int) -> None:
        """Hold at most so many blocks from now on."""
        self.limit, self._most_runs = limit, limit // _RUN_BLOCKS + _RUNS
        self._evict()
        # A table that has grown does not shrink by itself.
        self._runs, self._order = dict(self._runs.items()), dict(self._order.items())
        self._unproven = dict(self._unproven.items())

    def purge(self) -> None:
        """The unit has restarted: its cache is empty."""
        self._runs, self._order, self._unproven = {}, {}, {}
        self._generation += 1
        self.trust = 1.0

    def _use_unproven(self, blocks: Sequence[int]) -> None:
        """One more attempt uses those at the end of a prompt that nobody has proven."""
        unproven = self._unproven
        for block in reversed(blocks):
            if block not in unproven:
                break
            unproven[block] += 1

    def _ending(self, block: int) -> _Run:
        """The run that ends with this block, which is held; what follows it becomes another one."""
        run = self._runs[block]
        if run.blocks[-1] == block:
            return run
        end = run.blocks.index(block) + 1
        first = _Run(run.above, run.blocks[:end], 1)
        run.blocks, run.above = run.blocks[end:], first
        self._runs.update(dict.fromkeys(first.blocks, first))
        # It is used just now.
        self._order[first] = None
        return first

    def _extend(self, blocks: Sequence[int]) -> _Run:
        """The run that a prompt ends with: a new one, of the blocks that are not held, if there are any."""
        held = PrefixCache.match(self, blocks)
        above = self._ending(blocks[held - 1]) if held else None
        if above is not None:
            if held == len(blocks):
                return above
            above = self._joined(above)
            above.below += 1
        run = _Run(above, blocks[held:])
        self._runs.update(dict.fromkeys(run.blocks, run))
        self._order[run] = None
        for block in run.blocks:
            # Attempts from before it was evicted count as well.
            self._unproven.setdefault(block, 0)
        return run

    def _joined(self, run: _Run) -> _Run:
        """One run of this one, on which a prompt goes on, and the one before it: they are used together."""
        above = run.above
        if run.below or above is None or above.below > 1:
            return run
        self._runs.update(dict.fromkeys(run.blocks, above))
        above.blocks += run.blocks
        above.below = 0
        del self._order[run]
        return above

    def _evict(self) -> None:
        """Drop what was not used for longest."""
        limit, runs = self.limit, self._most_runs
        spare, spare_runs = len(self._runs) - limit, len(self._order) - runs
        spare += limit // _PREFIX_EVICT_SHARE if spare > 0 else 0
        spare_runs += runs // _PREFIX_EVICT_SHARE if spare_runs > 0 else 0
        oldest = []
        for run in self._order:
            if spare <= 0 and spare_runs <= 0:
                break
            size = len(run.blocks)
            oldest.append((run, min(spare, size) if spare_runs <= 0 else size))
            spare, spare_runs = spare - size, spare_runs - 1
        for run, size in oldest:
            self._drop(run, size)

    def _drop(self, run: _Run, size: int) -> None:
        """Drop so many blocks from the end of a run that no other follows."""
        for block in run.blocks[-size:]:
            del self._runs[block]
        del run.blocks[-size:]
        if not run.blocks:
            del self._order[run]
            if run.above is not None:
                run.above.below -= 1


# How often prompts share a prefix: the cost of computing a prefix once more is divided by it. Pure.
#
# A shared system prompt is computed once on a unit and reused there by all later requests. Charging it to
# each of them would keep all requests where it is cached, and the other units idle.


HALF_LIFE_S = 60.0
"""What was shared so long ago counts half. Engines keep what is used for longer than that."""
PREFIX_STEP_S = 0.5
"""What fades in a minute need not be faded more often."""
BEGINNINGS_MAX = 65_536
"""So many beginnings are counted at most (10 MB); the one not seen for longest goes first."""


class Reuses:
    """How many prompts that share one beginning, and no more, came recently (`count`, as of `at`)."""

    def __init__(self, at: float) -> None:
        self.at = at
        self.count = 0.0


class SharedPrefixes:
    """By the last block that a prompt had in common with one before it: how many had, recently."""

    def __init__(self) -> None:
        self._beginnings: dict[int, Reuses] = {}

    def __len__(self) -> int:
        return len(self._beginnings)

    @property
    def objects(self) -> int:
        """How many objects it consists of: a block, and what is known of it with two numbers."""
        return 4 * len(self._beginnings)

    def of(self, block: int, now: float) -> Reuses:
        """How often the beginning up to `block` came recently. Who sends one more counts it there."""
        known = self._beginnings.get(block)
        if known is None:
            known = self._beginnings[block] = Reuses(now)
            if len(self._beginnings) > BEGINNINGS_MAX:
                del self._beginnings[next(iter(self._beginnings))]
        elif now - known.at > PREFIX_STEP_S:
            known.count *= 0.5 ** ((now - known.at) / HALF_LIFE_S)
            known.at = now
            # The one not seen for longest comes first.
            self._beginnings[block] = self._beginnings.pop(block)
        return known


# What the prefix cache of a unit that publishes KV events holds: known by its events, else believed. Pure.
#
# Rules:
# 1. Events decide about blocks of which they tell: a block that was stored is held, one that was removed is
# not. About all others, and about prompts that the unit is computing now, belief (prefix.py) decides.
# 2. Events count only while they prove true: the prompts that this gate sends must appear in them. Those of
# another unit or of another model do not, and change nothing.
# 3. A rank whose events are interrupted has no say. A unit has a prompt if one of its ranks has it.


PROVEN_SHARE = 0.5
"""The share of prompts that must have appeared in recent events."""
PREFIX_LATE_S = 0.25
"""Events of a prompt come at most so much later than its first token."""
KNOWN_PENDING_MAX = 64
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
    its prompts that have appeared in its recent events.
    """

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
        self._pending: deque[Computed] = deque(maxlen=KNOWN_PENDING_MAX)

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
        return bool(self._live) and self.proven >= PROVEN_SHARE

    def _lacks(self, block: int) -> bool:
        return all(taught.get(block) in index.gone for index, taught in self._live)

    # -- from events ---------------------------------------------------------------------------------------

    def rank(self, rank: int, limit: int) -> KvIndex:
        """The index of a rank, made when it is first asked for; it holds at most `limit` blocks."""
        index = self._indexes.setdefault(rank, KvIndex(limit))
        index.limit = limit
        return index

    def apply(self, rank: int, event: Event, now: float) -> None:
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
            if not pending or now < pending[0].until + PREFIX_LATE_S:
                return
            self._learn(pending.popleft())

    def _learn(self, computed: Computed) -> None:
        must = False
        for index, _ in self._live:
            size = index.block_tokens
            full = computed.tokens // size
            chain = index.prompt(full, computed.since, computed.until + PREFIX_LATE_S) if full else None
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


# Prefixes that other gates have proven at units, and what this gate has to tell them of its own. Pure.
#
# The hash of a block covers everything before it. So a few hashes represent a whole prompt: the position of a
# known hash in another prompt is the length of the common prefix.
#
# Like `PrefixCache` it is an estimate that only makes a unit cheaper. It is limited in number and time; a
# restarted unit is forgotten. A gate that has ended is not, because the prompts that it has seen computed are
# still cached.


EXPIRES_S = 600.0
"""What was reported is believed for at most so long, and for half of it at least unless there is too much of
it."""
HASHES_MAX = 1 << 16
"""So many hashes are kept at most (10 MB)."""
REPORT_AGAIN_S = 120.0
"""What is proven again is reported again after so long, or up to twice that: others still know it."""
REMOTE_PENDING_MAX = 256
"""So many proven prompts wait to be reported; the newest ones count."""

Proven = tuple[str, Sequence[int], int]
"""A unit, the blocks of a prompt, and how many of them an earlier one had."""

_NOWHERE: Mapping[str, int] = {}
_SIZE_STEPS = tuple(sorted({size for power in range(13) for size in (1 << power, 3 << power >> 1)}))
"""1, 2, 3, 4, 6, 8, 12, ...: who shares a beginning for the first time knows two thirds of it or more."""


class RemotePrefixes:
    """By block hash: the units where another gate has proven a prompt that has it.

    In two generations, of which the older one is dropped as a whole. What a unit has lost by a restart stays
    there under a number that stands for no unit any more. So nothing here walks over all that is known.
    """

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

    def take(self, unit: str, blocks: Iterable[int], now: float, *, is_old: bool = False) -> None:
        """Another gate tells that `unit` holds all that these blocks stand for. What `is_old` goes first."""
        self.expire(now)
        self._asked = None
        bit, known = self._bit(unit), self._older if is_old else self._recent
        if is_old and len(known) >= HASHES_MAX // 2:
            return
        for block in blocks:
            known[block] = known.get(block, 0) | bit

    def recent(self) -> Iterator[tuple[str, int]]:
        """What was told of late, the newest first: units, and blocks that they hold."""
        for block, units in list(reversed(self._recent.items())):
            while units:
                if name := self._names[(units & -units).bit_length() - 1]:
                    yield name, block
                units &= units - 1

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
        """The unit has restarted, or is no more: it holds nothing."""
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

    def __init__(self) -> None:
        self._pending: deque[Proven] = deque(maxlen=REMOTE_PENDING_MAX)
        self._reported: dict[str, dict[int, None]] = {}
        self._reported_before: dict[str, dict[int, None]] = {}
        """By unit: what was reported in this generation, and in the one before; the newest last."""
        self._count = 0
        self._turned_at = 0.0

    def record(self, unit: str, blocks: Sequence[int], shared: int) -> None:
        """A prompt was computed at `unit`; its first `shared` blocks were of an earlier one, wherever."""
        self._pending.append((unit, blocks, shared))

    def forget(self, unit: str) -> None:
        """The unit has restarted, or is no more: what it held is unreported, and may be reported again."""
        self._pending = deque((row for row in self._pending if row[0] != unit), maxlen=REMOTE_PENDING_MAX)
        self._reported.pop(unit, None)
        self._reported_before.pop(unit, None)

    def take(self, most: int, now: float) -> dict[str, list[int]]:
        """By unit: at most `most` hashes not reported recently. The newest prompts come first: where
        they branched off from others and where they end; then steps on the way, for who branches off there.
        """
        if now - self._turned_at >= REPORT_AGAIN_S or self._count >= HASHES_MAX // 2:
            self._reported_before, self._reported, self._count, self._turned_at = self._reported, {}, 0, now
        news: dict[str, list[int]] = {}
        rows = list(reversed(self._pending))
        self._pending.clear()
        for unit, block in chain(_ends(rows), _steps(rows)):
            reported = self._reported.setdefault(unit, {})
            if block in reported or block in self._reported_before.get(unit, ()):
                continue
            reported[block] = None
            news.setdefault(unit, []).append(block)
            most -= 1
            self._count += 1
            if most <= 0:
                break
        return news

    def reported(self) -> Iterator[tuple[str, int]]:
        """What was reported of late, of all units in turn the newest first."""
        for generation in (self._reported, self._reported_before):
            units = list(generation)
            for row in zip_longest(*[list(reversed(generation[unit])) for unit in units]):
                yield from (
                    (unit, block) for unit, block in zip(units, row, strict=True) if block is not None
                )


def _ends(rows: Iterable[Proven]) -> Iterator[tuple[str, int]]:
    for unit, blocks, shared in rows:
        if shared:
            yield unit, blocks[shared - 1]
        yield unit, blocks[-1]


def _steps(rows: Iterable[Proven]) -> Iterator[tuple[str, int]]:
    for unit, blocks, _ in rows:
        for size in _SIZE_STEPS:
            if size >= len(blocks):
                break
            yield unit, blocks[size - 1]
