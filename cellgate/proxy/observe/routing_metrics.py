"""One family of histograms that are kept for each unit and shown for each cell, or also for each unit.

A histogram of each unit is 20 to 25 series; a gate of 120 units would show 15,000 of them, which nobody looks
at. What units counted that have left stays in the sum of their cell: Prometheus takes a sum that falls for a
restart of the gate, and what is left of it for new observations.

In this order: `RoutingMetrics`, `_Tally`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from operator import add
from typing import Generic, NamedTuple, TypeVar

from prometheus_client import Metric

from cellgate.proxy.observe.counters import TTFT_BOUNDS_S, Counted, Exemplars, Histogram, cumulated
from cellgate.proxy.observe.families import counter, gauge, histogram, one_gauge, summary
from cellgate.router.board import Board
from cellgate.router.cost_model import Usage
from cellgate.router.queue import Queue
from cellgate.router.unit_state import Lease

T = TypeVar("T")
UNITS_A_TURN = 16
"""Units that are read in one turn of the loop: in use, some 0.1 ms each."""
_Shown = tuple[tuple[str, ...], Sequence[Sequence[object]], float]


class RoutingMetrics:
    """Counts in plain numbers."""

    def __init__(self, board: Board, queue: Queue) -> None:
        self._board = board
        self._queue = queue
        self._tallies: defaultdict[str, _Tally] = defaultdict(_Tally)
        self._waits = Histogram(TTFT_BOUNDS_S)
        self._models: defaultdict[str, _ModelTokens] = defaultdict(_ModelTokens)
        """By the names in the configuration; all others, which clients or engines have made up, under ""."""
        self._predicted = UnitHistograms(
            "ttft_predicted_seconds",
            "Predicted time from the start of an attempt to its first token.",
            TTFT_BOUNDS_S,
            Histogram.counted,
        )
        self._missed = UnitHistograms(
            "ttft_missed_seconds",
            "Absolute error of the predicted time to first token.",
            TTFT_BOUNDS_S,
            Histogram.counted,
        )

    def waited(self, seconds: float) -> None:
        """A request has left the queue, for any reason."""
        self._waits.observe(seconds)

    def shown(self, lease: Lease) -> None:
        """A unit has sent the first token of a stream."""
        tally, due_s = self._tallies[lease.unit], lease.job.ttft_s
        tally.predicted.observe(due_s)
        tally.missed.observe(abs(lease.first_at - lease.opened_at - due_s))

    def completed(self, lease: Lease, usage: Usage | None, tokens: int) -> None:
        """A generation ended without a failure; its answer has so many `tokens`."""
        tally, job, model = self._tallies[lease.unit], lease.job, lease.ask.model
        prompt = job.prompt_tokens
        tally.prompt += prompt
        tally.expected += job.cached_tokens
        tally.completion += tokens
        of_model = self._models[model if model and model in lease.unit_state.unit.models else ""]
        of_model.prompt += prompt
        of_model.completion += tokens
        if usage is not None and usage.cached_tokens is not None:
            tally.found += usage.cached_tokens

    def completion_tokens(self) -> int:
        """Tokens of all answers that were completed."""
        return sum(of_model.completion for of_model in self._models.values())

    def collect(self) -> Iterator[Metric | None]:
        for name in self._tallies.keys() - self._board.units.keys():
            del self._tallies[name]
        tallies = [(name, self._tallies[name]) for name in self._board.units]
        units = [state.unit for state in self._board]
        places = [((unit.cell, unit.name), self._tallies[unit.name]) for unit in units]
        yield from self._predicted.collect([UnitSource(*place, tally.predicted) for place, tally in places])
        yield from self._missed.collect([UnitSource(*place, tally.missed) for place, tally in places])
        yield counter(
            "unit_tokens",
            "Of the answers that a unit has completed: tokens of the prompt, as estimated; of these, those "
            "expected in its prefix cache, and those that its engine has found there; tokens of the answer.",
            ("unit", "kind"),
            [
                ((unit, kind), getattr(tally, kind))
                for unit, tally in tallies
                for kind in ("prompt", "expected", "found", "completion")
            ],
        )
        yield counter(
            "model_tokens",
            "Tokens of completed answers (completion) and of their prompts, by configured model.",
            ("model", "kind"),
            [
                ((model, kind), getattr(of_model, kind))
                for model, of_model in self._models.items()
                for kind in ("prompt", "completion")
            ],
        )
        yield histogram(
            "queue_wait_seconds", "How long requests waited for a unit.", (), [((), *self._waits.read())]
        )
        yield one_gauge(
            "queue_tokens", "Uncached tokens of the prompts that wait for a unit.", self._queue.tokens
        )
        yield from self._rates()

    def _rates(self) -> Iterator[Metric]:
        costs = [(state.unit.name, state.costs) for state in self._board]
        yield gauge(
            "unit_prefill_tokens_per_second",
            "Uncached tokens that a unit computes in a second, as measured.",
            "unit",
            ((unit, book.rates.prefill_tokens_s.value) for unit, book in costs),
        )
        yield gauge(
            "unit_step_seconds",
            "Duration of a decoding step with the sequences that a unit has, as measured.",
            "unit",
            ((unit, book.rates.steps.at(book.backlog.batch)) for unit, book in costs),
        )
        yield gauge(
            "unit_queued_tokens",
            "Uncached tokens of this gate's prompts that a unit has not computed yet.",
            "unit",
            ((unit, book.backlog.queued_tokens) for unit, book in costs),
        )


class UnitSource(NamedTuple, Generic[T]):
    """What one unit has counted. `of` lives as long as the unit, and is not used for another one."""

    cell: str
    unit: str
    of: T


class UnitHistograms(Generic[T]):
    """One family, by cell. `read` gives what a unit has counted, within `bounds`; `has_means`: count and sum
    of each unit are shown besides, from which its mean follows. `exemplars` has those of all families.
    """

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        read: Callable[[T], Counted],
        *,
        has_means: bool = False,
        exemplars: Exemplars | None = None,
    ) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._read = read
        self._has_means = has_means
        self._exemplars = Exemplars() if exemplars is None else exemplars
        self._shown: dict[tuple[int, str], UnitSource[T]] = {}
        self._departed: dict[str, Counted] = {}
        """By cell."""

    def collect(self, sources: Sequence[UnitSource[T]]) -> Iterator[Metric | None]:
        """The families as they stand; `sources` are all that there are. Each is read once."""
        counted: list[tuple[UnitSource[T], Counted]] = []
        for number, source in enumerate(sources, 1):
            counted.append((source, self._read(source.of)))
            if number % UNITS_A_TURN == 0:
                yield None
        yield histogram(self._name, self._text, ("cell",), self._rows(counted))
        if self._has_means:
            means = (
                ((source.unit,), sum(counts), total) for source, (counts, total) in counted if source.unit
            )
            yield summary(f"unit_{self._name}", f"{self._text} Its count and sum.", ("unit",), means)

    def _rows(self, counted: list[tuple[UnitSource[T], Counted]]) -> Iterator[_Shown]:
        shown = {(id(source.of), source.cell): source for source, _ in counted}
        for key in self._shown.keys() - shown.keys():
            gone = self._shown[key]
            _add(self._departed, gone.cell, self._read(gone.of))
        self._shown = shown
        cells = dict(self._departed)
        for source, what in counted:
            _add(cells, source.cell, what)
        none = [0] * (len(self._bounds) + 1)
        for cell, (counts, total) in cells.items():
            buckets = cumulated(self._bounds, counts or none)
            yield (cell,), self._exemplars.beside(self._name, cell, buckets), total


def _add(cells: dict[str, Counted], cell: str, counted: Counted) -> None:
    """Add to the sum of a cell. Most units of a large fleet have counted nothing."""
    counts, total = counted
    before, total_before = cells.get(cell, ((), 0.0))
    if not any(counts):
        counts = before
    elif before:
        counts = list(map(add, before, counts))
    cells[cell] = counts, total_before + total


# Metrics of routing: the accuracy of predictions, hits of prefix caches, and the queue.


class _Tally:
    """What is counted of one unit."""

    def __init__(self) -> None:
        self.predicted = Histogram(TTFT_BOUNDS_S)
        self.missed = Histogram(TTFT_BOUNDS_S)
        self.prompt = self.expected = self.found = self.completion = 0


class _ModelTokens:
    """The tokens of one model."""

    def __init__(self) -> None:
        self.prompt = self.completion = 0
