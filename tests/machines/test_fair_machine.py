"""The fair queue under any order of calls, beside the round robin of the textbook, visit by visit."""

from __future__ import annotations

from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cellgate.router.deficit_round_robin import Place
from cellgate.router.fair_queue import Entered, FairQueue, FairRules, NoPlace

RULES = FairRules(limit=12, limit_bytes=1000, quantum_tokens=10, age_s=10.0, age_tokens=100)
TOKENS_S = 5.0

tenants = st.sampled_from(["red", "green", "blue"])
priorities = st.sampled_from([-1, 0, 0, 0, 3])
groups = st.sampled_from(["small", "large"])


class Textbook:
    """One class: visit the tenants one after the other, add a quantum, serve while it lasts."""

    def __init__(self) -> None:
        self.round: list[str] = []
        self.waiting: dict[str, list[Place[int]]] = {}
        self.deficit: dict[str, int] = {}
        self.visiting = False

    def add(self, place: Place[int]) -> None:
        if place.tenant not in self.waiting:
            self.round.append(place.tenant)
            self.waiting[place.tenant] = []
            self.deficit[place.tenant] = 0
        self.waiting[place.tenant].append(place)
        self.waiting[place.tenant].sort(key=lambda other: other.due)

    def remove(self, place: Place[int]) -> None:
        self.waiting[place.tenant].remove(place)
        if not self.waiting[place.tenant]:
            self.visiting = self.visiting and self.round[0] != place.tenant
            self.round.remove(place.tenant)
            del self.waiting[place.tenant], self.deficit[place.tenant]

    def serve(self) -> Place[int]:
        while True:
            tenant = self.round[0]
            if not self.visiting:
                self.visiting = True
                self.deficit[tenant] += RULES.quantum_tokens
            place = self.waiting[tenant][0]
            if place.tokens <= self.deficit[tenant]:
                self.deficit[tenant] -= place.tokens
                self.remove(place)
                return place
            self.round.append(self.round.pop(0))
            self.visiting = False


class FairMachine(RuleBasedStateMachine):
    """`books` are the textbook's classes; `served` what two tenants got since both have been waiting."""

    @initialize()
    def begin(self) -> None:
        self.queue: FairQueue[int] = FairQueue(RULES)
        self.books: dict[int, Textbook] = {}
        self.here: list[Place[int]] = []
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
        elif answer is NoPlace.FULL:
            assert len(self.here) == RULES.limit or sum(p.size for p in self.here) + size > RULES.limit_bytes
        else:
            before = [p for p in self.here if p.priority <= priority]
            assert sum(p.tokens for p in before) / TOKENS_S > patience_s

    def _entered(self, answer: Entered[int]) -> None:
        place, displaced = answer
        if displaced is not None:
            # Nobody is pushed out by somebody less urgent, or who would then hold more than it.
            assert displaced.priority >= place.priority
            mates = [p for p in self.here if p.priority == displaced.priority]
            if displaced.priority == place.priority:
                assert displaced.tenant != place.tenant
                held = [p for p in mates if p.tenant == displaced.tenant]
                own = [p for p in mates if p.tenant == place.tenant]
                assert len(held) > len(own) + 1 or sum(p.size for p in held) > sum(p.size for p in own)
            assert displaced.due == max(p.due for p in mates if p.tenant == displaced.tenant)
            self._gone(displaced)
        self.here.append(place)
        self.books.setdefault(place.priority, Textbook()).add(place)

    def _gone(self, place: Place[int]) -> None:
        self.here.remove(place)
        book = self.books[place.priority]
        book.remove(place)
        if not book.round:
            del self.books[place.priority]

    @precondition(lambda self: self.here)
    @rule()
    def serve(self) -> None:
        place = self.queue.first()
        assert place is not None
        assert self.queue.first() is place
        self.queue.take(place)
        self.here.remove(place)
        book = self.books[min(self.books)]
        assert book.serve() is place
        if not book.round:
            del self.books[place.priority]

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.here))
        assert self.queue.remove(place)
        assert not self.queue.remove(place)
        self._gone(place)

    @rule(blocked=st.sets(groups))
    def ask_for_those_that_have_room(self, blocked: set[str]) -> None:
        free = [place for place in self.here if place.group not in blocked]
        place = self.queue.first(blocked)
        assert (place is None) == (not free)
        if place is not None:
            assert place in free
            assert place.priority == min(other.priority for other in free)
            mates = [p for p in free if (p.priority, p.tenant) == (place.priority, place.tenant)]
            assert place.due == min(other.due for other in mates)

    @rule(seconds=st.sampled_from([0.1, 2.0, 20.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        hopeless = self.queue.hopeless(self.now, TOKENS_S)
        assert hopeless == [p for p in self.here if self.now + p.tokens / TOKENS_S > p.deadline_at]

    @invariant()
    def it_holds_what_it_was_given_and_is_bounded(self) -> None:
        assert list(self.queue) == self.here
        assert len(self.queue) == len(self.here) <= RULES.limit
        assert self.queue.size == sum(place.size for place in self.here) <= RULES.limit_bytes
        assert self.queue.tokens == sum(place.tokens for place in self.here)
        assert self.queue.drain_s(TOKENS_S) == self.queue.tokens / TOKENS_S
        assert (self.queue.first() is None) == (not self.here)

    @invariant()
    def nobody_is_overtaken_by_who_came_much_later(self) -> None:
        first = self.queue.first()
        for place in self.here:
            if first is not None and (place.priority, place.tenant) == (first.priority, first.tenant):
                assert first.entered_at <= place.entered_at + RULES.age_s


TestFair = FairMachine.TestCase
TestFair.settings = settings(derandomize=True, deadline=None, max_examples=150, stateful_step_count=40)
