"""What Envoy is told beside a status."""

from __future__ import annotations

from cellgate.proxy.ingress.reports import (
    DEGRADED,
    FAIL_NOW,
    gate_is_degraded,
    readyz_headers,
    response_line,
    unit_headers,
)
from cellgate.router.board import Board
from cellgate.router.nouns import Evidence, Fleet, Rules, Sign, Strength, Unit
from cellgate.router.outliers import Outlier


def board(*names: str) -> Board:
    """Units that are all UP."""
    made = Board(Rules())
    made.configure(Fleet(units=tuple(Unit(name, "c", f"http://{name}") for name in names)), 0.0)
    for name in names:
        tell(made, name, Sign.GOOD)
    return made


def tell(on: Board, name: str, sign: Sign, strength: Strength = Strength.STRONG) -> None:
    on.observe(Evidence(name, sign, strength, "canary", "the test says so", 1.0))


def test_only_a_stopping_gate_asks_to_be_taken_out_at_once() -> None:
    here = board("a", "b")
    assert readyz_headers(here, stopping=False) == ()
    assert response_line(stopping=False) == b""
    for name in ("a", "b"):
        tell(here, name, Sign.BAD, Strength.FATAL)
        assert FAIL_NOW not in readyz_headers(here, stopping=False)
        assert unit_headers(here, name) == ()
    assert readyz_headers(here, stopping=True) == (FAIL_NOW,)
    assert response_line(stopping=True) == b"x-envoy-immediate-health-check-fail: 1\r\n"


def test_a_drained_unit_is_no_stopping_gate() -> None:
    here = board("a", "b")
    here.drain("a", drained=True)
    assert unit_headers(here, "a") == ()
    assert FAIL_NOW not in readyz_headers(here, stopping=False)


def test_a_gate_is_degraded_when_half_of_its_weight_is_gone() -> None:
    here = board("a", "b", "c", "d")
    tell(here, "a", Sign.BAD, Strength.FATAL)
    assert not gate_is_degraded(here)
    tell(here, "b", Sign.BAD, Strength.FATAL)
    assert readyz_headers(here, stopping=False) == (DEGRADED,)
    tell(here, "b", Sign.GOOD)
    tell(here, "b", Sign.GOOD)
    tell(here, "b", Sign.GOOD)
    assert readyz_headers(here, stopping=False) == ()


def test_a_gate_whose_only_unit_is_suspected_is_degraded() -> None:
    here = board("a")
    assert not gate_is_degraded(here)
    tell(here, "a", Sign.BAD)
    assert gate_is_degraded(here)


def test_a_gate_that_takes_itself_to_be_cut_off_is_degraded() -> None:
    here = board("a", "b")
    here.panic_at = 1.0
    assert gate_is_degraded(here)


def test_a_unit_is_degraded_when_suspected_in_doubt_or_slow() -> None:
    here = board("a", "b", "c", "d")
    tell(here, "a", Sign.BAD)
    here.suspect_restart("b", 2.0)
    here.units["c"].outlier = Outlier(0.4)
    assert [unit_headers(here, name) for name in "abcd"] == [(DEGRADED,), (DEGRADED,), (DEGRADED,), ()]
    assert unit_headers(here, "nobody") == ()
