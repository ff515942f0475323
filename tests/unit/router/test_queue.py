"""Who waits, who is served next, and who need not wait at all."""

from __future__ import annotations

from collections import Counter
from functools import partial
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.router.cost_model import SURE
from cellgate.router.nouns import Ask, Evidence, Refusal, Rules, Sign, Strength, Unit
from cellgate.router.queue import MOVED_S, Entered, Entry, FairQueue, FairRules, NoEntry, Ticket
from cellgate.router.unit_state import Lease
from tests.unit.router.fleets import board_up, picked, router_over

NOW = 100.0
ASK = Ask("m")
NOTHING_TRIED: frozenset[str] = frozenset()
RULES = FairRules(limit=8, max_wait_s=30.0)


class Scene:
    """A router over the units `a` and `b`, both UP, two places each; `settled` is who was told what."""

    def __init__(self, rules: FairRules = RULES, policy: str = "prefix_affinity") -> None:
        units = (Unit(name, "c", f"http://{name}", ("m",), max_in_flight=2) for name in "ab")
        self.board = board_up(*units, rules=Rules(evict_overcommit=0.5, slow_start_s=0.001), at=NOW)
        self.router = router_over(self.board, policy, rules)
        self.settled: list[tuple[str, Lease | Refusal]] = []
        for state in self.board:
            state.costs.rates.followed = SURE
        self.board.tick(NOW + 0.1)

    def wait(
        self, who: str, ask: Ask = ASK, tried: frozenset[str] = NOTHING_TRIED, *, moved: bool = False
    ) -> Ticket | Lease | Refusal:
        return self.router.wait(
            ask, NOW, tried, lambda answer: self.settled.append((who, answer)), size=100, moved=moved
        )

    def fill(self, *names: str, places: int = 2) -> list[Lease]:
        return [self.board.open(name, Ask("m"), NOW, retry=False) for name in names for _ in range(places)]

    @property
    def told(self) -> list[tuple[str, str]]:
        """Who got which unit, or which refusal."""
        return [(who, a.unit if isinstance(a, Lease) else a.value) for who, a in self.settled]


def test_those_who_lost_their_unit_come_first_in_their_order_and_go_above_max_in_flight() -> None:
    scene = Scene()
    leases = scene.fill("a", "b")
    scene.wait("new")
    for who in "wxyz":
        scene.wait(who, moved=True)
    for lease in (None, leases[0], leases[2]):
        if lease is not None:
            scene.board.close(lease, NOW + 1)
        scene.router.serve_waiting(NOW + 1)
    assert [who for who, _ in scene.told] == ["w", "x", "y", "z"]
    assert sorted(unit for _, unit in scene.told) == ["a", "a", "b", "b"]
    assert len(scene.router.queue) == 1


def test_nobody_is_given_a_unit_that_failed_it_before_nor_holds_up_those_behind() -> None:
    scene = Scene()
    leases = scene.fill("b", places=3)
    scene.wait("x", tried=frozenset({"a"}), moved=True)
    scene.wait("y", moved=True)
    scene.router.serve_waiting(NOW + 1)
    assert scene.told == [("y", "a")]
    scene.board.close(leases[0], NOW + 1)
    scene.router.serve_waiting(NOW + 1)
    assert scene.told[1:] == [("x", "b")]


def test_an_ask_waits_until_there_is_a_place_and_nobody_overtakes_it() -> None:
    scene = Scene()
    leases = scene.fill("a", "b")
    assert scene.router.pick(Ask("m"), NOW) is Refusal.FULL
    scene.wait("x")
    scene.router.serve_waiting(NOW)
    assert scene.told == []
    scene.board.close(leases[0], NOW + 1)
    assert scene.router.pick(Ask("m"), NOW + 1) is Refusal.FULL
    scene.router.serve_waiting(NOW + 1)
    assert scene.told == [("x", "a")]


def test_a_unit_with_a_long_backlog_of_prompts_gets_no_more() -> None:
    scene = Scene()
    tokens_s = scene.board.units["a"].costs.rates.prefill_tokens_s.value
    large = Ask("m", stream=True, prompt_bytes=int(4 * 3 * tokens_s))
    first, second = (picked(scene.router, large, NOW + 1) for _ in range(2))
    assert {first.unit, second.unit} == {"a", "b"}
    assert scene.router.pick(large, NOW + 1) is Refusal.FULL
    scene.wait("x", large)
    scene.router.serve_waiting(NOW + 2)
    assert scene.told == []
    first.commit(NOW + 3)
    scene.router.serve_waiting(NOW + 3)
    assert scene.told == [("x", first.unit)]


