"""Those who wait for a unit, and how the router serves them."""

from __future__ import annotations

import random
from functools import partial

import pytest

from cellgate.policies import POLICIES
from cellgate.router.board import Board
from cellgate.router.cost_model import SURE
from cellgate.router.nouns import Ask, Evidence, Fleet, Refusal, Rules, Sign, Strength, Unit
from cellgate.router.pick import Router
from cellgate.router.queue import MOVED_S, FairRules, Queue, Ticket
from cellgate.router.unit_state import Lease

NOW = 100.0
NOTHING_TRIED: frozenset[str] = frozenset()
RULES = FairRules(limit=8, max_wait_s=30.0)


class Scene:
    """A router over the units `a` and `b`, both UP, two places each; `settled` is who was told what."""

    def __init__(self, rules: FairRules = RULES, policy: str = "prefix_affinity") -> None:
        self.board = Board(Rules(evict_overcommit=0.5, slow_start_s=0.001))
        self.router = Router(self.board, POLICIES[policy](), random.Random(1), Queue(rules))
        self.settled: list[tuple[str, Lease | Refusal]] = []
        units = tuple(Unit(name, "c", f"http://{name}", ("m",), max_in_flight=2) for name in "ab")
        self.board.configure(Fleet((), units), NOW)
        for name in "ab":
            self.board.observe(Evidence(name, Sign.GOOD, Strength.STRONG, "canary", "", NOW))
            self.board.units[name].costs.rates.followed = SURE
        self.board.tick(NOW + 0.1)

    def wait(
        self,
        who: str,
        ask: Ask = Ask("m"),  # noqa: B008 - a named tuple
        *,
        tried: frozenset[str] = NOTHING_TRIED,
        moved: bool = False,
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


# -- those who lost their unit -----------------------------------------------------------------------------


def test_those_who_lost_their_unit_come_first_and_in_their_order() -> None:
    scene = Scene()
    leases = scene.fill("a", "b", places=3)
    scene.wait("new")
    for who in "xyz":
        scene.wait(who, moved=True)
    scene.router.serve_waiting(NOW + 1)
    assert scene.told == []
    scene.board.close(leases[0], NOW + 1)
    scene.board.close(leases[3], NOW + 1)
    scene.router.serve_waiting(NOW + 2)
    assert sorted(unit for _, unit in scene.told) == ["a", "b"]
    assert [who for who, _ in scene.told] == ["x", "y"]
    assert len(scene.router.queue) == 2


def test_they_may_go_above_max_in_flight_and_others_may_not() -> None:
    scene = Scene()
    scene.fill("a", "b")
    scene.wait("new")
    scene.wait("moved", moved=True)
    scene.router.serve_waiting(NOW + 1)
    assert [who for who, _ in scene.told] == ["moved"]


def test_nobody_is_given_a_unit_that_failed_it_before() -> None:
    scene = Scene()
    leases = scene.fill("b", places=3)
    scene.wait("x", tried=frozenset({"a"}), moved=True)
    scene.router.serve_waiting(NOW + 1)
    assert scene.told == []
    scene.board.close(leases[0], NOW + 1)
    scene.router.serve_waiting(NOW + 1)
    assert scene.told == [("x", "b")]


def test_one_who_cannot_be_served_does_not_hold_up_those_behind() -> None:
    scene = Scene()
    scene.fill("b", places=3)
    scene.wait("x", tried=frozenset({"a"}), moved=True)
    scene.wait("y", moved=True)
    scene.router.serve_waiting(NOW + 1)
    assert scene.told == [("y", "a")]


def test_who_lost_its_unit_waits_for_another_only_so_long() -> None:
    scene = Scene()
    scene.fill("a", "b", places=3)
    scene.wait("x", moved=True)
    scene.router.tick(NOW + MOVED_S - 0.1)
    assert scene.told == []
    scene.router.tick(NOW + MOVED_S)
    assert scene.told == [("x", "full")]
    assert len(scene.router.queue) == 0


# -- all others --------------------------------------------------------------------------------------------


def test_an_ask_waits_until_there_is_a_place() -> None:
    scene = Scene()
    leases = scene.fill("a", "b")
    assert scene.router.pick(Ask("m"), NOW) is Refusal.FULL
    scene.wait("x")
    scene.router.serve_waiting(NOW)
    assert scene.told == []
    scene.board.close(leases[0], NOW + 1)
    scene.router.serve_waiting(NOW + 1)
    assert scene.told == [("x", "a")]


def test_nobody_overtakes_those_who_wait_but_in_their_turn() -> None:
    scene = Scene()
    leases = scene.fill("a", "b")
    scene.wait("x")
    scene.board.close(leases[0], NOW + 1)
    assert scene.router.pick(Ask("m"), NOW + 1) is Refusal.FULL
    scene.router.serve_waiting(NOW + 1)
    assert scene.told == [("x", "a")]


def test_a_unit_with_a_long_backlog_of_prompts_gets_no_more() -> None:
    scene = Scene()
    costs = scene.board.units["a"].costs
    tokens_s = costs.rates.prefill_tokens_s.value
    large = Ask("m", stream=True, prompt_bytes=int(4 * 3 * tokens_s))
    first = scene.router.pick(large, NOW + 1)
    second = scene.router.pick(large, NOW + 1)
    assert isinstance(first, Lease)
    assert isinstance(second, Lease)
    assert {first.unit, second.unit} == {"a", "b"}
    assert scene.router.pick(large, NOW + 1) is Refusal.FULL
    scene.wait("x", large)
    scene.router.serve_waiting(NOW + 2)
    assert scene.told == []
    first.commit(NOW + 3)
    scene.router.serve_waiting(NOW + 3)
    assert scene.told == [("x", first.unit)]


def test_an_ask_waits_for_the_unit_that_has_its_prompt_rather_than_compute_it_again() -> None:
    scene = Scene()
    blocks = tuple(range(1, 800))
    long = Ask("m", stream=True, prompt_bytes=512 * len(blocks), blocks=blocks)
    first = scene.router.pick(long, NOW + 1)
    assert isinstance(first, Lease)
    first.commit(NOW + 2)
    scene.board.close(first, NOW + 2)
    tokens = 6000
    other = scene.board.open(first.unit, Ask("m", stream=True, prompt_bytes=4 * tokens), NOW + 2, retry=False)
    assert scene.router.pick(long, NOW + 2) is Refusal.FULL, "the other is idle, but has to compute it all"
    scene.wait("x", long)
    scene.router.serve_waiting(NOW + 2)
    assert scene.told == []
    other.commit(NOW + 3)
    scene.router.serve_waiting(NOW + 3)
    assert scene.told == [("x", first.unit)]


def test_nobody_waits_for_a_place_while_another_unit_has_one() -> None:
    scene = Scene()
    blocks = tuple(range(1, 200))
    long = Ask("m", stream=True, prompt_bytes=512 * len(blocks), blocks=blocks)
    first = scene.router.pick(long, NOW + 1)
    assert isinstance(first, Lease)
    first.commit(NOW + 2)
    scene.fill(first.unit, places=1)
    second = scene.router.pick(long, NOW + 2)
    assert isinstance(second, Lease)
    assert second.unit != first.unit


def test_other_policies_never_wait_while_a_unit_has_room() -> None:
    scene = Scene(policy="round_robin")
    scene.fill("a")
    for _ in range(2):
        lease = scene.router.pick(Ask("m"), NOW)
        assert isinstance(lease, Lease)
        assert lease.unit == "b"
    assert scene.router.pick(Ask("m"), NOW) is Refusal.FULL


def test_lower_priority_numbers_go_first() -> None:
    scene = Scene()
    leases = scene.fill("a", "b")
    for who, priority in (("batch", 5), ("normal", 0), ("urgent", -1)):
        scene.wait(who, Ask("m", priority=priority))
    for lease in leases[:3]:
        scene.board.close(lease, NOW + 1)
    scene.router.serve_waiting(NOW + 1)
    assert [who for who, _ in scene.told] == ["urgent", "normal", "batch"]


def test_a_tenant_that_floods_the_queue_makes_others_wait_for_their_turn_only() -> None:
    scene = Scene()
    leases = scene.fill("a", "b")
    for number in range(6):
        scene.wait(f"flood {number}", Ask("m", tenant="flood", prompt_tokens=1000))
    scene.wait("other", Ask("m", tenant="other", prompt_tokens=1000))
    for lease in leases[:2]:
        scene.board.close(lease, NOW + 1)
    scene.router.serve_waiting(NOW + 1)
    assert [who for who, _ in scene.told] == ["flood 0", "other"]


def test_waiting_ends_with_a_refusal_when_its_time_is_up() -> None:
    scene = Scene()
    scene.fill("a", "b")
    scene.wait("x")
    scene.wait("hasty", Ask("m", deadline_at=NOW + 5.0))
    scene.router.tick(NOW + 4.9)
    assert scene.told == []
    scene.router.tick(NOW + 5.1)
    assert scene.told == [("hasty", "late")]
    scene.router.tick(NOW + 30.1)
    assert scene.told[1:] == [("x", "late")]
    assert len(scene.router.queue) == 0


@pytest.mark.parametrize("moved", [False, True])
def test_each_is_told_once_though_telling_one_makes_another_leave(moved: bool) -> None:
    scene = Scene()
    leases = scene.fill("a", "b", places=3)
    told: list[str] = []
    tickets: list[Ticket] = []

    def settle(who: int, _answer: Lease | Refusal) -> None:
        told.append("xyz"[who])
        # What follows from the first answer: a client leaves, or a new ask displaces one that waits.
        if who == 0:
            scene.router.queue.remove(tickets[1])

    for who in range(3):
        ticket = scene.router.wait(Ask("m"), NOW, NOTHING_TRIED, partial(settle, who), moved=moved)
        assert isinstance(ticket, Ticket)
        tickets.append(ticket)
    scene.router.tick(NOW + 31.0)
    assert told == ["x", "z"]
    assert len(scene.router.queue) == 0
    assert scene.board.in_flight == len(leases)


def test_an_ask_that_cannot_make_its_deadline_is_refused_at_once() -> None:
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
    first = scene.router.pick(hasty, NOW)
    assert isinstance(first, Lease), "nobody has seen how fast the units are"
    scene.board.close(first, NOW)
    for state in scene.board:
        for _ in range(SURE):
            state.costs.rates.prefilled(4096, 1.0)
    scene.board.tick(NOW)
    assert scene.router.pick(hasty, NOW) is Refusal.LATE
    assert isinstance(scene.router.pick(hasty._replace(deadline_at=NOW + 1000.0), NOW), Lease)


def test_a_model_that_is_gone_from_the_configuration_is_not_waited_for() -> None:
    scene = Scene()
    scene.wait("x", Ask("gone"))
    scene.wait("y", Ask("gone"), moved=True)
    scene.router.serve_waiting(NOW)
    assert sorted(scene.told) == [("x", "unknown_model"), ("y", "unknown_model")]


def test_who_waits_is_told_when_there_is_no_unit_any_more() -> None:
    scene = Scene()
    scene.fill("a", "b")
    scene.wait("x")
    for name in "ab":
        scene.board.observe(Evidence(name, Sign.BAD, Strength.FATAL, "agent", "gone", NOW))
    scene.router.serve_waiting(NOW)
    assert scene.told == [("x", "no_unit")]


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


def test_with_a_limit_of_none_nobody_waits() -> None:
    scene = Scene(FairRules(limit=0))
    scene.fill("a", "b")
    assert scene.wait("x") is Refusal.FULL


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
    scene = Scene()
    answers: list[Lease | Refusal] = []

    def again(answer: Lease | Refusal) -> None:
        answers.append(answer)
        if len(answers) == 1:
            scene.router.wait(Ask("m"), NOW, NOTHING_TRIED, again, moved=moved)

    scene.router.wait(Ask("m"), NOW, NOTHING_TRIED, again, moved=moved)
    scene.router.serve_waiting(NOW)
    scene.router.serve_waiting(NOW)
    assert len(answers) == 2


# -- what an engine says of its own room -------------------------------------------------------------------


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
    assert not state.has_room(NOW + 0.9, 0.0)
    assert state.has_room(NOW + 1.0, 0.0)
