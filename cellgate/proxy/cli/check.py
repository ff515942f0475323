"""`cellgate check`: every problem of a configuration, or its units and how soon each fault is found.

In this order: `_redis_problems`, `UnitKind`, `times_text`, `schema_arguments`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from textwrap import fill
from typing import Any, NamedTuple, cast

from cellgate.extras import MissingExtraError, part_of
from cellgate.probes.agents import BEAT_S, LOOK_S, SILENCE_S
from cellgate.probes.base import REST_LONG_S, REST_MAX_S
from cellgate.probes.canary import BLIND_IDLE, IN_LINE, YIELD_S
from cellgate.probes.engines import METRICS, MetricRole
from cellgate.probes.nodes import NodeProbe
from cellgate.probes.readiness import Readiness
from cellgate.probes.runner import GAP_S
from cellgate.proxy.cli.terminal import (
    WRONG,
    CommandError,
    add_file,
    add_settings,
    fleet_table,
    overrides,
    table,
)
from cellgate.proxy.config.key_file import read_keys
from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.schema import FileKeys, json_schema
from cellgate.proxy.config.settings import TICK_S, RedisAccess, Settings
from cellgate.proxy.observe.text import unsaid_ports
from cellgate.proxy.process.warnings import warnings_of
from cellgate.router.attention import SMALL
from cellgate.router.health import COUNTERS_FRESH_S, PREFILLS, STALLS, STEPS, UNSEEN_S
from cellgate.router.learning import MARK_S
from cellgate.router.nouns import DEGRADED_TIMES, PANIC_MAX_S, PANIC_SHARE, PANIC_UNITS, Fleet, Rules, Unit
from cellgate.router.outliers import COMPARE_S, STREAK
from cellgate.router.pauses import KEPT_S


def _redis_problems(file: FileKeys) -> Iterator[str]:
    """What is wrong with a URL that a gate would serve without."""
    if file.redis is None:
        return
    connect = part_of("redis", "connect")  # Late: it takes long, and most have none.
    try:
        connect.connector(RedisAccess(file.redis, None, None))
    except ValueError as error:
        yield f"redis: {error}"


def _as_json(settings: Settings) -> dict[str, Any]:
    """What the tables show. `found_within`: seconds from a fault until the unit is out."""
    found = kinds(settings.fleet.units)
    return {
        "valid": True,
        "problems": [],
        "warnings": list(warnings_of(settings)),
        "listen": str(settings.listen),
        "admin": str(settings.admin),
        "policy": settings.policy,
        "sources": [source.title for source in settings.sources],
        "units": [
            {
                "name": unit.name,
                "cell": unit.cell,
                "url": unit.url,
                "weight": unit.weight,
                "max_in_flight": unit.max_in_flight,
                "models": unit.models,
                "nodes": [{"name": node.name, "role": node.role.value} for node in unit.nodes],
            }
            for unit in settings.fleet.units
        ],
        "found_within": [
            {"units": names, "faults": [bound._asdict() for bound in rows(kind, settings.rules)]}
            for kind, names in found.items()
        ],
    }


# How soon each kind of fault takes a unit out of rotation: derived from the rules. Pure.
#
# The times are upper bounds for a gate that does not lag and units with short steps; cli/check.py
# prints how much slow work lengthens them.


SLACK_S = 0.2
"""For the network, and for the turns of the loops in between."""
REFUSED_S = Readiness().period_s + SLACK_S
"""Until readiness is probed, and either refused or confirmed."""


class UnitKind(NamedTuple):
    """What the times of a unit depend on.

    `counts`: its engine exposes counters that grow with each step (None: not known yet).
    `agents`: whether all of its nodes have an agent, only some, or none. `probe_s`: the longest period of its
    nodes' probes. `rests`: it is asked rarely while idle, as a unit of a large fleet.
    """

    counts: bool | None
    agents: str
    probe_s: float
    rests: bool = False


class FaultBound(NamedTuple):
    """A fault, and within how many seconds it is found: with streams of this gate, and while idle."""

    fault: str
    busy_s: float
    idle_s: float


def kinds(units: Sequence[Unit]) -> dict[UnitKind, list[str]]:
    """The distinct kinds of units, with the names of the units of each."""
    found: dict[UnitKind, list[str]] = {}
    for unit in units:
        have = sum(bool(node.agent) for node in unit.nodes)
        agents = "no" if not have else "all" if have == len(unit.nodes) else "some"
        probes = [cast(NodeProbe, probe) for node in unit.nodes for probe in node.probes]
        probe_s = max((probe.period_s for probe in probes if isinstance(probe, NodeProbe)), default=0.0)
        kind = UnitKind(_counts(unit.engine), agents, probe_s, len(units) > SMALL)
        found.setdefault(kind, []).append(unit.name)
    return found


def rows(kind: UnitKind, rules: Rules) -> list[FaultBound]:
    """Which fault is found within which time; an unknown engine is taken as one that counts its steps."""
    counts, reported_s = kind.counts is not False, LOOK_S + SLACK_S
    hang_s = busy_hang_s(rules, counts), idle_hang_s(rules, counts)
    found = []
    if kind.agents != "no":
        lost_s = lost_machine_s(rules, counts)
        where = "" if kind.agents == "all" else " of a node with an agent"
        found.append(FaultBound(f"a process{where} is killed or stopped", reported_s, reported_s))
        found.append(FaultBound(f"a machine{where} is lost", min(lost_s, hang_s[0]), min(lost_s, hang_s[1])))
    if kind.agents != "all":
        where = "" if kind.agents == "no" else " of a node without an agent"
        found.append(FaultBound("the leader's address refuses connections", REFUSED_S, REFUSED_S))
        found.append(FaultBound(f"another process{where} is killed or stopped, or a machine lost", *hang_s))
    if kind.probe_s:
        twice_s = 2.0 * kind.probe_s + SLACK_S
        later_s = max(REST_MAX_S - kind.probe_s, 0.0) if kind.rests else 0.0
        found.append(FaultBound("a probe of a node fails", twice_s, twice_s + later_s))
    return [*found, FaultBound("the engine hangs while its processes run", *hang_s)]


def canary_s(rules: Rules, counts: bool) -> float:
    """The timeout of a canary: at least that of a stall; more where only answers show progress."""
    return max(rules.canary_timeout_s * (1.0 if counts else IN_LINE), rules.silent_min_s)


def busy_hang_s(rules: Rules, counts: bool) -> float:
    """Until the stall is noticed on a tick, and the canary that follows has failed.

    Counters are as old as the previous tick, when they were requested, and old ones hide the stall for a
    while.
    """
    noticed_s = rules.silent_min_s + TICK_S
    if counts:
        noticed_s = max(noticed_s + TICK_S, COUNTERS_FRESH_S + TICK_S)
    return noticed_s + GAP_S + canary_s(rules, counts) + SLACK_S


def idle_hang_s(rules: Rules, counts: bool) -> float:
    """Until a canary is due, after the last progress or the canary in flight; then two fail.

    The canary in flight may be excused by progress just before the fault, and is repeated at once.
    """
    one_s = canary_s(rules, counts)
    due_s = rules.canary_idle_s * (1.0 if counts else BLIND_IDLE)
    return max(due_s, one_s) + 2.0 * one_s + SLACK_S


def lost_machine_s(rules: Rules, counts: bool) -> float:
    """Until its agent is missed, or the canary in flight has ended; then one fails."""
    one_s = canary_s(rules, counts)
    excused_s = 0.0 if counts else canary_s(rules, True)
    return max(SILENCE_S + BEAT_S, one_s) + excused_s + one_s + SLACK_S


def degraded_s() -> float:
    """Until only slow tokens are in the window, and enough comparisons in a row were slow."""
    return 2.0 * MARK_S + STREAK * COMPARE_S


def _counts(engine: str) -> bool | None:
    """Whether the engine has step counters; None for one that is not known yet."""
    if not engine:
        return None
    return any(role is MetricRole.STEPS and name.startswith(f"{engine}:") for name, role in METRICS.items())


# The detection times in `cellgate check`: one table for each kind of unit, and common notes. Pure.


_WIDTH = 100
_CHECK_NAMED_MAX = 5
_CHECK_HEAD = ("FAULT", "WHILE IT STREAMS", "WHILE IT IDLES")
_STEPS_ARE = {
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
    more = len(names) - _CHECK_NAMED_MAX
    named = ", ".join(names[:_CHECK_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
    head = (
        f"How soon {named} is out of rotation ({kind.agents} nodes have agents; {_STEPS_ARE[kind.counts]}):"
    )
    known = rows(kind, rules)
    blind = rows(kind._replace(counts=False), rules) if kind.counts is None else known
    lines = [
        (row.fault, _seconds(row.busy_s, other.busy_s), _seconds(row.idle_s, other.idle_s))
        for row, other in zip(known, blind, strict=True)
    ]
    return f"{fill(head, _WIDTH)}\n{table([_CHECK_HEAD, *lines])}"


def _seconds(known: float, blind: float) -> str:
    return f"{known:.1f} s" if known == blind else f"{known:.1f} s ({blind:.1f} s)"


def _notes(fleet: Fleet, rules: Rules) -> list[str]:
    """What lengthens these times, what else takes a unit out, and what brings it back."""
    whole = f", with its full share after {rules.slow_start_s:g} s" if rules.slow_start_s else ""
    return [
        f"Slow units take longer: a unit may stall for {STEPS:g} times its slowest usual step, or for "
        f"{PREFILLS:g} times the prefill of the largest prompt that waits there; a canary may take 4 times "
        "as long as usual there.",
        "Busy is not sick: requests that are there explain a silence for so long; where no steps are counted "
        "and the engine serves one request at a time, or where no other unit of the pool does better, for at "
        f"least {UNSEEN_S:g} s; and after a pause that a unit of the pool has ended by itself, for "
        f"{STALLS:g} times as long for {KEPT_S:g} s. Then two canaries decide.",
        f"Idle: an engine that counts its steps gets a canary after {rules.canary_idle_s:g} s, another one "
        f"after {rules.canary_idle_s * BLIND_IDLE:.1f} s; a request that comes sooner brings one with it.",
        f"Suspicion only: {rules.weak_min} slow or failing answers in {rules.weak_window_s:g} s that are at "
        f"least {rules.weak_rate:.0%} of all answers. A canary then decides.",
        "Gates that share a Redis send canaries for each other: a gate whose turn it is not finds a hang of "
        f"an idle unit up to {YIELD_S:g} s later.",
        f"Back after {rules.passes} canaries in a row{whole}. The first is sent {REFUSED_S:g} s after the "
        "unit is ready again, or when the canary in flight has ended "
        f"(up to {rules.warm_up_timeout_s:g} s).",
        f"Degraded: a unit gets fewer requests when a token takes {DEGRADED_TIMES:g} times as long as "
        f"in the rest of its cell; noticed within {degraded_s():g} s of steady streams.",
        *_resting(len(fleet.units)),
        _panic(len(fleet.units)),
    ]


def _resting(units: int) -> list[str]:
    if units <= SMALL:
        return []
    return [
        f"Many units: one that idles is asked less and less often, its nodes every {REST_MAX_S:g} s in the "
        f"end, itself, its load and its models every {REST_LONG_S:g} s, beside canaries, "
        "while a connection to each of its nodes shows that its processes are there. With its first request, "
        "or anything that speaks against it, it is asked as often as others at once."
    ]


def _panic(units: int) -> str:
    if units < PANIC_UNITS:
        return f"No panic: with fewer than {PANIC_UNITS} units, units that do not answer are down."
    return (
        f"Panic: when at least {PANIC_UNITS} units, and more than {PANIC_SHARE:.0%} of those "
        f"in rotation, do not answer at all, they stay in rotation for up to {PANIC_MAX_S:g} s."
    )


def check_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, flags that override it, and the form of the answer."""
    add_file(parser, "the configuration; -: from standard input")
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    add_settings(parser)


