"""Exporter: checks a Prometheus page of the node against a rule or a preset of rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from cellgate.probes.base import FetchError, PageGet, ProbeContext, Reply, Trouble
from cellgate.probes.http_status import page_name, split_url
from cellgate.probes.node import NodePage, NodeReport, NodeState, bad_reports
from cellgate.probes.presets import PRESETS
from cellgate.probes.rules import Rule, RuleError, broken, parse
from cellgate.probes.samples import Sample, TooMuchError, scan

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
        """What is bad."""
        return tuple(parse(text) for text in (PRESETS[self.preset] if self.preset else (self.rule,)))

    @property
    def about(self) -> str:
        """The page, and the rule or preset."""
        return f"{page_name(self.url)} {self.preset or self.rule}"

    def page(self, context: ProbeContext) -> PageGet:
        """The URL."""
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
        except TooMuchError as error:
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