def held_by_one(blocks: int) -> tuple[Scene, Ask, Lease]:
    """A prompt that one of two units has computed."""
    scene = Scene()
    ask = Ask("m", stream=True, prompt_bytes=512 * blocks, blocks=tuple(range(1, blocks + 1)))
    lease = picked(scene.router, ask, NOW + 1)
    lease.commit(NOW + 2)
    return scene, ask, lease


def test_an_ask_waits_for_the_unit_that_has_its_prompt_rather_than_compute_it_again() -> None:
    scene, long, first = held_by_one(799)
    scene.board.close(first, NOW + 2)
    ahead = Ask("m", stream=True, prompt_bytes=24_000)
    other = scene.board.open(first.unit, ahead, NOW + 2, retry=False)
    assert scene.router.pick(long, NOW + 2) is Refusal.FULL, "the other is idle, but has to compute it all"
    scene.wait("x", long)
    scene.router.serve_waiting(NOW + 2)
    assert scene.told == []
    other.commit(NOW + 3)
    scene.router.serve_waiting(NOW + 3)
    assert scene.told == [("x", first.unit)]


def test_nobody_waits_for_a_place_while_another_unit_has_one() -> None:
    scene, long, first = held_by_one(199)
    scene.fill(first.unit, places=1)
    assert picked(scene.router, long, NOW + 2).unit != first.unit


def test_other_policies_never_wait_while_a_unit_has_room() -> None:
    scene = Scene(policy="round_robin")
    scene.fill("a")
    assert [picked(scene.router, Ask("m"), NOW).unit for _ in range(2)] == ["b", "b"]
    assert scene.router.pick(Ask("m"), NOW) is Refusal.FULL


def test_lower_priority_numbers_go_first_and_tenants_take_turns() -> None:
    scene = Scene()
    leases = scene.fill("a", "b")
    scene.wait("batch", Ask("m", priority=5))
    for number in range(4):
        scene.wait(f"flood {number}", Ask("m", tenant="flood", prompt_tokens=1000))
    scene.wait("other", Ask("m", tenant="other", prompt_tokens=1000))
    scene.wait("urgent", Ask("m", priority=-1))
    for lease in leases:
        scene.board.close(lease, NOW + 1)
    scene.router.serve_waiting(NOW + 1)
    assert [who for who, _ in scene.told] == ["urgent", "flood 0", "other", "flood 1"]


def test_waiting_ends_with_a_refusal_when_its_time_is_up() -> None:
    scene = Scene(FairRules(max_wait_s=20.0))
    scene.fill("a", "b", places=3)
    scene.wait("x")
    scene.wait("hasty", Ask("m", deadline_at=NOW + 5.0))
    scene.wait("moved", moved=True)
    told = []
    for later_s in (4.9, 5.1, 19.9, 20.1, MOVED_S - 0.1, MOVED_S):
        scene.router.tick(NOW + later_s)
        told.append(len(scene.told))
    assert told == [0, 1, 1, 2, 2, 3]
    assert scene.told == [("hasty", "late"), ("x", "late"), ("moved", "full")]
    assert len(scene.router.queue) == 0


@pytest.mark.parametrize("moved", [False, True])
def test_each_is_told_once_though_telling_one_makes_another_leave(moved: bool) -> None:
    scene, told, tickets = Scene(), list[str](), list[Ticket]()
    leases = scene.fill("a", "b", places=3)

    def settle(who: str, _answer: Lease | Refusal) -> None:
        told.append(who)
        # What follows from the first answer: a client leaves, or a new ask displaces one that waits.
        if who == "x":
            scene.router.queue.remove(tickets[1])

    for who in "xyz":
        ticket = scene.router.wait(Ask("m"), NOW, NOTHING_TRIED, partial(settle, who), moved=moved)
        assert isinstance(ticket, Ticket)
        tickets.append(ticket)
    scene.router.tick(NOW + 31.0)
    assert told == ["x", "z"]
    assert len(scene.router.queue) == 0
    assert scene.board.in_flight == len(leases)


