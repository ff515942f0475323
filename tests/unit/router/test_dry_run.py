"""What would become of an ask: the same as becomes of it, and what an offer says in short."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.proxy.control.explain import DryRun, cost_of, dry_run
from cellgate.router.cost import Cost, Expected
from cellgate.router.cost_model import SURE
from cellgate.router.nouns import Ask, Cell, Evidence, Load, Refusal, Rules, Sign, Strength, Unit
from cellgate.router.pick import Bounds, Router, rows_of
from cellgate.router.prefix import PREFIX_MAX_BLOCKS
from cellgate.router.queue import FairRules
from cellgate.router.unit_state import Lease
from tests.unit.router.fleets import board_up, router_over

NOW = 100.0
PROMPT = Ask("m", stream=True, prompt_tokens=1000, prompt_bytes=4000, blocks=(1, 2, 3, 4, 5, 6, 7))


def router_of(count: int = 4, policy: str = "prefix_affinity", rules: FairRules | None = None) -> Router:
    """Units u0, u1… with two places each, UP and of a known speed."""
    units = (Unit(f"u{n}", "c", f"http://u{n}:1", ("m",), max_in_flight=2) for n in range(count))
    board = board_up(*units, rules=Rules(slow_start_s=0.001), cells=(Cell("c"),), at=NOW - 5.0)
    rates = [state.costs.rates for state in board]
    for n, rate in enumerate(rates, start=1):
        board.units[f"u{n - 1}"].last_lease_at = NOW
        rate.followed = rate.prefill_tokens_s.seen = SURE
        rate.prefill_tokens_s.value = 1000.0 * n
    board.tick(NOW)
    for rate in rates:
        # What its peers have does not count.
        rate.prefill_tokens_s.usual = 0.0
    board.update_costs(NOW)
    return router_over(board, policy, rules or FairRules(backlog_s=100.0))


def look(router: Router, ask: Ask = PROMPT, **options: Any) -> DryRun:
    return dry_run(router, ask, NOW, random.Random(1), **options)


def fill(router: Router, *names: str) -> None:
    for name in names:
        for _ in range(2):
            router.board.open(name, PROMPT, NOW, retry=False)


def reasons(found: DryRun) -> dict[str, str]:
    return {row.unit_state.unit.name: row.why_not for row in found.units}


def snapshot(router: Router) -> object:
    """All that a pick could change."""
    policy, units = router.policy, list[object]()
    for state in router.board:
        backlog, held = state.costs.backlog, state.costs.prefixes.recent(PREFIX_MAX_BLOCKS)
        units.append((list(state.leases), held, backlog.queued_tokens, backlog.batch, state.last_lease_at))
    turns = repr(getattr(policy, "_cursor", None)), getattr(policy, "_turn", None)
    return router._rng.getstate(), turns, len(router.queue), router.board.in_flight, units


@pytest.mark.parametrize("policy", ["prefix_affinity", "session", "round_robin"])
@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    before=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 7)), max_size=6),
    out=st.sets(st.integers(0, 3), max_size=3),
    user=st.sampled_from(["", "me", "you"]),
)
def test_it_says_what_happens_next_and_changes_nothing(
    policy: str, before: list[tuple[int, int]], out: set[int], user: str
) -> None:
    router = router_of(policy=policy)
    for number, blocks in before:
        state = router.board.units[f"u{number}"]
        if state.has_room(NOW, 0.0):
            router.board.open(f"u{number}", PROMPT._replace(blocks=PROMPT.blocks[:blocks]), NOW, retry=False)
    for number in out:
        router.board.drain(f"u{number}", drained=True)
    ask = PROMPT._replace(session=user)
    was = snapshot(router)
    found = look(router, ask)
    assert snapshot(router) == was
    picked = router.pick(ask, NOW)
    assert (picked.unit if isinstance(picked, Lease) else picked) == (found.refusal or found.best)


def test_the_candidates_stand_in_their_rank_with_every_term_and_what_is_cached() -> None:
    router = router_of()
    fill(router, "u3")
    router.board.units["u0"].costs.prefixes.record(PROMPT.blocks[:1])
    found = look(router)
    assert [row.unit_state.unit.name for row in found.units] == ["u2", "u1", "u0", "u3"]
    assert [round(row.cached_tokens) for row in found.units] == [0, 0, 128, 7 * 128]
    first = found.units[0].cost
    assert first.total_s == pytest.approx(sum(first[1:]))
    assert first.prefill_s == pytest.approx(1000 / 3000)
    assert reasons(found) == {"u0": "", "u1": "", "u2": "", "u3": "full"}
    # One that has just come up gets one at a time, and more by chance.
    router.board.rules = replace(router.board.rules, slow_start_s=1000.0)
    for state in router.board:
        state.up_since = NOW if state.unit.name == "u1" else -1e6
    assert reasons(look(router))["u1"] == ""
    router.board.open("u1", PROMPT, NOW, retry=False)
    assert reasons(look(router))["u1"] == "slow_start"


def test_each_unit_that_is_no_candidate_says_why() -> None:
    router = router_of(7)
    board = router.board
    board.drain("u0", drained=True)
    board.observe(Evidence("u1", Sign.BAD, Strength.FATAL, "test", "gone", NOW))
    board.suspect_restart("u2", NOW)
    board.observe(Evidence("u3", Sign.BAD, Strength.STRONG, "test", "odd", NOW))
    board.cool_down("u4", NOW + 1.0)
    board.units["u5"].models = frozenset({"other"})
    found = look(router, tried=["u6"])
    why = ["drained", "down", "restart_suspected", "suspect", "", "model", "tried"]
    assert reasons(found) | {"u4": ""} == {f"u{number}": reason for number, reason in enumerate(why)}
    # Nothing is left that has room and has not just erred.
    assert found.best == "u4"
    assert reasons(look(router, PROMPT._replace(unit="u6")))["u4"] == "bound_elsewhere"


def test_who_would_wait_is_told_for_how_long() -> None:
    router, new = router_of(2), PROMPT._replace(blocks=())
    fill(router, "u0", "u1")
    found = look(router)
    assert (found.refusal, found.wait_s) == (Refusal.FULL, 0.0)
    router.wait(new._replace(prompt_bytes=12_000, prompt_tokens=3000), NOW, frozenset(), lambda _: None)
    longer = look(router, new._replace(prompt_bytes=40_000, prompt_tokens=10_000)).wait_s
    assert longer == pytest.approx(3000 / 3000)
    # Short work of another tenant shares the turn: it waits for no more than it brings itself.
    assert look(router, new._replace(tenant="other")).wait_s == pytest.approx(1000 / 3000)


def test_nobody_overtakes_those_who_wait_but_by_the_priority_of_a_key_or_who_have_tried() -> None:
    router = router_of(1)
    fill(router, "u0")
    router.wait(PROMPT._replace(payer="address 192.0.2.1"), NOW, frozenset(), lambda _: None)
    first = PROMPT._replace(priority=-100)
    assert look(router, first).wait_s == 0.0
    assert look(router, first._replace(payer="address ")).wait_s != 0.0
    router.board.close(next(iter(router.board.units["u0"].leases)), NOW)
    assert look(router).refusal is Refusal.FULL
    assert look(router).wait_s is not None
    assert look(router, tried=["another"]).refusal is None


def test_a_full_queue_a_deadline_that_cannot_be_met_and_a_lack_of_units_refuse() -> None:
    router = router_of(2, rules=FairRules(limit=0, backlog_s=100.0))
    fill(router, "u0", "u1")
    assert look(router)[1:3] == (Refusal.FULL, None)
    router = router_of(2)
    assert look(router, PROMPT._replace(deadline_at=NOW + 0.1))[:3] == ("u1", Refusal.LATE, None)
    assert look(router, PROMPT._replace(deadline_at=inf)).refusal is None
    assert look(router, PROMPT._replace(model="none"))[:3] == (None, Refusal.UNKNOWN_MODEL, None)
    for name in ("u0", "u1"):
        router.board.suspect_restart(name, NOW)
    assert look(router)[:3] == (None, Refusal.UNSURE, 0.0)
    for name in ("u0", "u1"):
        router.board.drain(name, drained=True)
    assert look(router)[:3] == (None, Refusal.NO_UNIT, None)


# What an offer says in short is what a quote says at length.

sizes = st.integers(0, 40_000)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(sizes, st.booleans()), max_size=6),
    sizes,
    st.integers(0, 7),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([1.0, 100.0, 2000.0]),
    st.integers(0, 7),
)
def test_the_short_way_gives_the_same_total(
    jobs: list[tuple[int, bool]],
    size: int,
    blocks: int,
    number: int,
    has_report: bool,
    answer_tokens: float,
    shared: int,
) -> None:
    board = router_of().board
    state, expected = board.units[f"u{number}"], Expected(50.0, shared, 0.25)
    state.costs.kv_tokens = 20_000
    board.update_costs(NOW)
    for at, (prompt, shows) in enumerate(jobs):
        ask = PROMPT._replace(prompt_bytes=prompt, blocks=PROMPT.blocks[: min(blocks, prompt // 512)])
        held = state.costs.prefixes.match(ask.blocks)
        quoted = state.costs.estimate(ask, held, expected, NOW + 0.1 * at).terms
        lease = board.open(state.unit.name, ask, NOW + 0.1 * at, retry=False, expected=expected)
        # What a lease was taken to cost is what was quoted before. A bet is in whole tokens.
        assert cost_of(lease) == pytest.approx(quoted, abs=0.01)
        if shows:
            lease.commit(NOW + 0.1 * at + 0.05)
    state.costs.prefixes.record(PROMPT.blocks[:4])
    if has_report:
        board.report(Load(state.unit.name, NOW, running=9, waiting=2, kv_use=0.9, kv_tokens=30_000))
    board.update_costs(NOW + 1.0)
    ask = PROMPT._replace(prompt_bytes=size, blocks=PROMPT.blocks[: min(blocks, size // 512)])
    held = state.costs.prefixes.match(ask.blocks)
    expected = Expected(answer_tokens, max(shared, held), 0.25)
    state.limit = 100.0
    known, backlog_s = [(state.unit.name, state, held)], state.costs.backlog_s(NOW + 1.5)
    # So much is queued there, and no less: with a smaller limit it has no room.
    (row,), is_any_full = rows_of(known, ask, expected, Bounds(backlog_s * 1.000001 + 1e-9), NOW + 1.5)
    assert row.has_room
    assert not is_any_full
    if backlog_s > 1e-6:
        assert not rows_of(known, ask, expected, Bounds(backlog_s * 0.999999), NOW + 1.5)[0][0].has_room
    quote = state.costs.estimate(ask, held, expected, NOW + 1.5)
    assert row.cost_s == pytest.approx(quote.terms[0])
    job = state.costs.add("it", ask, expected, held, NOW + 1.5)
    assert job.ttft_s == pytest.approx(Cost(*quote.terms).ttft_s)
    assert (job.prompt_tokens, job.cached_blocks) == (int(quote.prompt_tokens), held)
