"""Who waits, who is served next, and who need not wait at all."""

from __future__ import annotations

import random
from collections import Counter
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.router.queue import Entered, Entry, FairQueue, FairRules, NoEntry

NOW = 100.0
TOKENS_S = 1000.0


class Line:
    """A queue whose items are names."""

    def __init__(self, **rules: float) -> None:
        self.queue: FairQueue[str] = FairQueue(FairRules(**rules))  # type: ignore[arg-type]

    def add(self, name: str, **of: object) -> Entry[str] | NoEntry:
        now = of.pop("now", NOW)
        answer = self.queue.add(name, now, tokens_s=TOKENS_S, **of)  # type: ignore[arg-type]
        return answer.entry if isinstance(answer, Entered) else answer

    def serve(self, blocked: tuple[str, ...] = ()) -> str | None:
        entry = self.queue.first(blocked)
        if entry is None:
            return None
        self.queue.take(entry)
        return entry.item

    def rest(self) -> list[str]:
        return [name for name in iter(self.serve, None) if name is not None]


def test_urgent_asks_go_first() -> None:
    line = Line()
    line.add("low", priority=5)
    line.add("usual")
    line.add("urgent", priority=-1)
    assert line.rest() == ["urgent", "usual", "low"]


ASKED = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(-9, 9)), max_size=30)


def served(asked: list[tuple[str, str, int]], *, tenants: bool = False) -> list[tuple[str, int, int]]:
    """Who is served, in which order: the payer's name, the priority, and when it came."""
    line = Line()
    for number, (who, tenant, priority) in enumerate(asked):
        of = {"tenant": tenant} if tenants else {}
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


def test_in_a_full_queue_an_address_displaces_its_own_that_goes_later() -> None:
    line = Line(limit=3)
    for number in range(3):
        line.add(f"later {number}", payer="address a", tenant=f"t{number % 2}", priority=5)
    assert isinstance(line.add("now", payer="address a", tenant="t", priority=-1), Entry)
    assert line.add("as late", payer="address a", tenant="t0", priority=5) is NoEntry.FULL
    assert line.rest()[0] == "now"


def test_nobody_is_late_because_of_what_goes_after_it() -> None:
    line = Line()
    line.add("long", payer="address a", tenant="t", priority=1, tokens=60_000)
    assert isinstance(
        line.add("now", payer="address a", tokens=1000, deadline_at=NOW + 0.5, priority=0), Entry
    )


def test_short_work_overtakes_long_work_of_the_same_tenant() -> None:
    line = Line(age_s=10.0, age_tokens=1000)
    line.add("long", tokens=1000)
    line.add("short", tokens=10, now=NOW + 5)
    assert line.rest() == ["short", "long"]


def test_long_work_is_overtaken_only_for_so_long() -> None:
    line = Line(age_s=10.0, age_tokens=1000)
    line.add("long", tokens=1_000_000)
    line.add("too late", tokens=1, now=NOW + 10)
    assert line.rest() == ["long", "too late"]


def test_tenants_take_turns_by_tokens_and_not_by_requests() -> None:
    line = Line(quantum_tokens=100)
    for number in range(8):
        line.add(f"big{number}", tenant="big", tokens=400)
        line.add(f"small{number}", tenant="small", tokens=100)
    order = [line.serve() for _ in range(10)]
    spent = Counter({"big": 0, "small": 0})
    for name in order:
        assert name is not None
        spent[name[:-1]] += 400 if name.startswith("big") else 100
    assert abs(spent["big"] - spent["small"]) <= 500


def test_a_tenant_that_comes_late_is_not_owed_for_the_time_before() -> None:
    line = Line(quantum_tokens=100)
    for number in range(6):
        line.add(f"a{number}", tenant="a", tokens=100)
    assert [line.serve() for _ in range(3)] == ["a0", "a1", "a2"]
    for number in range(3):
        line.add(f"b{number}", tenant="b", tokens=100)
    assert line.rest() == ["b0", "a3", "b1", "a4", "b2", "a5"]


def test_where_one_of_a_group_finds_no_room_others_are_served() -> None:
    line = Line()
    line.add("large", group="large")
    line.add("small", group="small")
    assert line.serve(blocked=("large",)) == "small"
    assert line.serve(blocked=("large",)) is None
    assert line.serve() == "large"


def test_who_has_no_unit_for_a_while_saves_nothing_up() -> None:
    line = Line(quantum_tokens=100)
    for number in range(50):
        line.add(f"a{number}", tenant="a", tokens=100, group="there")
    for number in range(20):
        line.add(f"b{number}", tenant="b", tokens=100, group="gone")
    assert [line.serve(blocked=("gone",)) for _ in range(30)] == [f"a{number}" for number in range(30)]
    served = [line.serve() for _ in range(10)]
    assert sum(name is not None and name[0] == "b" for name in served) <= 6