def test_an_ask_is_refused_at_once_where_it_cannot_make_its_deadline_or_nobody_may_wait() -> None:
    scene = Scene(FairRules(limit=0))
    scene.fill("a", "b")
    assert scene.wait("x") is Refusal.FULL
    scene = Scene()
    scene.fill("a", "b")
    tokens_s = scene.board.tokens_s()
    scene.wait("x", Ask("m", prompt_tokens=int(10 * tokens_s)))
    assert scene.wait("late", Ask("m", tenant="t", priority=1, deadline_at=NOW + 5.0)) is Refusal.LATE


def test_even_an_idle_unit_gets_nothing_that_it_is_known_to_answer_too_late() -> None:
    scene = Scene()
    hasty = Ask("m", prompt_bytes=4 * 100_000, deadline_at=NOW + 1.0)
    for state in scene.board:
        state.costs.rates.followed = 0
    # Nobody has seen how fast the units are.
    scene.board.close(picked(scene.router, hasty, NOW), NOW)
    for rates in [state.costs.rates for state in scene.board] * SURE:
        rates.prefilled(4096, 1.0)
    scene.board.tick(NOW)
    assert scene.router.pick(hasty, NOW) is Refusal.LATE
    picked(scene.router, hasty._replace(deadline_at=NOW + 1000.0), NOW)


def test_neither_a_model_that_is_gone_nor_units_that_are_gone_are_waited_for() -> None:
    scene = Scene()
    scene.fill("a", "b")
    scene.wait("x", Ask("gone"))
    scene.wait("y", Ask("gone"), moved=True)
    scene.wait("z")
    scene.router.serve_waiting(NOW)
    assert sorted(scene.told) == [("x", "unknown_model"), ("y", "unknown_model")]
    for name in "ab":
        scene.board.observe(Evidence(name, Sign.BAD, Strength.FATAL, "agent", "gone", NOW))
    scene.router.serve_waiting(NOW)
    assert scene.told[2:] == [("z", "no_unit")]


@pytest.mark.parametrize("moved", [True, False])
def test_the_queue_is_bounded(moved: bool) -> None:
    scene = Scene(FairRules(limit=2))
    scene.fill("a", "b", places=3)
    first = scene.wait("x", moved=moved)
    assert isinstance(first, Ticket)
    assert isinstance(scene.wait("y", moved=moved), Ticket)
    assert scene.wait("z", moved=moved) is Refusal.FULL
    scene.router.queue.remove(first)
    assert isinstance(scene.wait("z", moved=moved), Ticket)


@pytest.mark.parametrize("moved", [True, False])
def test_a_ticket_that_was_taken_out_is_never_called(moved: bool) -> None:
    scene = Scene()
    ticket = scene.wait("x", moved=moved)
    assert isinstance(ticket, Ticket)
    scene.router.queue.remove(ticket)
    scene.router.queue.remove(ticket)
    scene.router.tick(NOW + 60.0)
    assert scene.told == []
    assert len(scene.router.queue) == 0


@pytest.mark.parametrize("moved", [True, False])
def test_those_who_are_served_may_queue_again_at_once(moved: bool) -> None:
    scene, answers = Scene(), list[Lease | Refusal]()

    def again(answer: Lease | Refusal) -> None:
        answers.append(answer)
        if len(answers) == 1:
            scene.router.wait(Ask("m"), NOW, NOTHING_TRIED, again, moved=moved)

    scene.router.wait(Ask("m"), NOW, NOTHING_TRIED, again, moved=moved)
    for _ in range(2):
        scene.router.serve_waiting(NOW)
    assert len(answers) == 2


def test_an_engine_that_turns_a_request_away_gets_no_more_than_it_has_for_some_time() -> None:
    scene = Scene()
    state = scene.board.units["a"]
    first, second = scene.fill("a")
    scene.board.close(second, NOW)
    state.lower_limit(NOW)
    assert not state.has_room(NOW, 0.0)
    for _ in range(8):
        state.raise_limit()
    assert state.has_room(NOW, 0.0)
    scene.board.close(first, NOW)
    state.lower_limit(NOW)
    assert [state.has_room(NOW + later_s, 0.0) for later_s in (0.9, 1.0)] == [False, True]


