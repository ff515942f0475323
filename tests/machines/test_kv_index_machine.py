"""The index of KV events under any order of events, beside a plain count of what was stored and removed."""

from __future__ import annotations

from array import array
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from xxhash import xxh3_64_intdigest

from cellgate.router.kv_index import Cleared, KvIndex, Removed, Stored, following, root

BLOCK_TOKENS = 2
words = st.lists(st.integers(1, 3), min_size=1, max_size=4)
prompts = st.tuples(words, st.sampled_from([b"", b"adapter"]), st.sampled_from([b"", b"salt"]))


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

    @rule(prompt=prompts, start=st.integers(0, 3))
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
