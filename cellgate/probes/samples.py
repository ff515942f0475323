"""A page in Prometheus' text format, scanned for the samples of a few metrics.

The page is never parsed as a whole: an exporter may return megabytes, of which a rule needs one line. Invalid
lines are ignored. Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_LINE_MAX = 4096
"""The most bytes of a line after the metric's name; longer lines are ignored."""
_LOOKED_AT_MAX = 256 << 10
"""Bytes of lines that begin with a metric's name: at worst some 50 ms of work."""

# A label ends with blanks and at most one comma. The pattern matches in one way only, so a crafted line
# cannot cause backtracking.
_LABEL = rb'([A-Za-z_]\w*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,[ \t]*)?'
_LABELS = re.compile(_LABEL)
_UNNAMED = _LABEL.replace(b"([", b"(?:[", 1).replace(b'"((?:', b'"(?:(?:')
_SAMPLE = re.compile(rb"[ \t]*(?:\{([ \t]*(?:%s)*)\})?[ \t]*([^ \t\r]+)" % _UNNAMED)
_ESCAPED = re.compile(r"\\(.)")


class TooMuchError(ValueError):
    """The page has too many lines that begin with these metrics' names."""


class Sample(NamedTuple):
    """One value. `labels` is as the page has it, without braces."""

    metric: str
    labels: bytes
    value: float

    def __str__(self) -> str:
        labels = self.labels.decode("utf-8", "replace").strip()
        return f"{self.metric}{{{labels}}}" if labels else self.metric


def scan(page: bytes, metrics: Iterable[str]) -> Iterator[Sample]:
    """The samples of these metrics, one metric after the other. Raises TooMuchError."""
    page = b"\n" + page
    looked_at = 0
    for metric in metrics:
        start = b"\n" + metric.encode()
        at = page.find(start)
        while at >= 0:
            begin = at + len(start)
            end = page.find(b"\n", begin)
            end = len(page) if end < 0 else end
            looked_at += end - at
            if looked_at > _LOOKED_AT_MAX:
                raise TooMuchError(f"more than {_LOOKED_AT_MAX} bytes of lines that begin with {metric}")
            if end - begin <= _LINE_MAX and page[begin : begin + 1] in (b"{", b" ", b"\t"):
                yield from _sample(metric, page[begin:end])
            at = page.find(start, end)


def _sample(metric: str, rest: bytes) -> Iterator[Sample]:
    match = _SAMPLE.match(rest)
    if match is None:
        return
    try:
        value = float(match[2])
    except ValueError:
        return
    # Exporters write NaN where they have no value.
    if not math.isnan(value):
        yield Sample(metric, match[1] or b"", value)


def labels_of(sample: Sample) -> dict[str, str]:
    """The labels of a sample by name."""
    return {
        name.decode(): _ESCAPED.sub(lambda m: "\n" if m[1] == "n" else m[1], text.decode("utf-8", "replace"))
        for name, text in _LABELS.findall(sample.labels)
    }