# Who waits, who is served next, and who need not wait at all.

TOKENS_S = 1000.0


class Line:
    """A queue whose items are names."""

    def __init__(self, **rules: Any) -> None:
        self.queue: FairQueue[str] = FairQueue(FairRules(**rules))

    def add(self, name: str, now: float = NOW, **of: Any) -> Entry[str] | NoEntry:
        answer = self.queue.add(name, now, tokens_s=TOKENS_S, **of)
        return answer.entry if isinstance(answer, Entered) else answer

    def serve(self, blocked: tuple[str, ...] = ()) -> str | None:
        if (entry := self.queue.first(blocked)) is not None:
            self.queue.take(entry)
        return None if entry is None else entry.item

    def rest(self) -> list[str]:
        return [name for name in iter(self.serve, None) if name is not None]


ASKED = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(-9, 9)), max_size=30)


def served(asked: list[tuple[str, str, int]], *, tenants: bool = False) -> list[tuple[str, int, int]]:
    """Who is served, in which order: the payer's name, the priority, and when it came."""
    line = Line()
    for number, (who, tenant, priority) in enumerate(asked):
        of: dict[str, Any] = {"tenant": tenant} if tenants else {}
        line.add(f"{who} {priority} {number}", payer=f"address {who}", priority=priority, **of)
    words = (name.split() for name in line.rest())
    return [(who, int(priority), int(number)) for who, priority, number in words]


@given(ASKED)
def test_what_an_address_says_of_its_priority_moves_nobody_else(asked: list[tuple[str, str, int]]) -> None:
    plain = [(who, tenant, 0) for who, tenant, _ in asked]
    assert [who for who, _, _ in served(asked)] == [who for who, _, _ in served(plain)]


@given(ASKED)
def test_an_address_gets_its_own_in_the_order_that_it_says(asked: list[tuple[str, str, int]]) -> None:
    for who in "abc":
        own = [place[1:] for place in served(asked) if place[0] == who]
        assert own == sorted(own)
        # Its tenants take turns only where it says nothing.
        levels = [priority for of, priority, _ in served(asked, tenants=True) if of == who]
        assert levels == sorted(levels)


def test_who_makes_room_in_a_full_queue() -> None:
    line = Line(limit=3)
    for number in range(3):
        line.add(f"later {number}", payer="address a", tenant=f"t{number % 2}", priority=5)
    assert isinstance(line.add("now", payer="address a", tenant="t", priority=-1), Entry)
    assert line.add("as late", payer="address a", tenant="t0", priority=5) is NoEntry.FULL
    assert line.rest()[0] == "now"
    line = Line(limit_bytes=100)
    assert isinstance(line.add("a", tenant="a", size=80), Entry)
    assert line.add("b", tenant="b", size=30) is not NoEntry.HOPELESS
    assert line.queue.size <= 100
    assert line.add("c", tenant="c", size=101) is NoEntry.FULL
    line = Line(limit=1)
    line.add("later", priority=1)
    assert isinstance(line.add("now", priority=0), Entry)
    assert line.add("later", priority=1) is NoEntry.FULL
    assert line.rest() == ["now"]


def test_short_work_overtakes_long_work_of_the_same_tenant_only_for_so_long() -> None:
    line = Line(age_s=10.0, age_tokens=1000)
    line.add("long", tokens=1_000_000)
    line.add("short", tokens=10, now=NOW + 9.8)
    line.add("too late", tokens=1, now=NOW + 10)
    assert line.rest() == ["short", "long", "too late"]


def test_an_agent_with_many_sub_agents_takes_the_turns_of_one_and_a_fleet_of_single_asks_none_away() -> None:
    line = Line(age_s=8.0, age_tokens=8000)
    for number in range(20):
        line.add(f"sub {number}", session="swarm", tokens=1000)
    mine = line.add("mine", NOW + 0.1, session="mine", tokens=1000)
    line.add("of nobody", NOW + 0.2, tokens=1000)
    later = line.add("later", NOW + 1.5, session="other", tokens=1000)
    assert isinstance(mine, Entry)
    assert isinstance(later, Entry)
    assert line.queue.wait_s(mine, TOKENS_S) == pytest.approx(1.0)
    assert line.queue.wait_s(later, TOKENS_S) == pytest.approx(4.0)
    assert line.rest()[:6] == ["sub 0", "mine", "of nobody", "sub 1", "later", "sub 2"]


