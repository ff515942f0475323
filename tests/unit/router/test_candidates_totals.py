"""What an offer says in short is what a quote says at length."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.router.cost import Cost, Expected
from cellgate.router.nouns import Load
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
    total_s, backlog_s = state.costs.estimate(ask, held, expected, NOW + 1.5)
    quote = state.costs.quote(ask, held, expected, NOW + 1.5)
    assert total_s == pytest.approx(quote.terms[0])
    assert backlog_s == pytest.approx(state.costs.backlog_s(NOW + 1.5))
    job = state.costs.add("it", ask, expected, held, NOW + 1.5)
    assert job.ttft_s == pytest.approx(Cost(*quote.terms).ttft_s)
    assert (job.prompt_tokens, job.held_blocks) == (int(quote.prompt_tokens), held)
