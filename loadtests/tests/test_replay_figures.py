"""The replay's figures, its table, and what it takes for an answer."""

from __future__ import annotations

import pytest

from loadtests.gym.nouns import Request
from loadtests.gym.prompts import Text
from loadtests.replay import shapes
from loadtests.replay.client import Answer, read_answer
from loadtests.replay.figures import Result, as_text, figures_of, quantile, table
from loadtests.replay.shapes import DONE


def answer(
    ttft_s: float, e2e_s: float = 0.0, *, unit: str = "unit-0", due_s: float = 0.0, **rest: object
) -> Answer:
    fields = {"answer_tokens": 11, "prompt_tokens": 100, "cached_tokens": 20, "late_s": 0.0} | rest
    return Answer(due_s=due_s, ttft_s=ttft_s, e2e_s=max(e2e_s, ttft_s), unit=unit, **fields)  # type: ignore[arg-type]


def result(router: str, ttft_s: float, seed: int = 1, cell: str = "chat") -> Result:
    return Result(cell, router, seed, figures_of([answer(ttft_s, 2 * ttft_s, unit="unit-0")], 1))


def test_figures_of_whole_answers() -> None:
    answers = [
        answer(1.0, 1.5),
        answer(3.0, 3.5, unit="unit-1"),
        answer(1.0, 3.0),
        answer(2.0, 2.0, cached_tokens=60),
    ]
    found = figures_of(answers, units=2)
    assert found.ttft_mean_s == pytest.approx(1.75)
    assert (found.ttft_p50_s, found.ttft_p99_s, found.whole_p99_s) == (1.0, 3.0, 3.5)
    assert (found.whole_mean_s, found.whole_p50_s) == (2.5, 2.0)
    assert found.tpot_mean_s == pytest.approx((0.05 + 0.05 + 0.2 + 0.0) / 4)
    # The second comes too late, the third is too slow afterwards.
    assert found.goodput == 0.5
    assert found.hits == pytest.approx(120 / 400)
    assert found.per_unit == (3, 1)


def test_the_refused_and_the_broken_are_missed() -> None:
    refused = answer(0.1, trouble="status 429", is_refused=True)
    found = figures_of([answer(1.0), refused, answer(0.1, trouble="broken off")], units=1)
    assert found.goodput == found.refused == found.broken == pytest.approx(1 / 3)
    assert found.ttft_mean_s == 1.0


def test_nothing_answered_gives_figures_all_the_same() -> None:
    found = figures_of([answer(0.1, trouble="status 503", is_refused=True)], units=4)
    assert (found.goodput, found.refused, found.ttft_mean_s) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 1), (0.5, 5), (0.9, 9), (0.91, 10), (0.99, 10), (1.0, 10)]
)
def test_quantile(share: float, value: float) -> None:
    assert quantile(range(1, 11), share) == value


def test_the_table_has_means_and_the_ratio_of_the_gate() -> None:
    results = [result("gate", 1.0), result("gate", 1.2, 2), result("peer", 2.2)]
    head, gate, peer = table(results, "gate")
    assert gate[:3] == ("chat", "gate", "1.100")
    assert (gate[-4:-1], gate[-1]) == (("1.00 x", "1.00 x", "1"), "0 ms")
    assert peer[-4:-2] == ("0.50 x", "0.50 x")
    assert len(head) == len(gate) == len(peer)


def test_who_is_not_installed_has_a_row_that_says_so() -> None:
    rows = table([result("gate", 1.0), Result("chat", "peer", 1, None, missing="not installed")], "gate")
    assert rows[2] == ("chat", "peer", "not installed")
    assert "| chat | peer   | not installed" in as_text(rows)


def test_a_disturbed_run_is_marked() -> None:
    late = Result("chat", "gate", 1, figures_of([answer(1.0)], 1), late_p99_ms=50.0)
    assert table([late], "gate")[1][-1] == "50 ms, disturbed"


def request(tokens: int, *, usage: bool = True, stream: bool = True) -> Request:
    prompt = Text().extend(10)
    return Request(0, 0.0, prompt, prompt.extend(tokens), usage=usage, stream=stream)


def test_an_answer_is_whole_only_with_all_its_tokens_and_its_end() -> None:
    text = shapes.event("unit-1", False, 2, last=True).split(b"\r\n")[1]
    used = b'data: {"choices":[],"usage":{"prompt_tokens":10},"system_fingerprint":"unit-1"}\n\n'
    assert read_answer(text + used + DONE, request(2)) == ("", {"prompt_tokens": 10}, "unit-1")
    assert read_answer(text + DONE, request(2, usage=False)) == ("", {}, "unit-1")
    assert read_answer(text + used, request(2))[0].startswith("broken off")
    assert read_answer(text + used + DONE, request(3))[0] == "2 tokens for 3"
    assert (
        read_answer(text + used.replace(b"10", b"9") + DONE, request(2))[0] == "a prompt of 9 tokens for 10"
    )
    error = b'data: {"error":{"message":"lost"}}\n\n'
    assert read_answer(text + error + DONE, request(2))[0].startswith("broken off")


def test_a_plain_answer_is_whole_with_all_its_tokens() -> None:
    body = b'{"choices":[{"text":"word word "}],"usage":{"prompt_tokens":10},"system_fingerprint":"unit-0"}'
    assert read_answer(body, request(2, stream=False)) == ("", {"prompt_tokens": 10}, "unit-0")
