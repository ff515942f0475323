"""The report of a load as one page of HTML: what was asked, what came of it, and charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby

from loadtests.drill.summary import percentile
from loadtests.load.chart import LONG, line_chart
from loadtests.load.figures import SHARES, LoadStep, course

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; background: #fff }
h1 { margin-bottom: 0 } h2 { margin: 2.2rem 0 .4rem } .facts { color: #555; margin-top: .2rem }
.result { font-size: 1.15rem } .good { color: #176b3a } .bad { color: #b3261e }
table { border-collapse: collapse; width: 100%; margin: .6rem 0; font-size: 13px;
  font-variant-numeric: tabular-nums }
td { white-space: nowrap }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left } thead th { color: #555; font-weight: 600 }
.charts { display: flex; flex-wrap: wrap; gap: 1rem } .charts svg { flex: 1 1 430px; max-width: 480px }
svg text { font: 11px system-ui, sans-serif; fill: #444 } svg .title { font-size: 13px; font-weight: 600 }
svg .grid { stroke: #e4e4e4 } svg line.mark { stroke: #b3261e; stroke-dasharray: 3 3 }
svg text.mark { fill: #b3261e; font-size: 10px } .course svg { display: block; width: 100% }
@media print { .charts svg, table { break-inside: avoid } }
"""
_WORDS = {
    "first token, TTFT": "from sending a request to the first token: how long a user sees nothing.",
    "error event": "a stream that broke after a token, and said so. A lost one broke without a word.",
    "streams resumed": "streams that their unit broke, and the gate continued on another one.",
    "between tokens": "between two pieces of an answer. People read a token in about 200 ms.",
    "whole answer": "from sending a request to the end of its answer.",
    "95 %": "95 of 100 were at least as fast as this.",
    "tokens/s": "tokens of answers, of all users together.",
    "goodput": "share of requests that met the objective, which stands at the top.",
    "failovers": "requests that a unit failed, and the gate gave to another one. Users notice only the time.",
}


def report(facts: Mapping[str, str], steps: Sequence[LoadStep]) -> str:
    """The page. `facts` stand at its top: what was asked, when, how."""
    body = [
        "<h1>Load test</h1>",
        f'<p class="facts">{" · ".join(f"{name}: {escape(value)}" for name, value in facts.items())}</p>',
        *_result(steps),
        table(steps),
        *(part for _, group in groupby(steps, lambda step: step.workload) for part in _workload([*group])),
        "<h2>What the words mean</h2><ul>",
        *(f"<li><b>{word}</b>: {meaning}</li>" for word, meaning in _WORDS.items()),
        "</ul>",
    ]
    return page("Load test", "\n".join(body))


def page(title: str, body: str, head: str = "") -> str:
    """A whole page."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>{head}'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def table(steps: Sequence[LoadStep]) -> str:
    """A row for each step."""
    times = [f"{name}, {share}" for name in ("first token", "between tokens") for share in ("median", "95 %")]
    heads = ["workload", "users", "requests", "failed", "requests/s", "tokens/s", *times]
    heads += ["whole answer, median", "goodput", "failovers"]
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(step))}</tr>" for step in steps)
    titles = "".join(f"<th>{head}</th>" for head in heads)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>"


def charts_over_time(step: LoadStep) -> str:
    """How a step went: charts with one time axis, and a mark in each where a unit went out."""
    found = course(step.summary.records, step.seen)
    drawn = [
        line_chart(name, each, "s", marks=found.faults, most_x=found.seconds, width=LONG)
        for name, each in found.lines.items()
    ]
    return f'<div class="course">{"".join(drawn)}</div>'


def _cells(step: LoadStep) -> list[str]:
    times = step.times()
    first, gap = times["first token"], times["between tokens"]
    return [
        escape(step.workload),
        str(step.users),
        f"{len(step.summary.records):,}",
        f'<span class="bad">{step.failed}</span>' if step.failed else "0",
        f"{step.requests_per_s:.1f}",
        f"{step.tokens_per_s:,.0f}",
        *(seconds(percentile(first, SHARES[share])) for share in ("median", "95 %")),
        *(seconds(percentile(gap, SHARES[share])) for share in ("median", "95 %")),
        seconds(percentile(times["whole answer"], 0.5)),
        f"{step.summary.goodput_share():.0%}",
        "-" if step.failovers is None else str(step.failovers),
    ]


def seconds(value: float) -> str:
    """A time for people; a dash for none."""
    if value != value:
        return "-"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def _result(steps: Sequence[LoadStep]) -> Iterator[str]:
    """The sentences that a reader in a hurry needs."""
    requests, failed = sum(len(step.summary.records) for step in steps), sum(step.failed for step in steps)
    kind, said = ("bad", f"{failed} of them failed") if failed else ("good", "none failed")
    yield f'<p class="result {kind}"><b>{requests:,} requests, {said}.</b></p><ul>'
    for workload, group in groupby(steps, lambda step: step.workload):
        most = max(group, key=lambda step: step.users)
        first = most.times()["first token"]
        yield (
            f"<li><b>{escape(workload)}</b>, {most.users} users at once: the first token came after "
            f"{seconds(percentile(first, 0.5))} (median), for 95 % of the requests within "
            f"{seconds(percentile(first, 0.95))}; {most.tokens_per_s:,.0f} tokens a second.</li>"
        )
    yield "</ul>"
    reasons = [(step, *reason) for step in steps for reason in step.why()]
    if reasons:
        yield "<p>The commonest failures:</p><ul>"
        yield from (
            f"<li>{escape(step.workload)}, {step.users} users, {count} times: {escape(why)}</li>"
            for step, why, count in reasons[:5]
        )
        yield "</ul>"


def _workload(steps: Sequence[LoadStep]) -> Iterator[str]:
    """The charts of one workload: against the number of users, and the largest step over time."""
    yield f"<h2>{escape(steps[0].workload)}</h2>"
    if len(steps) > 1:
        first = _against_users(steps, "first token", 1.0)
        gap = _against_users(steps, "between tokens", 1000.0)
        tokens = {"tokens": [(float(step.users), step.tokens_per_s) for step in steps]}
        yield '<div class="charts">'
        yield line_chart("First token, s", first, "users")
        yield line_chart("Between tokens, ms", gap, "users")
        yield line_chart("Output tokens a second", tokens, "users")
        yield "</div>"
    most = max(steps, key=lambda step: step.users)
    yield f"<h3>{most.users} users, second by second</h3>"
    yield charts_over_time(most)


def _against_users(
    steps: Sequence[LoadStep], name: str, factor: float
) -> dict[str, list[tuple[float, float]]]:
    return {
        share: [
            (step.users, factor * percentile(values, SHARES[share]))
            for step in steps
            if (values := step.times()[name])
        ]
        for share in SHARES
    }
