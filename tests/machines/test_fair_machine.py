"""The fair queue under any order of calls, beside the round robin of the textbook, visit by visit."""

from __future__ import annotations

from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cellgate.router.queue import Entered, Entry, FairQueue, FairRules, NoEntry

RULES = FairRules(limit=12, limit_bytes=1000, quantum_tokens=10, age_s=10.0, age_tokens=100)
TOKENS_S = 5.0

tenants = st.sampled_from(["red", "green", "blue"])
priorities = st.sampled_from([-1, 0, 0, 0, 3])
groups = st.sampled_from(["small", "large"])


class Textbook:
    """One class: visit the tenants one after the other, add a quantum, serve while it lasts."""

    def __init__(self) -> None:
        self.round: list[str] = []
        self.waiting: dict[str, list[Entry[int]]] = {}
        self.deficit: dict[str, int] = {}
        self.visiting = False

    def add(self, entry: Entry[int]) -> None:
        if entry.tenant not in self.waiting:
            self.round.append(entry.tenant)
            self.waiting[entry.tenant] = []
            self.deficit[entry.tenant] = 0
        self.waiting[entry.tenant].append(entry)
        self.waiting[entry.tenant].sort(key=lambda other: other.due)

    def remove(self, entry: Entry[int]) -> None:
        self.waiting[entry.tenant].remove(entry)
        if not self.waiting[entry.tenant]:
            self.visiting = self.visiting and self.round[0] != entry.tenant
            self.round.remove(entry.tenant)
            del self.waiting[entry.tenant], self.deficit[entry.tenant]

    def serve(self) -> Entry[int]:
        while True:
            tenant = self.round[0]
            if not self.visiting:
                self.visiting = True
                self.deficit[tenant] += RULES.quantum_tokens
            entry = self.waiting[tenant][0]
            if entry.tokens <= self.deficit[tenant]:
                self.deficit[tenant] -= entry.tokens
                self.remove(entry)
                return entry
            self.round.append(self.round.pop(0))
            self.visiting = False


class FairMachine(RuleBasedStateMachine):
    """`costs` are the textbook's classes; `served` what two tenants got since both have been waiting."""

    @initialize()
    def begin(self) -> None:
        self.queue: FairQueue[int] = FairQueue(RULES)
        self.books: dict[int, Textbook] = {}
        self.here: list[Entry[int]] = []
        self.now = 100.0
        self.count = 0
        self.blocked_before = False

    @rule(
        tenant=tenants,
        priority=priorities,
        tokens=st.integers(1, 60),
        size=st.integers(0, 200),
        group=groups,
        patience_s=st.just(inf) | st.floats(0.0, 60.0),
    )
    def add(self, tenant: str, priority: int, tokens: int, size: int, group: str, patience_s: float) -> None:
        self.count += 1
        answer = self.queue.add(
            self.count,
            self.now,
            tokens_s=TOKENS_S,
            tenant=tenant,
            priority=priority,
            tokens=tokens,
            size=size,
            deadline_at=self.now + patience_s,
            group=group,
        )
        if isinstance(answer, Entered):
            self._entered(answer)
        elif answer is NoEntry.FULL:
            assert len(self.here) == RULES.limit or sum(p.size for p in self.here) + size > RULES.limit_bytes
        else:
            before = [p for p in self.here if p.priority <= priority]
            assert sum(p.tokens for p in before) / TOKENS_S > patience_s

    def _entered(self, answer: Entered[int]) -> None:
        entry, displaced = answer
        if displaced is not None:
            # Nobody is pushed out by somebody less urgent, or who would then hold more than it.
            assert displaced.priority >= entry.priority
            mates = [p for p in self.here if p.priority == displaced.priority]
            if displaced.priority == entry.priority:
                assert displaced.tenant != entry.tenant
                held = [p for p in mates if p.tenant == displaced.tenant]
                own = [p for p in mates if p.tenant == entry.tenant]
                assert len(held) > len(own) + 1 or sum(p.size for p in held) > sum(p.size for p in own)
            assert displaced.due == max(p.due for p in mates if p.tenant == displaced.tenant)
            self._gone(displaced)
        self.here.append(entry)
        self.books.setdefault(entry.priority, Textbook()).add(entry)

    def _gone(self, entry: Entry[int]) -> None:
        self.here.remove(entry)
        book = self.books[entry.priority]
        book.remove(entry)
        if not book.round:
            del self.books[entry.priority]

    @precondition(lambda self: self.here)
    @rule()
    def serve(self) -> None:
        entry = self.queue.first()
        assert entry is not None
        assert self.queue.first() is entry
        self.queue.take(entry)
        self.here.remove(entry)
        book = self.books[min(self.books)]
        assert book.serve() is entry
        if not book.round:
            del self.books[entry.priority]

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.here))
        assert self.queue.remove(entry)
        assert not self.queue.remove(entry)
        self._gone(entry)

    @rule(blocked=st.sets(groups))
    def ask_for_those_that_have_room(self, blocked: set[str]) -> None:
        free = [entry for entry in self.here if entry.group not in blocked]
        entry = self.queue.first(blocked)
        assert (entry is None) == (not free)
        if entry is not None:
            assert entry in free
            assert entry.priority == min(other.priority for other in free)
            mates = [p for p in free if (p.priority, p.tenant) == (entry.priority, entry.tenant)]
            assert entry.due == min(other.due for other in mates)

    @rule(seconds=st.sampled_from([0.1, 2.0, 20.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        hopeless = self.queue.hopeless(self.now, TOKENS_S)
        assert hopeless == [p for p in self.here if self.now + p.tokens / TOKENS_S > p.deadline_at]

    @invariant()
    def it_holds_what_it_was_given_and_is_bounded(self) -> None:
        assert list(self.queue) == self.here
        assert len(self.queue) == len(self.here) <= RULES.limit
        assert self.queue.size == sum(entry.size for entry in self.here) <= RULES.limit_bytes
        assert self.queue.tokens == sum(entry.tokens for entry in self.here)
        assert self.queue.drain_s(TOKENS_S) == self.queue.tokens / TOKENS_S
        assert (self.queue.first() is None) == (not self.here)

    @invariant()
    def nobody_is_overtaken_by_who_came_much_later(self) -> None:
        first = self.queue.first()
        for entry in self.here:
            if first is not None and (entry.priority, entry.tenant) == (first.priority, first.tenant):
                assert first.entered_at <= entry.entered_at + RULES.age_s


TestFair = FairMachine.TestCase
TestFair.settings = settings(derandomize=True, deadline=None, max_examples=80, stateful_step_count=40)
