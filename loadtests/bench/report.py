"""The tables that a run ends in, as text or Markdown, and the machine they were taken on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from loadtests.bench.figures import Figure, Spread, Value, beside, difference, of, ratio
from loadtests.bench.loads import LOADS
from loadtests.bench.targets import BASELINE, SUBJECT
from loadtests.kit.report import columns

PACE_LIMIT = 1.05
"""Streams later than this were not measured at the rate asked for; a backlog is cheap, served in batches."""

_NONE = "-"

Table = Sequence[tuple[str, ...]]
Cell = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Run:
    """All of one run. `missing`: why a target has no figures; `about`: what each was, and which version;
    `loads`: what each load was.
    """

    machine: str
    arguments: str
    figures: Sequence[Figure]
    missing: Mapping[str, str]
    about: Mapping[str, str]
    loads: Mapping[str, str]

    @property
    def columns(self) -> list[str]:
        """Targets in the order in which they were named."""
        return list(self.about)


def tables(run: Run) -> dict[str, Table]:
    """Each table under its title; the first row has the targets."""
    loads = list(run.loads)
    return {
        "CPU, in microseconds": _table(run, [_cpu_row(run, load) for load in loads]),
        f"Ratio: CPU of {SUBJECT} / CPU of each": _table(run, [_ratio_row(run, load) for load in loads]),
        "Waits, memory, leaks": _table(run, [row for load in loads for row in _stream_rows(run, load)]),
        "Conditions of the measurement": _table(run, _harness_rows(run, loads)),
    }


def _table(run: Run, rows: Sequence[tuple[str, Cell]]) -> Table:
    """Rows that have something to say; a target without figures says so in its first cell."""
    made = [(title, *map(cell, run.columns)) for title, cell in rows]
    made = [row for row in made if any(each != _NONE for each in row[1:])]
    for column, name in enumerate(run.columns, 1):
        if made and name in run.missing:
            made[0] = (*made[0][:column], "missing", *made[0][column + 1 :])
    return [("", *run.columns), *made]


def _each(load: str) -> str:
    return {"requests": "a request", "agents": "a turn", "streams": "a chunk", "bursts": "a stream"}[
        LOADS[load].kind
    ]


def _cpu_row(run: Run, load: str) -> tuple[str, Cell]:
    def cell(target: str) -> str:
        found = of(run.figures, target, load, lambda each: each.cpu_us)
        return _spread(found, 1) if found and found.high else _NONE

    return f"{_each(load)}, {run.loads[load]}", cell


def _ratio_row(run: Run, load: str) -> tuple[str, Cell]:
    def cell(target: str) -> str:
        if target in (SUBJECT, BASELINE):
            return _NONE
        found = beside(run.figures, SUBJECT, target, load, lambda each: each.cpu_us, ratio)
        return _spread(found, 2)

    return f"{_each(load)}, {run.loads[load]}", cell


def _stream_rows(run: Run, load: str) -> list[tuple[str, Cell]]:
    """What only streams have; memory and leaks where they are many."""
    if LOADS[load].kind in ("agents", "bursts"):
        return [
            (
                f"TTFT, p50, ms; {run.loads[load]}",
                partial(_plain, run, load, lambda each: each.ttft_p50_ms, 0),
            ),
            (
                f"TTFT, p99, ms; {run.loads[load]}",
                partial(_plain, run, load, lambda each: each.ttft_p99_ms, 0),
            ),
        ]
    if LOADS[load].kind != "streams" or load == "32-streams":
        return []
    about = run.loads[load].partition(" of ")[0]
    shown = partial(partial, _plain, run, load)
    rows: list[tuple[str, Cell]] = [
        (f"TTFT added, p50, ms; {about}", partial(_added, run, load, lambda each: each.ttft_p50_ms)),
        (f"TTFT added, p99, ms; {about}", partial(_added, run, load, lambda each: each.ttft_p99_ms)),
        (f"longest stall, ms; {about}", shown(lambda each: each.stall_ms, 0)),
    ]
    if load == "256-streams":
        return rows
    return [
        *rows,
        ("resident at rest, MB", shown(lambda each: each.idle_mb, 1)),
        (f"resident with {about}, MB", shown(lambda each: each.loaded_mb, 1)),
        (f"resident for each of {about}, KiB", shown(lambda each: each.stream_kib, 1)),
        ("leaked: connections from clients", shown(lambda each: each.leaked_clients, 0, always=True)),
        ("leaked: connections to units", shown(lambda each: each.leaked_generating, 0, always=True)),
    ]


def _harness_rows(run: Run, loads: Sequence[str]) -> list[tuple[str, Cell]]:
    """What shows that neither engine nor generator were in the way, nor others."""
    rows: list[tuple[str, Cell]] = [
        (f"engine / generator, us {_each(load)}; {run.loads[load]}", partial(_around, run, load))
        for load in loads
    ]
    return [
        *rows,
        ("pace of streams, worst", partial(_worst, run, lambda each: each.pace, "{:.3f}")),
        (
            "lag of the generator's timers, p99, ms, worst",
            partial(_worst, run, lambda each: each.lag_ms, "{:.1f}"),
        ),
        ("reads a chunk", partial(_plain, run, "256-streams", lambda each: each.reads_each, 2)),
        ("share of other processes, worst", partial(_worst, run, lambda each: each.others, "{:.0%}")),
    ]


def _around(run: Run, load: str, target: str) -> str:
    engine = of(run.figures, target, load, lambda each: each.engine_us)
    generator = of(run.figures, target, load, lambda each: each.generator_us)
    return f"{engine.middle:.1f} / {generator.middle:.1f}" if engine and generator else _NONE


def _worst(run: Run, value: Value, form: str, target: str) -> str:
    values = [value(each) for each in run.figures if each.target == target]
    return form.format(max(values)) if any(values) else _NONE


def _added(run: Run, load: str, value: Value, target: str) -> str:
    if target == BASELINE:
        return _NONE
    return _spread(beside(run.figures, target, BASELINE, load, value, difference), 2)


def _plain(run: Run, load: str, value: Value, digits: int, target: str, *, always: bool = False) -> str:
    found = of(run.figures, target, load, value)
    shown = found is not None and (found.high > 0 or (always and target != BASELINE))
    return _spread(found, digits) if shown else _NONE


def _spread(found: Spread | None, digits: int) -> str:
    if found is None:
        return _NONE
    middle, low, high = (f"{each:.{digits}f}" for each in found)
    return middle if low == high else f"{middle} ({low}-{high})"


def as_markdown(rows: Table) -> str:
    """A table for a page."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---" + "|---:" * (len(rows[0]) - 1) + "|")
    return "\n".join(lines)


def full(run: Run, *, markdown: bool) -> str:
    """All tables, and beneath them what was measured where."""
    rule = "### {}\n\n{}\n" if markdown else "{}\n{}\n"
    form = as_markdown if markdown else partial(columns, numbers=True)
    parts = [rule.format(title, form(rows)) for title, rows in tables(run).items() if len(rows) > 1]
    bullet = "- `{}`: {}" if markdown else "{}: {}"
    parts.append(
        "\n".join(bullet.format(name, run.missing.get(name, text)) for name, text in run.about.items())
    )
    parts.append(f"\n{run.machine}; `{run.arguments}`")
    return "\n".join(parts)