def open_claims(settings: Settings) -> list[str]:
    """What to say where keys are for some models, and units may say themselves which they serve."""
    if settings.keys is None:
        return []
    restricted = [key.name for key in read_keys(settings.keys.file).keys.values() if key.models is not None]
    units = [unit.name for unit in settings.fleet.units if not unit.models]
    if not restricted or not units:
        return []
    return [
        f"keys are for some models ({_some(restricted)}), but units may list any model as theirs, and "
        f"get its requests ({_some(units)}): give them `models`"
    ]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def run_check(args: argparse.Namespace) -> int:
    """Print what the gate would make of it. Raises ConfigError, but with --json prints that too."""
    path = args.file or args.config
    try:
        settings = load(path, overrides(args), also=_redis_problems)
    except ConfigError as error:
        if not args.json:
            raise
        print(json.dumps({"valid": False, "problems": error.problems}, indent=2))
        return WRONG
    if args.json:
        print(json.dumps(_as_json(settings), indent=2))
        return 0
    where = f"listens on {settings.listen}, admin on {settings.admin}"
    print(f"{path or 'flags'}: valid; {where}, policy {settings.policy}")
    for warning in warnings_of(settings):
        print(f"warning: {warning}")
    if settings.sources:
        print("more units are discovered from:", ", ".join(source.title for source in settings.sources))
    notes = [*unsaid_ports(settings.fleet), *open_claims(settings)]
    print("\n".join([fleet_table(settings.fleet), *notes]), end="\n\n")
    print(times_text(settings.fleet, settings.rules))
    return 0


# `cellgate schema`: the JSON Schema of the configuration.


def schema_arguments(parser: argparse.ArgumentParser) -> None:
    """Which of the two files."""
    parser.add_argument(
        "--operator", action="store_true", help="that of the operator's file (docs/operator.md)"
    )
    parser.epilog = "In an editor: # yaml-language-server: $schema=FILE at the top of the configuration."


def run_schema(args: argparse.Namespace) -> int:
    """Print it. Raises CommandError."""
    made = json_schema()
    if args.operator:
        try:
            keys = part_of("operator", "keys")
        except MissingExtraError as error:
            raise CommandError(f"--operator {error}") from None
        made = json_schema(keys.OPERATOR_SCHEMA, keys.OPERATOR_KINDS, "The operator's file of Cellgate")
    print(json.dumps(made, indent=2))
    return 0
