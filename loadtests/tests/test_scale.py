"""What the table of costs by units says: passes, fails, or proves nothing."""

from __future__ import annotations

from loadtests.scale import Scale, problems

FEW = Scale("cellgate", 4, 0.006, 170.0, 30.0, 80.0, 0.0)
MANY = FEW._replace(units=1000, request_us=200.0, token_us=33.0)
SMG = Scale("smg", 1000, 0.04, 1_574.0, 44.0, 1_041.0, 0.0)


def test_what_grows_with_units_fails_and_what_was_not_measured_proves_nothing() -> None:
    assert problems([FEW, MANY, SMG]) == []
    dear = MANY._replace(request_us=423.0, token_us=None)
    assert problems([dear, FEW]) == [
        "a request with 1000 units is 2.49 times that with 4, the limit is 1.25",
        "proves nothing: a token was not measured",
    ]
    assert problems([MANY, SMG]) == [
        "proves nothing: the gate was measured with fewer than two numbers of units"
    ]


def test_a_first_token_is_no_later_than_that_of_smg() -> None:
    assert problems([FEW, MANY, SMG._replace(ttft_ms=79.0)]) == ["TTFT p99 is 80 ms, that of SMG is 79 ms"]
