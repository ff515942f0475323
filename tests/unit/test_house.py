"""Rooms in their order, no circles, one name for one thing, nothing too long (`python -m tests.house`)."""

from __future__ import annotations

import pytest

from tests.house.open import OPEN
from tests.house.rules import RULES


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_is_kept_but_where_it_is_known_not_to_be(rule: str) -> None:
    found = {finding.key: finding.detail for finding in RULES[rule]()}
    known = set(OPEN.get(rule, ()))
    assert {key: detail for key, detail in found.items() if key not in known} == {}
    assert known - found.keys() == set(), "mended: take it out of tests/house/open.py"
