"""What a tick of the gate costs: what changes, and not what is there."""

from __future__ import annotations

import asyncio
from statistics import median

from cellgate.router.nouns import Ask
from tests.cost.bench import Bench, costs_what_works, counted

WORKING = 4
TICKS = 60
BEGIN = 40
"""In the ticks of the first 10 s all units are looked at for the first time, some on each, and their nodes'
software is compared.
"""
ROUND = 960
"""Four minutes: all that is done now and then is among them."""


def ticks(units: int, count: int, *, working: int = WORKING, silent: bool = False) -> list[int]:
    """Bytecodes of each tick of a gate of so many units, of which a few work, or only seem to."""
    loop = asyncio.new_event_loop()
    bench, found = Bench(loop, units), []
    board, now = bench.plane.board, loop.time() + 1.0
    for name in list(board.units)[:working]:
        board.open(name, Ask("m", stream=True), now, retry=False)
    for number in range(count + BEGIN):
        now += 0.25
        for name in list(board.units)[: 1 if silent else working]:
            board.units[name].progress_at = now - 0.01
        with counted() as counts:
            for look in bench.plane.ticker.looks:
                look(now)
        if number >= BEGIN:
            found.append(counts.total())
    bench.close()
    loop.close()
    return found


def test_a_tick_with_a_thousand_units_costs_what_those_cost_that_work() -> None:
    few, many = ticks(WORKING, TICKS), ticks(1000, ROUND)
    costs_what_works("a tick", few, many)
    # The page of /readyz is written whole, once in four minutes.
    assert max(many) <= 80 * median(few)


def test_a_tick_looks_at_some_of_many_units_at_work_and_only_asks_whether_others_stand_still() -> None:
    few, many = ticks(64, TICKS, working=64), ticks(1000, TICKS, working=256)
    print(f"a tick with 64 and 256 units at work: {median(few):.0f} and {median(many):.0f} bytecodes")
    assert median(many) <= median(few)


def test_silent_units_do_not_each_walk_their_pool() -> None:
    few, many = ticks(WORKING, TICKS, silent=True), ticks(1000, TICKS, silent=True)
    print(f"a tick with silent units: {median(few):.0f} and {median(many):.0f}")
    assert median(many) <= 1.2 * median(few)


def test_a_flip_among_a_thousand_units_writes_what_has_changed() -> None:
    loop = asyncio.new_event_loop()
    bench, found = Bench(loop, 1000), []
    board, page = bench.plane.board, bench.plane._page
    board.attention.configure(board.units, 0.0)
    for _ in range(2):
        board.drain("u7", drained=not board.units["u7"].drained)
        with counted() as counts:
            page.publish()
        found.append(counts.total())
    shown = page._made[1]
    bench.close()
    loop.close()
    print("the page of a flip, the first and the next:", found)
    assert found[1] <= 0.35 * found[0]
    assert shown.count(b'"usable": true') == len(board.units)
