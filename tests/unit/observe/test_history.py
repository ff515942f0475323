"""The last hour in samples: rates of what was counted, never below zero, never more than an hour."""

from __future__ import annotations

from cellgate.proxy.observe.exposition import SAMPLES, STEP_S, History
from tests.unit.observe.test_metrics import A1, A2, make, replace_record


def test_a_sample_has_the_rates_of_its_step() -> None:
    metrics, _ = make(A1)
    tokens = 100
    history = History(metrics, lambda: tokens, lambda: 3)
    history.tick(0.0)
    for ttft_s, status in ((0.2, 200), (0.4, 200), (None, 503)):
        metrics.finished(replace_record(ttft_s=ttft_s, status=status))
    metrics.finished(replace_record(route="health", ttft_s=None))
    tokens = 350
    history.tick(STEP_S / 2)
    history.tick(STEP_S)
    history.tick(2 * STEP_S)
    assert history.shown() == {
        "step_s": STEP_S,
        "requests": [0.3, 0.0],
        "failed": [0.1, 0.0],
        "ttft_s": [0.3, None],
        "tokens": [25.0, 0.0],
        "usable": [0, 0],
        "waiting": [3, 3],
    }


def test_before_the_first_sample_all_lists_are_empty() -> None:
    metrics, _ = make(A1)
    shown = History(metrics, int, int).shown()
    assert shown.pop("step_s") == STEP_S
    assert shown
    assert not any(shown.values())


def test_only_an_hour_is_kept_and_a_unit_that_leaves_makes_no_rate_negative() -> None:
    metrics, _ = make(A1, A2)
    history = History(metrics, int, int)
    metrics.finished(replace_record(unit="a2"))
    history.tick(0.0)
    del metrics.tallies["a2"]
    for step in range(1, SAMPLES + 10):
        history.tick(step * STEP_S)
    shown = history.shown()
    assert len(shown["requests"]) == SAMPLES
    assert set(shown["ttft_s"]) == {None}
