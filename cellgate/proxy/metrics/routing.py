"""Metrics of routing: the accuracy of predictions, hits of prefix caches, and the queue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cellgate.proxy.metrics.families import counter, gauge, histogram
from cellgate.proxy.metrics.histogram import TTFT_BOUNDS_S, Histogram
from cellgate.proxy.metrics.unit_histograms import UnitHistograms, UnitSource
from cellgate.router.board import Board
from cellgate.router.cost_model import Usage
from cellgate.router.queue import Queue
from cellgate.router.unit_state import Lease


class _Tally:
    """What is counted of one unit."""

    __slots__ = ("completion", "expected", "found", "missed", "predicted", "prompt")

    def __init__(self) -> None:
        self.predicted = Histogram(TTFT_BOUNDS_S)
        self.missed = Histogram(TTFT_BOUNDS_S)
        self.prompt = self.expected = self.found = self.completion = 0


class _ModelTokens:
    """The tokens of one model."""

    __slots__ = ("completion", "prompt")

    def __init__(self) -> None:
        self.prompt = self.completion = 0


class RoutingMetrics(Collector):
    """Counts in plain numbers. `ignored`: headers with invalid values."""

    def __init__(self, board: Board, queue: Queue, *, per_unit: bool = False) -> None:
        self._board = board
        self.ignored = 0
        self._queue = queue
        self._tallies: defaultdict[str, _Tally] = defaultdict(_Tally)
        self._waits = Histogram(TTFT_BOUNDS_S)
        self._models: defaultdict[str, _ModelTokens] = defaultdict(_ModelTokens)
        """By the names in the configuration; all others, which clients or engines have made up, under ""."""
        self._predicted = UnitHistograms(
            "ttft_predicted_seconds",
            "Predicted time from the start of an attempt to its first token.",
            Histogram.read,
            per_unit=per_unit,
        )
        self._missed = UnitHistograms(
            "ttft_missed_seconds",
            "Absolute error of the predicted time to first token.",
            Histogram.read,
            per_unit=per_unit,
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

    def collect(self) -> Iterator[Metric]:
        """All families."""
        for name in self._tallies.keys() - self._board.units.keys():
            del self._tallies[name]
        tallies = [(name, self._tallies[name]) for name in self._board.units]
        units = [state.unit for state in self._board]
        places = [((unit.cell, unit.name), self._tallies[unit.name]) for unit in units]
        yield from self._predicted.collect(UnitSource(*place, tally.predicted) for place, tally in places)
        yield from self._missed.collect(UnitSource(*place, tally.missed) for place, tally in places)
        for field, (name, text) in _TOKENS.items():
            yield counter(
                name, text, ("unit",), [((unit,), getattr(tally, field)) for unit, tally in tallies]
            )
        for name, text, field in _MODEL_TOKENS:
            rows = (((model,), getattr(of_model, field)) for model, of_model in self._models.items())
            yield counter(name, text, ("model",), rows)
        yield histogram(
            "queue_wait_seconds", "How long requests waited for a unit.", (), [((), *self._waits.read())]
        )
        yield gauge(
            "queue_tokens",
            "Uncached tokens of the prompts that wait for a unit.",
            (),
            [((), self._queue.tokens)],
        )
        yield counter(
            "ignored_headers",
            "Request headers with invalid values, which were ignored.",
            (),
            [((), self.ignored)],
        )
        yield from self._rates()

    def _rates(self) -> Iterator[Metric]:
        costs = [((state.unit.name,), state.costs) for state in self._board]
        yield gauge(
            "unit_prefill_tokens_per_second",
            "Uncached tokens that a unit computes in a second, as measured.",
            ("unit",),
            ((unit, book.rates.prefill_tokens_s.value) for unit, book in costs),
        )
        yield gauge(
            "unit_step_seconds",
            "Duration of a decoding step with the sequences that a unit has, as measured.",
            ("unit",),
            ((unit, book.rates.steps.at(book.backlog.batch)) for unit, book in costs),
        )
        yield gauge(
            "unit_queued_tokens",
            "Uncached tokens of this gate's prompts that a unit has not computed yet.",
            ("unit",),
            ((unit, book.backlog.queued_tokens) for unit, book in costs),
        )
        yield gauge(
            "prefix_blocks",
            "Blocks of prompts that the prefix caches of all units are believed to hold.",
            (),
            [((), sum(len(book.prefixes) for _, book in costs))],
        )


_TOKENS = {
    "prompt": ("prompt_tokens", "Tokens of the prompts a unit has answered, as estimated."),
    "expected": ("prefix_expected_tokens", "Of those, what was believed to be in its prefix cache."),
    "completion": ("completion_tokens", "Tokens of the answers that a unit has completed."),
    "found": ("prefix_found_tokens", "Tokens that its engine reported as cached, if it reports them."),
}

_MODEL_TOKENS = (
    (
        "model_prompt_tokens",
        "Tokens of the prompts of completed answers, by configured model.",
        "prompt",
    ),
    ("model_completion_tokens", "Tokens of completed answers, by configured model.", "completion"),
)