def test_short_work_of_a_session_still_goes_before_its_long_work() -> None:
    line = Line()
    line.add("long", session="app", tokens=30_000)
    line.add("short", NOW + 1.0, session="app", tokens=10)
    line.add("shorter", NOW + 1.0, session="app", tokens=5)
    assert line.rest() == ["shorter", "short", "long"]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.sampled_from(["", "s", "t"]))))
def test_what_clients_say_of_sessions_changes_nothing_for_other_tenants(asked: list[tuple[str, ...]]) -> None:
    def tenants(*, told: bool) -> list[tuple[str, str]]:
        line = Line()
        for number, (payer, tenant, session) in enumerate(asked):
            line.add(f"{number}", payer=payer, tenant=tenant, session=session if told else "", tokens=100)
        return [asked[int(name)][:2] for name in line.rest()]  # type: ignore[misc]

    assert tenants(told=True) == tenants(told=False)


def test_who_has_no_unit_for_a_while_saves_nothing_up() -> None:
    line = Line(quantum_tokens=100)
    for number in range(50):
        line.add(f"a{number}", tenant="a", tokens=100, group="there")
        line.add(f"b{number}", tenant="b", tokens=100, group="gone")
    assert [line.serve(blocked=("gone",)) for _ in range(30)] == [f"a{number}" for number in range(30)]
    served = [line.serve() for _ in range(10)]
    assert sum(name is not None and name[0] == "b" for name in served) <= 6


def test_a_flood_takes_its_own_share_of_the_queue_alone() -> None:
    line = Line(limit=10)
    for number in range(12):
        line.add(f"flood{number}", tenant="flood")
    assert len(line.queue) == 10
    answer = line.queue.add("other", NOW, tokens_s=TOKENS_S, tenant="other")
    assert isinstance(answer, Entered)
    assert answer.displaced is not None
    assert answer.displaced.item == "flood9"
    assert line.add("more", tenant="flood") is NoEntry.FULL
    for number in range(20):
        line.add(f"other{number}", tenant="other")
    assert Counter(entry.tenant for entry in line.queue) == {"flood": 5, "other": 5}


def test_an_entry_that_cannot_make_its_deadline_is_refused_at_once_and_others_are_found_in_time() -> None:
    line = Line()
    line.add("ahead", tokens=5000)
    assert line.add("hurried", tokens=5000, deadline_at=NOW + 4.9) is NoEntry.HOPELESS
    assert isinstance(line.add("patient", tokens=5000, deadline_at=NOW + 5.0), Entry)
    assert isinstance(line.add("short", tokens=1, deadline_at=NOW + 0.1), Entry)
    line = Line()
    line.add("long", payer="address a", tenant="t", priority=1, tokens=60_000)
    assert isinstance(
        line.add("now", payer="address a", tokens=1000, deadline_at=NOW + 0.5, priority=0), Entry
    )
    line = Line()
    assert line.queue.drain_s(0.0) == 0.0
    line.add("a", tokens=1000, deadline_at=NOW + 5)
    line.add("b", tokens=1000)
    assert line.queue.drain_s(0.0) == inf
    assert [entry.item for entry in line.queue.hopeless(NOW + 3.9, TOKENS_S)] == []
    assert [entry.item for entry in line.queue.hopeless(NOW + 4.1, TOKENS_S)] == ["a"]
    assert [entry.item for entry in line.queue.hopeless(NOW + 4.1, 0.0)] == [], "nobody knows without a unit"
    assert [entry.item for entry in line.queue.hopeless(NOW + 5.1, 0.0)] == ["a"]


def test_another_tenants_flood_is_waited_for_only_in_turns() -> None:
    line = Line()
    for number in range(100):
        line.add(f"flood{number}", tenant="flood", tokens=1000)
    entry = line.add("mine", tenant="me", tokens=500)
    assert isinstance(entry, Entry)
    assert line.queue.wait_s(entry, TOKENS_S) == pytest.approx(0.5)
    assert line.queue.drain_s(TOKENS_S) == pytest.approx(100.5)
