"""The planner asks a unit that runs."""

from __future__ import annotations

import pytest

from cellgate.extras.planner.capacity import LiveError, ask_cache
from loadtests.simunit.process import SimUnit


def test_a_plan_asks_a_unit_for_the_size_of_its_cache() -> None:
    with SimUnit.start("plan") as unit:
        assert ask_cache(unit.url).tokens > 0
        with pytest.raises(LiveError, match="answers 404"):
            ask_cache(unit.url + "/v1")
