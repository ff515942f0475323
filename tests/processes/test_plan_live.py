"""`cellgate plan` asks a unit for the size of its cache."""

from __future__ import annotations

import pytest

from cellgate.proxy.extras.planner.capacity import LiveError, ask_cache
from loadtests.simunit.process import SimUnit


def test_a_simulated_unit_is_asked() -> None:
    with SimUnit.start("plan") as unit:
        assert ask_cache(unit.url).tokens > 0
        with pytest.raises(LiveError, match="answers 404"):
            ask_cache(unit.url + "/v1")
