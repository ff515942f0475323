"""Exporter: checks a Prometheus page of the node against a rule or a preset of rules.

In this order: `ExporterProbe`, `Sample`, `Rule`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, NamedTuple

from cellgate.probes.base import FetchError, PageGet, ProbeContext, Reply, Trouble
from cellgate.probes.nodes import NodePage, NodeReport, NodeState, bad_reports, page_name, split_url

_PAGE_MAX = 4 << 20

_LAST = "last"
"""Note: the values at the last run, by metric and labels."""


@dataclass(frozen=True, slots=True)
class ExporterProbe(NodePage):
    """GET `url` and scan it for the samples that `rule`, or the rules of `preset`, are about: one of the two.

    A lost exporter is not a lost node: only a rule that matches is a bad report of the node.
    Raises RuleError (a ValueError) for an invalid rule, KeyError for an unknown preset.
    """

    kind: ClassVar[str] = "exporter"
    refusal: ClassVar[NodeState] = NodeState.DOUBT
    url: str
    rule: str = ""
    preset: str = ""
    period_s: float = field(default=5.0, kw_only=True)

    def __post_init__(self) -> None:
        if bool(self.rule) == bool(self.preset):
            raise RuleError("an exporter probe needs a rule or a preset")
        _ = self.rules

    @property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(parse(text) for text in (PRESETS[self.preset] if self.preset else (self.rule,)))

    @property
    def about(self) -> str:
        """The page, and the rule or preset."""
        return f"{page_name(self.url)} {self.preset or self.rule}"

    def page(self, context: ProbeContext) -> PageGet:
        root, target = split_url(self.url)
        return PageGet(context.net.fetch(root), target, self.timeout_s, _PAGE_MAX)

    def report(self, context: ProbeContext, reply: Reply) -> NodeReport:
        """The result of the rules for the page."""
        if reply.status != 200:
            return NodeReport(NodeState.DOUBT, f"HTTP {reply.status} instead of a page of metrics")
        rules = self.rules
        metrics = sorted({rule.metric for rule in rules})
        try:
            samples = list(scan(reply.body, metrics))
        except TooLargeError as error:
            raise FetchError(Trouble.BROKEN, str(error)) from None
        last = context.notes.get(_LAST, {})
        context.notes[_LAST] = {(sample.metric, sample.labels): sample.value for sample in samples}
        return _judge(context, rules, samples, broken(rules, samples, last))


def _judge(
    context: ProbeContext, rules: tuple[Rule, ...], samples: list[Sample], found: tuple[Rule, Sample] | None
) -> NodeReport:
    if found is not None:
        rule, sample = found
        return NodeReport(NodeState.BAD, f"{rule.text}: {str(sample)[:200]} is {sample.value:g}")
    if any(rule.is_about(sample) for sample in samples for rule in rules):
        return NodeReport(NodeState.GOOD, "no rule holds")
    if bad_reports(context):
        return NodeReport(NodeState.GOOD, "the samples that matched a rule are gone")
    metrics = ", ".join(sorted({rule.metric for rule in rules}))
    return NodeReport(NodeState.NOTHING, f"the page has no sample of {metrics}; check the URL and the rule")


# A page in Prometheus' text format, scanned for the samples of a few metrics.
#
# The page is never parsed as a whole: an exporter may return megabytes, of which a rule needs one line.
# Invalid lines are ignored. Format: https://prometheus.io/docs/instrumenting/exposition_formats/


_LINE_MAX = 4096
"""The most bytes of a line after the metric's name; longer lines are ignored."""
_LOOKED_AT_MAX = 256 << 10
"""Bytes of lines that begin with a metric's name: at worst some 50 ms of work."""

# A label ends with blanks and at most one comma. The pattern matches in one way only, so a crafted line
# cannot cause backtracking.
_LABEL = rb'([A-Za-z_]\w*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,[ \t]*)?'
_LABELS = re.compile(_LABEL)
_UNNAMED = _LABEL.replace(b"([", b"(?:[", 1).replace(b'"((?:', b'"(?:(?:')
_EXPORTER_SAMPLE = re.compile(rb"[ \t]*(?:\{([ \t]*(?:%s)*)\})?[ \t]*([^ \t\r]+)" % _UNNAMED)
_EXPORTER_ESCAPED = re.compile(r"\\(.)")


class TooLargeError(ValueError):
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
    """The samples of these metrics, one metric after the other. Raises TooLargeError."""
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
                raise TooLargeError(f"more than {_LOOKED_AT_MAX} bytes of lines that begin with {metric}")
            if end - begin <= _LINE_MAX and page[begin : begin + 1] in (b"{", b" ", b"\t"):
                yield from _sample(metric, page[begin:end])
            at = page.find(start, end)


