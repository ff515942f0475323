"""What an offer says in short is what a quote says at length."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.router.cost import Cost, Expected
from cellgate.router.nouns import Load
from cellgate.router.pick import Bounds, rows_of
from tests.unit.router.test_dry_run import NOW, PROMPT, router_of

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
    state = board.units[f"u{number}"]
    for at, (prompt, shows) in enumerate(jobs):
        lease = board.open(state.unit.name, PROMPT._replace(prompt_bytes=prompt, blocks=()), NOW, retry=False)
        if shows:
            lease.commit(NOW + 0.1 * at)
    state.costs.prefixes.record(PROMPT.blocks[:4])
    if has_report:
        board.report(Load(state.unit.name, NOW, running=9, waiting=2, kv_use=0.9, kv_tokens=30_000))
    board.forecast(NOW + 1.0)
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
    quote = state.costs.quote(ask, held, expected, NOW + 1.5)
    assert row.cost_s == pytest.approx(quote.terms[0])
    job = state.costs.add("it", ask, expected, held, NOW + 1.5)
    assert job.ttft_s == pytest.approx(Cost(*quote.terms).ttft_s)
    assert (job.prompt_tokens, job.held_blocks) == (int(quote.prompt_tokens), held)