# -- bounds ------------------------------------------------------------------------------------------------


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


def test_bytes_are_bounded_as_well() -> None:
    line = Line(limit_bytes=100)
    assert isinstance(line.add("a", tenant="a", size=80), Entry)
    assert line.add("b", tenant="b", size=30) is not NoEntry.HOPELESS
    assert line.queue.size <= 100
    assert line.add("c", tenant="c", size=101) is NoEntry.FULL


def test_who_is_less_urgent_makes_room_for_who_is_more() -> None:
    line = Line(limit=1)
    line.add("later", priority=1)
    assert isinstance(line.add("now", priority=0), Entry)
    assert line.add("later", priority=1) is NoEntry.FULL
    assert line.rest() == ["now"]


# -- deadlines ---------------------------------------------------------------------------------------------


def test_an_ask_that_cannot_make_its_deadline_is_refused_at_once() -> None:
    line = Line()
    line.add("ahead", tokens=5000)
    assert line.add("hurried", tokens=5000, deadline_at=NOW + 4.9) is NoEntry.HOPELESS
    assert isinstance(line.add("patient", tokens=5000, deadline_at=NOW + 5.0), Entry)
    assert isinstance(line.add("short", tokens=1, deadline_at=NOW + 0.1), Entry)


def test_another_tenants_flood_is_waited_for_only_in_turns() -> None:
    line = Line()
    for number in range(100):
        line.add(f"flood{number}", tenant="flood", tokens=1000)
    entry = line.add("mine", tenant="me", tokens=500)
    assert isinstance(entry, Entry)
    assert line.queue.wait_s(entry, TOKENS_S) == pytest.approx(0.5)
    assert line.queue.drain_s(TOKENS_S) == pytest.approx(100.5)


def test_those_whose_deadline_comes_too_near_are_found() -> None:
    line = Line()
    line.add("a", tokens=1000, deadline_at=NOW + 5)
    line.add("b", tokens=1000)
    assert [entry.item for entry in line.queue.hopeless(NOW + 3.9, TOKENS_S)] == []
    assert [entry.item for entry in line.queue.hopeless(NOW + 4.1, TOKENS_S)] == ["a"]
    assert [entry.item for entry in line.queue.hopeless(NOW + 4.1, 0.0)] == [], "nobody knows without a unit"
    assert [entry.item for entry in line.queue.hopeless(NOW + 5.1, 0.0)] == ["a"]


def test_nothing_drains_without_units() -> None:
    line = Line()
    assert line.queue.drain_s(0.0) == 0.0
    line.add("a")
    assert line.queue.drain_s(0.0) == inf


# -- fairness ----------------------------------------------------------------------------------------------

loads = st.lists(st.integers(1, 5000), min_size=30, max_size=60)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(red=loads, blue=loads, quantum=st.integers(1, 10_000))
def test_two_who_wait_get_the_same_but_for_a_quantum_and_the_largest_ask_of_each(
    red: list[int], blue: list[int], quantum: int
) -> None:
    line, got = Line(quantum_tokens=quantum), Counter({"red": 0, "blue": 0})
    for tenant, sizes in (("red", red), ("blue", blue)):
        for tokens in sizes:
            line.add(tenant, tenant=tenant, tokens=tokens)
    while True:
        waiting = {entry.tenant for entry in line.queue}
        if len(waiting) < 2:
            break
        entry = line.queue.first()
        assert entry is not None
        got[entry.tenant] += entry.tokens
        line.queue.take(entry)
        assert abs(got["red"] - got["blue"]) <= quantum + max(red) + max(blue)


def wait_p99_s(flood: int) -> float:
    """The p99 wait of a tenant that sends 10 % of capacity beside one that sends `flood` times as much."""
    line, rng, waits = Line(limit=256), random.Random(7), list[float]()
    arrivals = sorted(
        (rng.uniform(0, 100), tenant)
        for tenant, number in (("calm", 100), ("flood", 100 * flood))
        for _ in range(number)
    )
    free_at = 0.0
    for at, tenant in [*arrivals, (1000.0, "")]:
        while len(line.queue) and free_at <= at:
            entry = line.queue.first()
            assert entry is not None
            line.queue.take(entry)
            if entry.tenant == "calm":
                waits.append(max(free_at, entry.entered_at) - entry.entered_at)
            free_at = max(free_at, entry.entered_at) + 0.1
        line.add(tenant, now=at, tenant=tenant, tokens=100)
    assert len(waits) == 100
    return sorted(waits)[98]


def test_a_flood_hardly_moves_another_tenants_wait() -> None:
    """4 a second are half of what the unit can do, with the other one's; 40 are four times that."""
    calm_s, flooded_s = wait_p99_s(4), wait_p99_s(40)
    assert 0.0 < flooded_s <= 2 * calm_s
