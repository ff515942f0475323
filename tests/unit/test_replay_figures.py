"""The replay's figures, its table, and the reference it is calibrated by."""

from __future__ import annotations

import pytest

from loadtests.replay.client import Answer, _read
from loadtests.replay.engine import Model
from loadtests.replay.figures import Cell, as_text, figures_of, quantile, saturation, table
from loadtests.replay.ideal import least_connections
from loadtests.replay.trace import Request


def answer(
    ttft_s: float, e2e_s: float = 0.0, *, unit: str = "a", due_s: float = 0.0, **rest: object
) -> Answer:
    fields = {"answer_tokens": 11, "prompt_tokens": 100, "cached_tokens": 20, "late_s": 0.0} | rest
    return Answer(due_s=due_s, ttft_s=ttft_s, e2e_s=max(e2e_s, ttft_s), unit=unit, **fields)  # type: ignore[arg-type]


def cell(router: str, ttft_s: float, seed: int = 1, load: float = 0.8) -> Cell:
    return Cell(router, load, seed, figures_of([answer(ttft_s)], 1))


def test_figures_of_whole_answers() -> None:
    answers = [
        answer(1.0, 1.5),
        answer(3.0, 3.5, unit="b"),
        answer(1.0, 3.0),
        answer(2.0, 2.0, cached_tokens=60),
    ]
    found = figures_of(answers, units=2)
    assert found.ttft_mean_s == pytest.approx(1.75)
    assert (found.ttft_p50_s, found.ttft_p99_s, found.e2e_p99_s) == (1.0, 3.0, 3.5)
    assert found.tpot_mean_s == pytest.approx((0.05 + 0.05 + 0.2 + 0.0) / 4)
    # The second comes too late, the third is too slow afterwards.
    assert found.goodput == 0.5
    assert found.hits == pytest.approx(120 / 400)
    assert found.imbalance == pytest.approx(200 / 140)


def test_the_refused_and_the_broken_are_missed() -> None:
    refused = answer(0.1, trouble="status 429", is_refused=True)
    found = figures_of([answer(1.0), refused, answer(0.1, trouble="broken off")], units=1)
    assert found.goodput == found.refused == found.broken == pytest.approx(1 / 3)
    assert found.ttft_mean_s == 1.0


def test_nothing_answered_gives_figures_all_the_same() -> None:
    found = figures_of([answer(0.1, trouble="status 503", is_refused=True)], units=4)
    assert (found.goodput, found.refused, found.ttft_mean_s) == (0.0, 1.0, 0.0)


def test_a_unit_without_an_answer_counts_as_imbalance() -> None:
    assert figures_of([answer(1.0), answer(1.0)], units=4).imbalance == 4.0


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 1), (0.5, 5), (0.9, 9), (0.91, 10), (0.99, 10), (1.0, 10)]
)
def test_quantile(share: float, value: float) -> None:
    assert quantile(range(1, 11), share) == value


def test_the_table_has_medians_ranges_and_the_ratio_to_the_gate() -> None:
    cells = [cell("gate", 1.0), cell("gate", 1.2, 2), cell("gate", 3.0, 3), cell("peer", 2.4)]
    head, gate, peer = table(cells, "gate")
    assert (gate[0], gate[1], gate[2]) == ("0.8", "gate", "1.20")
    assert gate[-3:] == ("1.00-3.00", "1.00 x", "0 ms")
    assert peer[-2] == "0.50 x"
    assert len(head) == len(gate) == len(peer)


def test_who_is_not_installed_has_a_row_that_says_so() -> None:
    rows = table([cell("gate", 1.0), Cell("peer", 0.8, 1, None, missing="not installed")], "gate")
    assert rows[2] == ("0.8", "peer", "not installed")
    assert "| 0.8  | peer   | not installed" in as_text(rows)


def test_a_disturbed_cell_is_marked() -> None:
    late = Cell("gate", 0.8, 1, figures_of([answer(1.0)], 1), late_p99_ms=50.0)
    assert table([late], "gate")[1][-1] == "50 ms, disturbed"


def test_loads_are_in_order() -> None:
    rows = table([cell("gate", 1.0, load=0.95), cell("gate", 1.0, load=0.6)], "gate")
    assert [row[0] for row in rows[1:]] == ["0.6", "0.95"]


def test_saturation_is_the_rate_of_completions_over_that_of_arrivals() -> None:
    # 101 requests that arrive one a second, and are answered two a second.
    answers = [answer(1.0, due_s=0.0, e2e_s=1.0 + 0.5 * n) for n in range(101)]
    assert saturation(answers, span_s=100.0) == pytest.approx(2.0)


def test_least_connections_goes_to_the_emptiest_and_in_turn() -> None:
    requests = [Request(0.0, 2800, 1, tuple(range(n, n + 6))) for n in (0, 10, 20)]
    answers = least_connections([*requests, Request(0.3, 10, 1, (99,))], 1.0, [Model()] * 2)
    assert sorted(each.unit for each in answers) == ["unit-0", "unit-0", "unit-1", "unit-1"]
    assert answers[-1].unit == "unit-1"
    assert answers[0].ttft_s == pytest.approx(0.008 + 2800 / 14_000)


def test_an_answer_is_whole_only_with_its_usage_and_its_end() -> None:
    usage = b'data: {"usage":{"completion_tokens":2},"system_fingerprint":"unit-1"}\n\n'
    assert _read(usage + b"data: [DONE]\n\n", 2) == ("", {"completion_tokens": 2}, "unit-1")
    assert _read(usage, 2)[0].startswith("broken off")
    assert _read(usage + b"data: [DONE]\n\n", 3)[0] == "2 tokens for 3"
    error = b'data: {"error":{"message":"lost"}}\n\ndata: [DONE]\n\n'
    assert _read(error, 2)[0].startswith("broken off")
