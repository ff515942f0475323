"""What a scrape of a gate costs: bytecodes of the page of metrics, and of each turn of the loop in it."""

from __future__ import annotations

import asyncio

from cellgate.proxy.observe.counters import Metrics
from tests.cost.bench import Bench, counted

UNITS = 1000
A_UNIT, A_TURN = 5_500, 400_000
"""At most. A turn of so many takes some 15 ms."""


async def turns_of(metrics: Metrics) -> list[int]:
    """Bytecodes of each turn of one scrape."""
    page, found = metrics.render(), list[int]()
    while True:
        with counted() as counts:
            try:
                page.send(None)
            except StopIteration:
                return found
        found.append(counts.total())


def test_a_scrape_of_a_thousand_units_holds_no_stream_up() -> None:
    loop = asyncio.new_event_loop()
    bench = Bench(loop, UNITS)
    for state in bench.plane.board:
        state.gaps_ms[20] = state.gaps_ms[40] = 100
    # The first one makes what counts for each unit.
    _, found = (loop.run_until_complete(turns_of(bench.plane.metrics)) for _ in range(2))
    bench.close()
    loop.close()
    print(f"a scrape: {sum(found) / UNITS:.0f} bytecodes a unit, at most {max(found)} in a turn")
    assert sum(found) <= A_UNIT * UNITS
    assert max(found) <= A_TURN