def _sample(metric: str, rest: bytes) -> Iterator[Sample]:
    match = _EXPORTER_SAMPLE.match(rest)
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
    return {
        name.decode(): _EXPORTER_ESCAPED.sub(
            lambda m: "\n" if m[1] == "n" else m[1], text.decode("utf-8", "replace")
        )
        for name, text in _LABELS.findall(sample.labels)
    }


# Rules on the samples of an exporter: their syntax and evaluation.
#
# A rule says what is bad: `node_load1 > 100`, `increase(errors_total{type="hardware"}) > 0`. It is a small
# part of PromQL: one metric, labels that are equal, one comparison with a number; `increase` is the growth
# since the last run.


_EXPORTER_TEXT_MAX = 500

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_MEANT = {"=": "==", "===": "==", "=>": ">=", "=<": "<=", "<>": "!=", "!==": "!="}

_EXPORTER_NAME = r"[A-Za-z_:][\w:]*"
_RULE_LABEL = r'([A-Za-z_]\w*)\s*([=!~]+)\s*"((?:[^"\\]|\\.)*)"\s*(?:,\s*)?'
_RULE_LABELS = re.compile(_RULE_LABEL, re.ASCII)
_RULE_UNNAMED = _RULE_LABEL.replace("((", "(?:(").replace("([", "(?:[")
_RULE = re.compile(
    rf"(?:({_EXPORTER_NAME})\s*(\())?\s*({_EXPORTER_NAME})\s*(?:\{{(\s*(?:{_RULE_UNNAMED})*)\}})?\s*(\)?)\s*([=!<>~]+)\s*(\S+)",
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
    if len(text) > _EXPORTER_TEXT_MAX:
        raise RuleError(f"it is longer than {_EXPORTER_TEXT_MAX} characters")
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
    found = _RULE_LABELS.findall(text)
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


# Rules for well-known exporters: faults that make a machine unable to compute, and no harmless ones.
#
# A rule of growth may match once and not again: it makes a unit suspect and sends a canary now, and the node
# is out only when the growth continues. A rule of state matches until the machine is repaired.


# Xids that only a reset of the GPU or a restart of the machine clears, by NVIDIA's Xid catalog (its immediate
# action is RESET_GPU or RESTART_BM, or its trigger conditions say so):
# https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
# Not here: 63 (a row was remapped; ignore), 94 (contained; restart the application, which the gate sees),
# 109, 119, 120 (may pass), 136, 155, 156 (links switched off on purpose, events that can wait).
_FATAL_XIDS = (
    46,  # the GPU stopped processing
    48,  # double bit ECC error
    62,  # internal micro-controller halt
    64,  # remapping of memory failed
    74,  # NVLink error
    79,  # the GPU has fallen off the bus
    95,  # uncontained memory error
    110,  # security fault
    140,  # unrecovered ECC error
    143,  # the GPU cannot be initialised
    158,  # fatal timeout
)

PRESETS: dict[str, tuple[str, ...]] = {
    # dcgm-exporter. The gauge keeps the last Xid until the exporter or the driver restarts, which these
    # Xids need anyway (github.com/NVIDIA/dcgm-exporter/issues/500, github.com/NVIDIA/DCGM/issues/277); but a
    # harmless Xid soon after hides a fatal one. The counter keeps each Xid for five minutes, where the
    # exporter is told to show it (github.com/NVIDIA/dcgm-exporter/pull/239).
    "dcgm": (
        *(f"DCGM_FI_DEV_XID_ERRORS == {xid}" for xid in _FATAL_XIDS),
        *(f'DCGM_EXP_XID_ERRORS_COUNT{{xid="{xid}"}} > 0' for xid in _FATAL_XIDS),
    ),
    # neuron-monitor-prometheus.py of the AWS Neuron tools creates these names; the types are those of the
    # Neuron Monitor user guide (error_summary, execution_summary, neuron_hw_counters).
    "neuron": (
        'increase(execution_errors_total{error_type="hardware"}) > 0',
        'increase(execution_status_total{status_type="timed_out"}) > 0',
        'increase(hardware_ecc_events_total{event_type="mem_ecc_uncorrected"}) > 0',
        'increase(hardware_ecc_events_total{event_type="sram_ecc_uncorrected"}) > 0',
    ),
    # node_exporter, from collectors that are on by default (filesystem, edac, vmstat, meminfo). The growth of
    # `readonly`, not its value: the root of some systems is read-only by design. Below 64 MiB little runs.
    "node": (
        "increase(node_filesystem_readonly) > 0",
        "increase(node_edac_uncorrectable_errors_total) > 0",
        "increase(node_vmstat_oom_kill) > 0",
        "node_memory_MemAvailable_bytes < 67108864",
    ),
}
