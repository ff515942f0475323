"""A family of metrics: rows of label values and a number, written as lines of text at each scrape.

prometheus_client writes what there is few of (histograms, what it knows of the process). What there is of
each unit is written here: at 26 us a line, 1,000 units took a second of each scrape, and held streams up.

In this order: `Family`, `counter`, `gauge`, `summary`, `histogram`, `Encoding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, choose_encoder, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

LINES_A_TURN = 256
"""Lines that are written in one turn of the loop: some 0.3 ms."""
_EOF = b"# EOF\n"
"""The last line of OpenMetrics; families are encoded one by one."""

MetricRow = tuple[Sequence[str], float]
"""Label values, and the number they have. Where there is one label, its value may stand without a tuple."""


class Family(Metric):
    """A counter, gauge or summary; its name begins with `cellgate_`. `rows`: the name of a line, the values
    of its labels, and the number.
    """

    def __init__(
        self,
        name: str,
        text: str,
        kind: str,
        labels: Sequence[str],
        rows: list[tuple[str, Sequence[str], float]],
    ) -> None:
        # Without the library's own, which would check the name at each scrape.
        self.name, self.documentation, self.type, self.unit = f"cellgate_{name}", text, kind, ""
        self.labels = labels
        self.rows = rows

    @property
    def samples(self) -> list[Sample]:  # type: ignore[override]  # the library has a list, made in any case
        """The rows as the library has them, for who sends them elsewhere."""
        return [
            Sample(name, dict(zip(self.labels, row, strict=True)), float(value))
            for name, row, value in self.rows
        ]

    def head(self, *, is_open: bool) -> str:
        """The lines before the rows, in OpenMetrics or in the older format."""
        name = self.name if is_open or self.type != "counter" else f"{self.name}_total"
        text = self.documentation.replace('"', r"\"") if is_open else self.documentation
        return f"# HELP {name} {text}\n# TYPE {name} {self.type}\n"

    def lines(self) -> Iterator[str]:
        """The lines of the rows, in slices for a turn of the loop each."""
        order = sorted(range(len(self.labels)), key=self.labels.__getitem__)
        labels = ",".join(f'{self.labels[place]}="%s"' for place in order)
        pattern = f"%s{{{labels}}} %s\n" if labels else "%s %s\n"
        is_sorted = order == list(range(len(order)))
        for first in range(0, len(self.rows), LINES_A_TURN):
            yield "".join(
                [
                    pattern
                    % (
                        name,
                        *map(_escaped, row if is_sorted else [row[place] for place in order]),
                        _number(value) if value else "0.0",
                    )
                    for name, row, value in self.rows[first : first + LINES_A_TURN]
                ]
            )


_number: Callable[[float], str] = floatToGoString


@lru_cache(16_384)
def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def counter(name: str, text: str, labels: Sequence[str], rows: Iterable[MetricRow]) -> Family:
    """A counter; `_total` is added to its name. `labels` may be the name of a single one."""
    line = f"cellgate_{name}_total"
    return Family(name, text, "counter", _words(labels), [(line, _words(row), n) for row, n in rows])


def gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[MetricRow]) -> Family:
    """The same of a gauge."""
    line = f"cellgate_{name}"
    return Family(name, text, "gauge", _words(labels), [(line, _words(row), n) for row, n in rows])


def _words(labels: Sequence[str]) -> Sequence[str]:
    return (labels,) if isinstance(labels, str) else labels


def one_counter(name: str, text: str, count: float) -> Family:
    """A counter without labels."""
    return counter(name, text, (), [((), count)])


def one_gauge(name: str, text: str, value: float) -> Family:
    """A gauge without labels."""
    return gauge(name, text, (), [((), value)])


def summary(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], int, float]]
) -> Family:
    """A count and a sum for each row of labels."""
    count_line, sum_line = f"cellgate_{name}_count", f"cellgate_{name}_sum"
    both = [
        line
        for row, count, total in rows
        for line in ((count_line, row, float(count)), (sum_line, row, total))
    ]
    return Family(name, text, "summary", labels, both)


def histogram(
    name: str,
    text: str,
    labels: Sequence[str],
    rows: Iterable[tuple[Sequence[str], Sequence[Sequence[object]], float]],
) -> Metric:
    """Cumulated buckets (bound, count, and perhaps an exemplar) and a sum for each row of labels."""
    family = HistogramMetricFamily(f"cellgate_{name}", text, labels=labels)
    for row, bounds, total in rows:
        family.add_metric(row, bounds, total)  # type: ignore[arg-type]  # says pairs, and takes exemplars
    return family


class Encoding(NamedTuple):
    """How families become text. `encode` is for those of the library."""

    encode: Callable[[Collector], bytes]
    content_type: str

    def parts(self, family: Metric) -> Iterator[bytes]:
        """The text of one family, in parts for a turn of the loop each."""
        if not isinstance(family, Family):
            yield self.encode(_Alone(family)).removesuffix(_EOF)
            return
        yield family.head(is_open=self.is_open).encode()
        for lines in family.lines():
            yield lines.encode()

    def text(self, families: Iterable[Metric]) -> bytes:
        """All of them."""
        return self.whole(part for family in families for part in self.parts(family))

    def whole(self, parts: Iterable[bytes]) -> bytes:
        """The page of all parts."""
        return b"".join([*parts, _EOF] if self.is_open else parts)

    @property
    def is_open(self) -> bool:
        """Whether it is OpenMetrics: https://github.com/OpenObservability/OpenMetrics."""
        return self is not PLAIN


PLAIN = Encoding(generate_latest, CONTENT_TYPE_LATEST)


def open_encoding(accept: str) -> Encoding:
    """OpenMetrics, as who sent this `Accept` wants it."""
    return Encoding(*choose_encoder(accept))


class _Alone(Collector):
    """A family as the collector that the library's encoders want."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]
