"""The prefix cache under any order of calls, beside a list of what was used and when; and the index of KV
events under any order of events, beside a plain count of what was stored and removed.
"""

from __future__ import annotations

from array import array
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from xxhash import xxh3_64_intdigest

from cellgate.router.kv_index import Cleared, KvIndex, Removed, Stored, following, root
from cellgate.router.prefix import PrefixCache

# A prompt is a path of words; its blocks are numbers that stand for all that was said so far.
prompts = st.lists(st.integers(1, 2), min_size=1, max_size=9).map(lambda words: blocks_of(words))
limits = st.integers(1, 40)


def blocks_of(words: list[int]) -> tuple[int, ...]:
    chain, block = [], 0
    for word in words:
        block = block * 3 + word
        chain.append(block)
    return tuple(chain)


class PrefixMachine(RuleBasedStateMachine):
    """`used` holds every block that is held, the one used last at the end; `open` the prompts whose
    attempts have shown nothing yet, `proven` all blocks of those that have.
    """

    @initialize(limit=limits)
    def begin(self, limit: int) -> None:
        self.cache = PrefixCache(limit)
        self.used: list[int] = []
        self.open: list[tuple[tuple[int, ...], int]] = []
        self.proven: set[int] = set()

    @rule(prompt=prompts)
    def record(self, prompt: tuple[int, ...]) -> None:
        generation = self.cache.record(prompt)
        kept = prompt[: self.cache.limit]
        assert self.cache.match(prompt) == len(kept)
        self.let_the_oldest_go([block for block in self.used if block not in kept] + list(reversed(kept)))
        self.open.append((prompt, generation))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def prove(self, data: st.DataObject) -> None:
        prompt, generation = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.cache.prove(prompt, generation)
        self.proven |= set(prompt)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        prompt, generation = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.cache.forget(prompt, generation)
        gone = set(self.used) - set(self.held())
        wanted = {block for other, _ in self.open for block in other}
        # What others use, or have used and shown, stays; what nobody else has used goes.
        assert not gone & wanted
        assert gone <= set(prompt)
        assert not (set(prompt) & set(self.held())) - wanted - self.proven
        self.used = [block for block in self.used if block not in gone]

    @rule(limit=limits)
    def resize(self, limit: int) -> None:
        self.cache.resize(limit)
        self.let_the_oldest_go(self.used)

    @rule()
    def purge(self) -> None:
        self.cache.purge()
        self.used, self.proven = [], set()
        for prompt, generation in self.open:
            # They may still end, and then nothing happens.
            self.cache.forget(prompt, generation)
        self.open = []

    @rule(prompt=prompts)
    def match(self, prompt: tuple[int, ...]) -> None:
        held = set(self.held())
        first_missing = next((n for n, block in enumerate(prompt) if block not in held), len(prompt))
        assert self.cache.match(prompt) == first_missing

    def held(self) -> list[int]:
        return list(reversed(self.cache.recent(1000)))

    def let_the_oldest_go(self, used: list[int]) -> None:
        """Only when there is no room, and then one part in 32 more than is needed."""
        held = self.held()
        assert held == used[len(used) - len(held) :]
        limit = self.cache.limit
        assert len(held) == len(used) if len(used) <= limit else limit - limit // 32 <= len(held)
        self.used = held

    @invariant()
    def it_holds_what_was_used_last_and_no_more(self) -> None:
        assert self.held() == self.used
        assert len(self.cache) <= self.cache.limit

    @invariant()
    def nothing_is_held_without_what_comes_before_it(self) -> None:
        held = set(self.held())
        assert all(block < 3 or block // 3 in held for block in held)


TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = settings(derandomize=True, deadline=None, max_examples=50, stateful_step_count=30)


# The index of KV events.

BLOCK_TOKENS = 2
words = st.lists(st.integers(1, 3), min_size=1, max_size=4)
stored_prompts = st.tuples(words, st.sampled_from([b"", b"adapter"]), st.sampled_from([b"", b"salt"]))


def path_of(prompt: tuple[list[int], bytes, bytes]) -> list[tuple[bytes, bytes, tuple[int, ...]]]:
    """What each block of a prompt stands for; the engine's name for it is its hash."""
    tokens, lora, salt = prompt
    return [(lora, salt, tuple(tokens[:end])) for end in range(1, len(tokens) + 1)]


def name_of(block: object) -> int:
    return xxh3_64_intdigest(repr(block).encode()) >> 4


def chain_of(block: tuple[bytes, bytes, tuple[int, ...]]) -> int:
    lora, salt, tokens = block
    chain = root(BLOCK_TOKENS, lora)
    for number, token in enumerate(tokens):
        chain = following(chain, array("I", [token] * BLOCK_TOKENS).tobytes(), b"" if number else salt)
    return chain


class KvIndexMachine(RuleBasedStateMachine):
    """`stored` counts how often each block was stored and not removed; `seen` is all that ever was."""

    @initialize()
    def begin(self) -> None:
        self.index = KvIndex(limit=1000)
        self.stored: Counter[tuple[bytes, bytes, tuple[int, ...]]] = Counter()
        self.seen: set[tuple[bytes, bytes, tuple[int, ...]]] = set()
        self.now = 0.0

    @rule(prompt=stored_prompts, start=st.integers(0, 3))
    def store(self, prompt: tuple[list[int], bytes, bytes], start: int) -> None:
        """A run of blocks behind one that may be there or not."""
        whole = path_of(prompt)
        start = min(start, len(whole) - 1)
        path, parent = whole[start:], whole[start - 1] if start else None
        tokens, lora, salt = prompt
        data = array("I", [token for token in tokens[start:] for _ in range(BLOCK_TOKENS)]).tobytes()
        extra = [salt if not start and not number else b"" for number in range(len(path))]
        self.now += 1.0
        event = Stored(
            [name_of(block) for block in path],
            None if parent is None else name_of(parent),
            data,
            BLOCK_TOKENS,
            lora,
            extra,
        )
        self.index.apply(event, self.now)
        if path and (parent is None or self.stored[parent]):
            self.stored.update(path)
            self.seen.update(path)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """One that is there, or was, or never was."""
        block = data.draw(st.sampled_from([*sorted(self.seen), (b"", b"", (9,))]))
        self.index.apply(Removed([name_of(block)]), self.now)
        if self.stored[block]:
            self.stored[block] -= 1

    @rule()
    def clear(self) -> None:
        self.index.apply(Cleared(), self.now)
        self.stored.clear()
        self.seen.clear()

    @invariant()
    def holds_what_was_stored_more_often_than_removed(self) -> None:
        there = {chain_of(block) for block in self.stored if self.stored[block]}
        assert set(self.index.held) == there
        assert len(self.index) == len(there)
        assert set(self.index.gone) == {chain_of(block) for block in self.seen} - there


TestKvIndex = KvIndexMachine.TestCase
TestKvIndex.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
