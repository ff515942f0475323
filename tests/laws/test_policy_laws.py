"""Laws for every policy in the registry, and of how `session` ranks a session's units."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate import policies
from cellgate.policies import POLICIES
from cellgate.policies.least_load import TIE_S
from cellgate.policies.session import Session
from cellgate.router.nouns import Ask, Candidate, Policy

ASK = Ask("m", session="s")
every_policy = pytest.mark.parametrize("name", POLICIES)
law = settings(max_examples=60)

weights = st.sampled_from([1.0, 2.0, 0.5]) | st.floats(1e-6, 1e6)
costs = st.floats(1e-6, 1e9)
loads = st.integers(0, 1000).map(float) | st.floats(0.0, 1e308)


def test_each_policy_has_its_line_and_operators_are_told_of_it() -> None:
    files = {file.stem for file in Path(policies.__file__).parent.glob("[a-z]*.py")}
    page = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    assert files == POLICIES.keys() == {name for name in files if f"`{name}`" in page}


@st.composite
def candidate_lists(draw: st.DrawFn, min_size: int = 1) -> list[Candidate]:
    row = st.tuples(st.integers(0, 1000), loads, weights, costs, st.booleans())
    rows = enumerate(draw(st.lists(row, min_size=min_size, max_size=12)))
    return [
        Candidate(f"u{n}", in_flight, load, weight, cost_s, has_room)
        for n, (in_flight, load, weight, cost_s, has_room) in rows
    ]


def rank(name: str, candidates: Sequence[Candidate], seed: int = 1) -> list[Candidate]:
    return list(POLICIES[name]().rank(ASK, candidates, random.Random(seed)))


def shares(name: str, weights: Sequence[float], picks: int) -> list[float]:
    """Which share of the picks each of these idle units leads."""
    policy: Policy = POLICIES[name]()
    rng = random.Random(1)
    candidates = [Candidate(f"u{n}", 0, 0.0, weight) for n, weight in enumerate(weights)]
    leads = Counter(policy.rank(ASK, candidates, rng)[0].unit for _ in range(picks))
    return [leads[candidate.unit] / picks for candidate in candidates]


@every_policy
@law
@given(candidates=candidate_lists(), seed=st.integers(0, 2**32))
def test_the_generator_decides_each_candidate_is_ranked_once_and_the_input_stays_as_it_was(
    name: str, candidates: list[Candidate], seed: int
) -> None:
    before = list(candidates)
    ranked = rank(name, candidates, seed)
    assert ranked == rank(name, tuple(candidates), seed)
    assert sorted(ranked) == sorted(candidates)
    assert candidates == before


@pytest.mark.parametrize("name", ["least_load", "prefix_affinity"])
@law
@given(candidates=candidate_lists(), twins=st.tuples(costs, costs), seed=st.integers(0, 99))
def test_of_twins_the_one_that_answers_sooner_is_never_ranked_behind(
    name: str, candidates: list[Candidate], twins: tuple[float, float], seed: int
) -> None:
    soon, late = (Candidate(unit, 0, 0.0, 1.0, s) for unit, s in zip("sl", sorted(twins), strict=True))
    ranked = rank(name, [late, *candidates, soon], seed)
    if late.cost_s - soon.cost_s > TIE_S:
        assert ranked.index(soon) < ranked.index(late)


@law
@given(candidates=candidate_lists(min_size=2), seed=st.integers(0, 2**32))
def test_p2c_leads_with_the_less_loaded_of_the_two_it_drew(candidates: list[Candidate], seed: int) -> None:
    first, second = rank("p2c", candidates, seed)[:2]
    assert first.load / first.weight <= second.load / second.weight


@pytest.mark.parametrize("name", ["random", "round_robin"])
@pytest.mark.parametrize(
    "weights",
    [(1, 2, 3), (1e-6, 2e-6), (1e17, 3e17), (1, 1000)],
    ids=str,
)
def test_shares_are_in_proportion_to_weight(name: str, weights: tuple[float, ...]) -> None:
    picks = 6000
    for share, weight in zip(shares(name, weights, picks), weights, strict=True):
        due = weight / sum(weights)
        # Four standard deviations of a fair draw.
        assert abs(share - due) <= 4 * math.sqrt(due * (1 - due) / picks) + 1 / picks


@pytest.mark.parametrize("name", ["least_load", "p2c", "prefix_affinity"])
def test_equal_idle_units_share_alike(name: str) -> None:
    for share in shares(name, (1.0,) * 4, 4000):
        assert abs(share - 0.25) < 0.03


def test_round_robin_takes_strict_turns_among_equals() -> None:
    policy = POLICIES["round_robin"]()
    candidates = [Candidate(unit, 0, 0.0, 2.0) for unit in "abc"]
    leads = [policy.rank(ASK, candidates, random.Random(1))[0].unit for _ in range(9)]
    assert leads == list("abcabcabc")


# Laws of the policy `session`, on the function that ranks a session's units.

sessions = st.text(max_size=20)


def idle(*weights: float) -> list[Candidate]:
    return [Candidate(f"u{n}", 0, 0.0, weight) for n, weight in enumerate(weights)]


def owner(session: str, candidates: list[Candidate]) -> str:
    return Session().owners(session, candidates)[0].unit


@law
@given(
    session=sessions,
    rows=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.5, 1.0, 2.0])), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
)
def test_gates_agree_in_whatever_order_they_know_the_units(
    session: str, rows: list[tuple[int, float]], seed: int
) -> None:
    candidates = [Candidate(f"u{n}", 0, float(load), weight) for n, (load, weight) in enumerate(rows)]
    shuffled = list(candidates)
    random.Random(seed).shuffle(shuffled)
    assert Session().owners(session, candidates) == Session().owners(session, shuffled)


@law
@given(session=sessions, units=st.lists(weights, min_size=2, max_size=12))
def test_a_unit_that_goes_leaves_the_order_of_the_others(session: str, units: list[float]) -> None:
    order = Session(bound=1e9).owners(session, idle(*units))
    for gone in order:
        left = [candidate for candidate in order if candidate is not gone]
        assert Session(bound=1e9).owners(session, left) == left


@law
@given(session=sessions, candidates=candidate_lists(min_size=2))
def test_whoever_has_room_comes_before_who_is_overloaded(session: str, candidates: list[Candidate]) -> None:
    first = Session().owners(session, candidates)[0]
    total, weight = sum(c.load for c in candidates), sum(c.weight for c in candidates)
    has_room = [c for c in candidates if c.load < 1.25 * (total + 1) / weight * c.weight * (1 - 1e-9)]
    if has_room:
        assert first.load <= 1.25 * (total + 1) / weight * first.weight * (1 + 1e-9)


@pytest.mark.parametrize("weights", [(1.0, 2.0, 5.0), (0.25, 0.25), (1.0, 1000.0)], ids=str)
def test_sessions_are_shared_out_in_proportion_to_weight(weights: tuple[float, ...]) -> None:
    number = 6000
    owned = Counter(Session(bound=1e9).owners(f"s{n}", idle(*weights))[0].unit for n in range(number))
    for candidate in idle(*weights):
        due = candidate.weight / sum(weights)
        # Four standard deviations of a fair draw.
        assert abs(owned[candidate.unit] / number - due) <= 4 * math.sqrt(due * (1 - due) / number)


def test_no_unit_gets_more_than_its_bound_while_sessions_come() -> None:
    held = {f"u{n}": 0 for n in range(5)}
    for n in range(1000):
        candidates = [Candidate(unit, load, float(load), 1.0) for unit, load in held.items()]
        held[owner(f"s{n}", candidates)] += 1
        assert max(held.values()) <= math.ceil(1.25 * (n + 1) / 5)


def test_the_sessions_of_a_lost_unit_are_spread_over_the_others() -> None:
    units = idle(1.0, 1.0, 1.0, 1.0)
    lost = [f"s{n}" for n in range(2000) if owner(f"s{n}", units) == "u0"]
    heirs = Counter(owner(session, units[1:]) for session in lost)
    assert len(heirs) == 3
    assert max(heirs.values()) < 1.3 * min(heirs.values())


def test_an_ask_without_a_session_goes_to_the_less_loaded() -> None:
    busy, lazy = Candidate("busy", 5, 5.0, 1.0, 2.0), Candidate("lazy", 0, 0.0, 1.0, 1.0)
    assert Session().rank(Ask("m"), [busy, lazy], random.Random(1)) == [lazy, busy]
