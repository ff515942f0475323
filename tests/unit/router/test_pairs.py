"""Which requests are split, between which units, and the link of a pair."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.control.explain import dry_run
from cellgate.router.cost_model import SURE
from cellgate.router.nouns import (
    LINK_FAILED,
    TRANSFERRED,
    Ask,
    Cell,
    Fleet,
    Refusal,
    Rules,
    ServingRole,
    SplitStep,
    Transfer,
    Unit,
)
from cellgate.router.pick import Router
from cellgate.router.prefill_decode import (
    AVOID_MOST_S,
    AVOID_S,
    FIRST_TOKENS_S,
    PREFILLERS_MOST,
    STALE_S,
    TransferLink,
)
from tests.unit.router.fleets import board_up, picked, router_over

BLOCK_BYTES = 512
ROLES: dict[str, ServingRole] = {"p": "prefill", "d": "decode", "b": "both"}


def router_of(*names: str, transfer: Transfer = "nixl") -> Router:
    """Units that are up; the first letter of a name is its role."""
    units = (Unit(name, "c", f"http://{name}:1", role=ROLES[name[0]]) for name in names)
    cells = (Cell("c", transfer=transfer),)
    return router_over(board_up(*units, rules=Rules(slow_start_s=0.0), cells=cells))


def ask_of(tokens: int, seed: int = 0) -> Ask:
    size = tokens * 4
    blocks = tuple(seed * 1_000_000 + number for number in range(size // BLOCK_BYTES))
    return Ask(stream=True, prompt_tokens=tokens, prompt_bytes=size, blocks=blocks, splits=True)


def busy(router: Router, answers: int = 16) -> None:
    """Answers are being decoded."""
    for _ in range(answers):
        picked(router, ask_of(10), 2.0).commit(2.0)


def test_a_long_prompt_beside_many_answers_is_split_and_a_short_or_cached_one_is_not() -> None:
    router = router_of("p1", "d1")
    busy(router)
    router.board.pairs.link("p1", "d1").learn(4000, 0.0, 2.0)
    lease = picked(router, ask_of(8000))
    assert lease.unit == "d1"
    assert lease.split is not None
    assert lease.split.prefiller == "p1"
    assert lease.split.tokens > 0
    for tokens in (1, 50, 100):
        assert picked(router, ask_of(tokens)).split is None
    lease.commit(3.1)
    assert picked(router, ask_of(8000), 3.2).split is None
    assert picked(router, ask_of(8000, 1), 3.2).split is not None
    router.board.drain("p1", drained=True)
    assert picked(router, ask_of(8000, 2), 3.2).split is None, "its prefiller is not in rotation"


def test_an_idle_decoder_computes_its_prompts_itself_and_a_prefiller_gets_no_whole_request() -> None:
    router = router_of("p1", "d1")
    assert picked(router, ask_of(8000)).split is None
    assert router.board.pairs.not_paying == 1
    assert picked(router, ask_of(100)._replace(unit="p1")).unit == "p1", "but when it is named"
    assert router_of("p1").pick(ask_of(100), 2.0) is Refusal.NO_UNIT
    router = router_of("b1", "b2")
    router.board.configure(Fleet((Cell("c"),), tuple(state.unit for state in router.board)), 2.0)
    assert router.board.pairs.decoders is router.board.units, "without roles all are candidates"
    assert not router.board.pairs.prefillers


def test_only_the_pair_that_failed_is_avoided() -> None:
    router = router_of("p1", "p2", "d1", "d2")
    busy(router, 32)
    pairs = router.board.pairs
    for prefiller in ("p1", "p2"):
        pairs.apply(SplitStep(LINK_FAILED, prefiller, "d1", reason="cut"), 3.0)
    for seed in range(8):
        lease = picked(router, ask_of(4000, seed))
        assert lease.split is None or lease.unit == "d2"
    pairs.apply(SplitStep(TRANSFERRED, "p1", "d1", 4000, 0.1), 4.0)
    assert pairs.link("p1", "d1").is_open(4.0)
    assert not pairs.link("p2", "d1").is_open(4.0)


def test_a_decoder_that_needs_a_prefiller_gets_one_however_many_others_are_drained() -> None:
    prefillers = [f"p{number}" for number in range(PREFILLERS_MOST + 1)]
    router = router_of(*prefillers, "d1", transfer="sglang")
    *drained, left = prefillers
    for name in drained:
        router.board.drain(name, drained=True)
    lease = picked(router, ask_of(10))
    assert lease.split is not None
    assert (lease.split.prefiller, lease.split.together) == (left, True)
    router.board.drain(left, drained=True)
    assert router.pick(ask_of(10), 3.0) is Refusal.NO_UNIT
    router = router_of("p1", "d1", "b1", transfer="sglang")
    for seed in range(8):
        assert picked(router, ask_of(10, seed)._replace(splits=False)).unit == "b1", "it cannot be split"


def leg_of(ask: Ask, prefiller: str) -> Ask:
    return ask._replace(unit=prefiller, max_tokens=1, splits=False)


def test_prompts_for_others_queue_at_their_prefiller() -> None:
    """The price of a split has their queue in it: they are not refused for it."""
    router = router_of("p1", "d1")
    rates = router.board.units["p1"].costs.rates
    rates.prefill_tokens_s.learn(10_000.0)
    rates.followed = SURE
    router.board.tick(2.0)
    for seed in range(4):
        picked(router, leg_of(ask_of(8000, seed), "p1"), 2.1)
    answer = dry_run(router, leg_of(ask_of(8000, 5), "p1"), 2.1, random.Random(1))
    assert (answer.best, answer.refusal, answer.wait_s) == ("p1", None, None)


def test_a_split_says_whether_its_decoder_may_be_full() -> None:
    router = router_of("p1", "d1")
    busy(router)
    router.board.pairs.link("p1", "d1").learn(4000, 0.0, 2.0)
    full = picked(router, ask_of(8000)).split
    for lease in [*router.board.units["d1"].leases][:2]:
        router.board.close(lease, 4.0)
    roomy = picked(router, ask_of(8000, 1), 5.0).split
    assert full is not None
    assert roomy is not None
    assert (full.may_wait, roomy.may_wait) == (True, False)


def test_a_unit_that_answers_as_well_computes_one_prompt_at_a_time_for_others() -> None:
    router = router_of("b1", "d1")
    router.board.pairs.link("b1", "d1").learn(4000, 0.0, 2.0)
    for _ in range(24):
        picked(router, ask_of(10)._replace(unit="d1"), 2.0).commit(2.0)
    assert picked(router, ask_of(8000)._replace(unit="d1")).split is not None
    router.board.open("b1", ask_of(1000, 1), 3.0, retry=False)
    assert picked(router, ask_of(8000, 2)._replace(unit="d1")).split is None


def test_how_fast_a_prefiller_is_is_learnt_while_prompts_wait_there() -> None:
    router, now = router_of("p1", "d1"), 3.0
    waiting = [picked(router, leg_of(ask_of(8000, seed), "p1")) for seed in range(SURE + 2)]
    for lease in waiting:
        now += 0.5
        lease.commit(now)
        router.board.close(lease, now)
    assert router.board.units["p1"].costs.is_sure()
    assert router.board.units["p1"].costs.rates.prefill_tokens_s.value == pytest.approx(16_000, rel=0.2)


def test_what_a_busy_decoder_delays_is_not_learnt_as_a_slow_link() -> None:
    router = router_of("p1", "d1")
    pairs, link = router.board.pairs, router.board.pairs.link("p1", "d1")
    link.learn(4000, 0.0, 2.0)
    before = link.tokens_s
    own = router.board.open("d1", ask_of(8000), 3.0, retry=False)
    pairs.apply(SplitStep(TRANSFERRED, "p1", "d1", 4000, 5.0), 8.0)
    assert (link.tokens_s, link.transferred) == (before, 2)
    own.commit(8.0)
    pairs.apply(SplitStep(TRANSFERRED, "p1", "d1", 4000, 5.0), 9.0)
    assert link.tokens_s < before


@given(
    st.lists(st.sampled_from(["p", "d", "b"]), min_size=2, max_size=6),
    st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 5)), min_size=1, max_size=30),
)
def test_a_split_has_two_units_of_fitting_roles_and_never_costs_more(
    letters: list[str], prompts: list[tuple[int, int]]
) -> None:
    names = [f"{letter}{number}" for number, letter in enumerate(letters)]
    router, now = router_of(*names), 3.0
    for tokens, seed in prompts:
        now += 0.01
        found = router.pick(ask_of(tokens, seed), now)
        if isinstance(found, Refusal):
            assert all(letter == "p" for letter in letters)
            continue
        assert found.unit[0] != "p"
        if found.split is not None:
            assert found.split.prefiller[0] != "d"
            assert found.split.prefiller != found.unit
            assert found.split.limit_s > found.split.transfer_s > 0.0
        if seed % 2:
            found.commit(now)


# The link of a pair: avoided after a failure, tried again, and priced by what transfers took.


def test_the_first_failure_closes_a_link_and_one_request_at_a_time_tries_it() -> None:
    link = TransferLink()
    assert link.is_open(0.0)
    # Requests that fail together count once.
    assert [link.fail("cut", 10.0) for _ in range(10)] == [True] + [False] * 9
    assert (link.failures, link.failed) == (1, 10)
    assert not link.is_open(10.0 + AVOID_S - 0.1)
    assert link.is_open(10.0 + AVOID_S)
    link.use(10.0 + AVOID_S)
    assert not link.is_open(10.0 + AVOID_S), "one request at a time tries it"
    assert link.is_open(10.0 + 2 * AVOID_S)
    link.learn(1000, 0.1, 20.0)
    assert link.is_open(20.0)
    assert link.failures == 0
    link = TransferLink()
    assert link.seconds(FIRST_TOKENS_S, 0.0) > 1.0, "it has the speed of a usual one"
    link.use(0.0)
    assert not link.is_open(1.0)
    link.learn(1000, 8.0, 8.0)
    assert link.is_open(8.0)
    # How long its engines took to connect says nothing about its speed.
    assert link.seen == 0


def test_a_slow_link_is_dear_and_is_forgiven_after_a_while() -> None:
    link = TransferLink()
    usual_s = link.seconds(10_000, 0.0)
    for at in range(9):
        link.learn(10_000, 5.0, float(at))
    assert link.seconds(10_000, 8.0) > 10 * usual_s
    assert link.is_open(8.0)
    assert link.seconds(10_000, 9.0 + STALE_S) == usual_s


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 300.0), st.floats(0.0, 1e6)), max_size=50))
def test_it_is_never_avoided_for_longer_than_the_bound(steps: list[tuple[bool, float, float]]) -> None:
    link, now = TransferLink(), 0.0
    for has_failed, wait_s, tokens in steps:
        now += wait_s
        if has_failed:
            link.fail("x", now)
        else:
            link.learn(int(tokens), wait_s, now)
        assert link.avoided_until - now <= AVOID_MOST_S + 1e-6
        assert 0.0 < link.seconds(tokens, now) < float("inf")
    assert link.is_open(now + AVOID_MOST_S + 1e-6)
