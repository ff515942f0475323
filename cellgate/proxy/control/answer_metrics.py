"""Metrics of builds and of known answers, by unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cellgate.proxy.control.answer_check import AnswerCheck
from cellgate.proxy.metrics.families import counter, gauge
from cellgate.router.board import Board

_RESULTS = ("same", "differs")


class AnswerMetrics(Collector):
    """What units say that they are, and whether they say the same."""

    def __init__(self, board: Board, check: AnswerCheck) -> None:
        self._board = board
        self._check = check

    def collect(self) -> Iterator[Metric]:
        """All families."""
        states, labels = list(self._board), ("unit", "cell")
        yield gauge(
            "unit_build_info",
            "Constant 1; the labels are what the unit's engine says that it is.",
            (*labels, "engine", "version", "fingerprint"),
            (((s.unit.name, s.unit.cell, s.engine, s.build.version, s.build.fingerprint), 1) for s in states),
        )
        yield gauge(
            "unit_other_builds",
            "1 while another unit of its cell and model says that it is another build.",
            labels,
            (((s.unit.name, s.unit.cell), bool(s.other_builds)) for s in states),
        )
        yield gauge(
            "unit_answers_differ",
            "1 while its answers to the known prompt differ, whether or not it is out for them.",
            labels,
            (((s.unit.name, s.unit.cell), s.has_odd_answers()) for s in states),
        )
        counts, none = self._check.counts, Counter[str]()
        yield counter(
            "known_answers",
            "Answers of a unit to the known prompt, by result.",
            ("unit", "result"),
            (
                ((s.unit.name, result), count)
                for s in states
                for result in _RESULTS
                if (count := counts.get(s.unit.name, none)[result])
            ),
        )
        yield counter(
            "unit_corrupted_requests",
            "Requests that the unit's engine reports as corrupted (NaN), since this gate knows the unit.",
            ("unit",),
            (((s.unit.name,), count) for s in states if (count := self._check.corrupted_counts[s.unit.name])),
        )
