"""What the gate predicts of one unit more comes true in the gym."""

from __future__ import annotations

import pytest

from loadtests.gym.scaling import result


@pytest.mark.parametrize("load", ["azure_conv", "bursts"])
def test_what_one_more_unit_brings_comes_true(load: str) -> None:
    found = result(load, 1.0, requests=500)
    assert found.predicted.more is not None
    assert found.true.more is not None
    assert 0.5 < found.predicted.more / found.true.more < 2.0
    assert found.true.now is not None
    assert found.predicted.more < found.true.now
