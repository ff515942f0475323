"""Which canaries need a new connection."""

from __future__ import annotations

import pytest

from cellgate.probes.base import Trouble
from cellgate.router.nouns import Verdict
from tests.patient import FakePatient
from tests.unit.probes.test_canary import TOKEN, fly


@pytest.mark.parametrize("verdict", Verdict)
def test_a_suspicion_is_examined_on_a_new_connection(verdict: Verdict) -> None:
    context = FakePatient(lambda _: TOKEN, verdict=verdict)
    fly(context)
    assert context.asked[0].fresh is (verdict is not Verdict.UP)


def test_a_canary_that_timed_out_is_repeated_on_a_new_connection() -> None:
    context = FakePatient(lambda _: Trouble.TIMEOUT)
    fly(context)
    fly(context)
    assert [asked.fresh for asked in context.asked] == [False, True]
