"""What a tick of the gate costs: what changes, and not what is there."""

from __future__ import annotations

import asyncio
from statistics import fmean, median

from cellgate.router.nouns import Ask
from tests.cost.bench import Bench, counted

WORKING = 4
TICKS = 60
"""15 s: what is done every 10 s is among them."""


def ticks(units: int) -> list[int]:
    """Bytecodes of each tick of a gate of so many units, of which a few work."""
    loop = asyncio.new_event_loop()
    bench, found = Bench(loop, units), []
    board, now = bench.plane.board, loop.time() + 1.0
    for name in list(board.units)[:WORKING]:
        board.open(name, Ask("m", stream=True), now, retry=False)
    for number in range(TICKS + 8):
        now += 0.25
        for name in list(board.units)[:WORKING]:
            board.units[name].progress_at = now - 0.01
        with counted() as counts:
            for look in bench.plane.ticker.looks:
                look(now)
        if number >= 8:
            found.append(counts.total())
    bench.close()
    loop.close()
    return found


def test_a_tick_with_a_thousand_units_costs_what_those_cost_that_work() -> None:
    few, many = ticks(WORKING), ticks(1000)
    print(
        f"a tick: {median(few):.0f} and {median(many):.0f}; on average {fmean(few):.0f} and {fmean(many):.0f}"
    )
    assert median(many) <= 1.2 * median(few)
    # What is usual of all, and what they learn of each other, is looked at every 10 s: all units at once.
    assert fmean(many) <= 4.0 * fmean(few)
