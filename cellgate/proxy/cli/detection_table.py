"""The detection times in `cellgate check`: one table for each kind of unit, and common notes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from cellgate.probes.canary import YIELD_S
from cellgate.proxy.cli.tables import table
from cellgate.proxy.control.detection_bounds import REFUSED_S, UnitKind, degraded_s, kinds, rows
from cellgate.router.nouns import Fleet, Rules
from cellgate.router.stall import PREFILLS, STEPS

_WIDTH = 100
_NAMED_MAX = 5
_HEAD = ("FAULT", "WHILE IT STREAMS", "WHILE IT IDLES")
_ENGINES = {
    True: "the engine counts its steps",
    False: "the engine does not count its steps, so only its streams show that it works",
    None: "the engine is not known yet; in brackets: if it does not count its steps, unlike vLLM",
}


def times_text(fleet: Fleet, rules: Rules) -> str:
    """The tables, and the notes under them."""
    tables = [_kind(kind, names, rules) for kind, names in kinds(fleet.units).items()]
    notes = "\n".join(
        fill(note, _WIDTH, initial_indent="- ", subsequent_indent="  ") for note in _notes(fleet, rules)
    )
    return "\n\n".join([*tables, notes])


def _kind(kind: UnitKind, names: Sequence[str], rules: Rules) -> str:
    more = len(names) - _NAMED_MAX
    named = ", ".join(names[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
    head = f"How soon {named} is out of rotation ({kind.agents} nodes have agents; {_ENGINES[kind.counts]}):"
    known = rows(kind, rules)
    blind = rows(kind._replace(counts=False), rules) if kind.counts is None else known
    lines = [
        (row.fault, _seconds(row.busy_s, other.busy_s), _seconds(row.idle_s, other.idle_s))
        for row, other in zip(known, blind, strict=True)
    ]
    return f"{fill(head, _WIDTH)}\n{table([_HEAD, *lines])}"


def _seconds(known: float, blind: float) -> str:
    return f"{known:.1f} s" if known == blind else f"{known:.1f} s ({blind:.1f} s)"


def _notes(fleet: Fleet, rules: Rules) -> list[str]:
    """What lengthens these times, what else takes a unit out, and what brings it back."""
    whole = f", with its full share after {rules.slow_start_s:g} s" if rules.slow_start_s else ""
    return [
        f"Slow units take longer: a unit may stall for {STEPS:g} times its slowest usual step, or for "
        f"{PREFILLS:g} times the prefill of the largest prompt that waits there; a canary may take 4 times "
        "as long as usual there.",
        f"Suspicion only: {rules.weak_min} slow or failing answers in {rules.weak_window_s:g} s that are at "
        f"least {rules.weak_rate:.0%} of all answers. A canary then decides.",
        "Gates that share a Redis send canaries for each other: a gate whose turn it is not finds a hang of "
        f"an idle unit up to {YIELD_S:g} s later.",
        f"Back after {rules.passes} canaries in a row{whole}. The first is sent {REFUSED_S:g} s after the "
        "unit is ready again, or when the canary in flight has ended "
        f"(up to {rules.warm_up_timeout_s:g} s).",
        f"Degraded: a unit gets fewer requests when a token takes {rules.degraded_ratio:g} times as long as "
        f"in the rest of its cell; noticed within {degraded_s():g} s of steady streams.",
        _panic(len(fleet.units), rules),
    ]


def _panic(units: int, rules: Rules) -> str:
    if units < rules.panic_min_units:
        return f"No panic: with fewer than {rules.panic_min_units} units, units that do not answer are down."
    return (
        f"Panic: when at least {rules.panic_min_units} units, and more than {rules.panic_share:.0%} of those "
        f"in rotation, do not answer at all, they stay in rotation for up to {rules.panic_max_s:g} s."
    )
