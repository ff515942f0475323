"""What a request costs where there are many units: hardly more than where there are few."""

from __future__ import annotations

import asyncio

from tests.cost.bench import Bench
from tests.cost.test_hot_path import begun

MOST = 1.25
KNOWN = 15
"""So many rounds of requests before: what a unit costs is reckoned once."""


async def test_a_request_with_a_thousand_units_costs_little_more_than_with_four() -> None:
    each = {}
    for units in (4, 1000):
        bench = Bench(asyncio.get_running_loop(), units)
        for _ in range(KNOWN):
            begun(bench)
        each[units] = begun(bench).each
        bench.close()
    print(f"a request: {each[4]:.0f} and {each[1000]:.0f} bytecodes")
    assert each[1000] <= MOST * each[4]
