"""How long generations took, by the names that OpenTelemetry has for servers of generative AI.

The convention is in development (https://github.com/open-telemetry/semantic-conventions-genai, 0.1.0): names,
attributes and bounds are as they stand there, beside the gate's own metrics and not instead of them. They are
sent by OTLP alone: their names have dots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cellgate.proxy.observe.counters import Histogram

SERIES_MOST = 1000
"""Of so many combinations of attributes there are histograms; of what comes after them nothing is kept."""


class GenAiMetric(NamedTuple):
    """One of the three, as the convention has it. All are in seconds."""

    name: str
    text: str
    bounds: tuple[float, ...]


DURATION = GenAiMetric(
    "gen_ai.server.request.duration",
    "Generative AI server request duration such as time-to-last byte or last output token.",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
FIRST_TOKEN = GenAiMetric(
    "gen_ai.server.time_to_first_token",
    "Time to generate first token for successful responses.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
OUTPUT_TOKEN = GenAiMetric(
    "gen_ai.server.time_per_output_token",
    "Time per output token generated after the first token for successful responses.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)


class GenAiSeries(NamedTuple):
    """A histogram as it stands: `counts` for each bound and above them."""

    metric: GenAiMetric
    attributes: Mapping[str, str]
    counts: tuple[int, ...]
    total: float


class GenAiMetrics:
    """Of one gate. `answered` is called once for each request that asked for a generation."""

    def __init__(self) -> None:
        self._series: dict[tuple[GenAiMetric, tuple[str, ...]], Histogram] = {}

    def answered(
        self,
        operation: str,
        provider: str,
        model: str,
        error: str,
        duration_s: float,
        first_token_s: float | None,
        output_token_s: float | None,
    ) -> None:
        """One is over. `provider` is the engine of its unit, or the gate itself; `model` is empty where that
        is no more than a client's word, `error` where there was none. None: it has no such time.
        """
        about = operation, provider, model
        self._observe(DURATION, (*about, error), duration_s)
        if error:
            return
        if first_token_s is not None:
            self._observe(FIRST_TOKEN, about, first_token_s)
        if output_token_s is not None:
            self._observe(OUTPUT_TOKEN, about, output_token_s)

    def read(self) -> list[GenAiSeries]:
        return [
            GenAiSeries(
                metric,
                {name: value for name, value in zip(_ATTRIBUTES, about, strict=False) if value},
                tuple(histogram.counts),
                histogram.total,
            )
            for (metric, about), histogram in self._series.items()
        ]

    def _observe(self, metric: GenAiMetric, about: tuple[str, ...], seconds: float) -> None:
        histogram = self._series.get((metric, about))
        if histogram is None:
            if len(self._series) >= SERIES_MOST:
                return
            histogram = self._series[metric, about] = Histogram(metric.bounds)
        histogram.observe(seconds)


_ATTRIBUTES = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "error.type")
