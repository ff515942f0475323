"""The prefix cache under any order of calls, beside a list of what was used and when."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
