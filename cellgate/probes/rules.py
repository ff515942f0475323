"""Rules on the samples of an exporter: their syntax and evaluation.

A rule says what is bad: `node_load1 > 100`, `increase(errors_total{type="hardware"}) > 0`. It is a small part
of PromQL: one metric, labels that are equal, one comparison with a number; `increase` is the growth since the
last run.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from cellgate.probes.samples import Sample, labels_of

_TEXT_MAX = 500

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_MEANT = {"=": "==", "===": "==", "=>": ">=", "=<": "<=", "<>": "!=", "!==": "!="}

_NAME = r"[A-Za-z_:][\w:]*"
_LABEL = r'([A-Za-z_]\w*)\s*([=!~]+)\s*"((?:[^"\\]|\\.)*)"\s*(?:,\s*)?'
_LABELS = re.compile(_LABEL, re.ASCII)
_UNNAMED = _LABEL.replace("((", "(?:(").replace("([", "(?:[")
_RULE = re.compile(
    rf"(?:({_NAME})\s*(\())?\s*({_NAME})\s*(?:\{{(\s*(?:{_UNNAMED})*)\}})?\s*(\)?)\s*([=!<>~]+)\s*(\S+)",
    re.ASCII,
)


class RuleError(ValueError):
    """An invalid rule. `hint` says what is wrong with it, or what was meant; it may be empty."""

    def __init__(self, hint: str) -> None:
        super().__init__(hint or "no rule")
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Rule:
    """A fault: a sample of `metric` with these labels whose value or growth compares so with `limit`."""

    text: str
    metric: str
    labels: tuple[tuple[str, str], ...]
    grows: bool
    compare: str
    limit: float

    def is_about(self, sample: Sample) -> bool:
        """Whether the rule applies to this sample."""
        if sample.metric != self.metric:
            return False
        if not self.labels:
            return True
        labels = labels_of(sample)
        # A label that is missing is an empty one to PromQL.
        return all(labels.get(name, "") == value for name, value in self.labels)

    def holds(self, value: float, last: float | None) -> bool:
        """Whether `value` is bad; `last` is that of the last run, None if there was no sample."""
        compare = _COMPARE[self.compare]
        return compare(growth(value, last), self.limit) if self.grows else compare(value, self.limit)


def growth(value: float, last: float | None) -> float:
    """How much a counter grew. One that shrank was reset to 0; a new one has not grown."""
    if last is None:
        return 0.0
    return value - last if value >= last else value


@lru_cache(maxsize=1024)
def parse(text: str) -> Rule:
    """Parse a rule. Raises RuleError."""
    if len(text) > _TEXT_MAX:
        raise RuleError(f"it is longer than {_TEXT_MAX} characters")
    match = _RULE.fullmatch(text.strip())
    if match is None:
        raise RuleError(_what_is_amiss(text))
    function, opened, metric, labels, closed, compare, limit = match.groups()
    if bool(opened) != bool(closed):
        raise RuleError("a parenthesis is missing")
    if function not in (None, "increase"):
        raise RuleError(f"function {function}() is not supported; did you mean 'increase({metric})'?")
    if compare not in _COMPARE:
        meant = _MEANT.get(compare)
        raise RuleError(f"did you mean '{meant}'?" if meant else f"known comparisons: {' '.join(_COMPARE)}")
    return Rule(text.strip(), metric, _labels(labels or ""), function is not None, compare, _limit(limit))


def _labels(text: str) -> tuple[tuple[str, str], ...]:
    found = _LABELS.findall(text)
    if any(sign != "=" for _, sign, _ in found):
        raise RuleError('labels can only be compared by label="value"')
    return tuple((name, re.sub(r"\\(.)", r"\1", value)) for name, _, value in found)


def _limit(text: str) -> float:
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise RuleError("it must end with a number")
    return limit


# What an invalid rule may lack: a sign of it, and the hint.
_AMISS = (
    (r"\[", "ranges in brackets are not supported: increase is the growth since the last probe"),
    (r"\b(and|or|unless)\b", "only one comparison is allowed; use one probe for each"),
    (r"\{[^\"]*\}", 'label values must be in double quotes: {label="value"}'),
    (r"^[^=!<>]*(\{.*\}[^=!<>]*)?$", "a comparison is missing, such as > 0"),
)


def _what_is_amiss(text: str) -> str:
    return next((hint for sign, hint in _AMISS if re.search(sign, text)), "")


def broken(
    rules: Iterable[Rule], samples: Iterable[Sample], last: Mapping[tuple[str, bytes], float]
) -> tuple[Rule, Sample] | None:
    """The first rule that matches, with its sample; None if none does."""
    of_metric: dict[str, list[Sample]] = {}
    for sample in samples:
        of_metric.setdefault(sample.metric, []).append(sample)
    for rule in rules:
        for sample in of_metric.get(rule.metric, ()):
            if rule.holds(sample.value, last.get((sample.metric, sample.labels))) and rule.is_about(sample):
                return rule, sample
    return None
