"""Rooms in their order, no circles, one meaning for each name, nothing too long (`python -m tests.house`)."""

from __future__ import annotations

import pytest

from tests.house.rules import RULES


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_is_kept(rule: str) -> None:
    assert RULES[rule]() == []
