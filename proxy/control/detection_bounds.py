"""How soon each kind of fault takes a unit out of rotation: derived from the rules. Pure.

The times are upper bounds for a gate that does not lag and units whose own work is quick; how much slow work
lengthens them is said in cli/detection_table.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from cellgate.probes.agent import BEAT_S, LOOK_S
from cellgate.probes.agent_link import SILENCE_S
from cellgate.probes.canary import IN_LINE
from cellgate.probes.engines import METRICS, MetricRole
from cellgate.probes.node import NodeProbe
from cellgate.probes.readiness import Readiness
from cellgate.probes.runner import GAP_S
from cellgate.proxy.config.settings import TICK_S
from cellgate.router.nouns import Rules, Unit
from cellgate.router.outliers import COMPARE_S, STREAK
from cellgate.router.stall import COUNTERS_FRESH_S
from cellgate.router.step_times import MARK_S

SLACK_S = 0.2
"""For the network, and for the turns of the loops in between."""
REFUSED_S = Readiness().period_s + SLACK_S
"""Until readiness is asked for, and either refused or found."""


class UnitKind(NamedTuple):
    """What the times of a unit depend on.

    `counts`: its engine shows counters that grow with each step (None: not known before it is asked).
    `agents`: all its nodes have one, only some, or none. `probe_s`: the longest period of its nodes' probes.
    """

    counts: bool | None
    agents: str
    probe_s: float


class FaultBound(NamedTuple):
    """A fault, and within how many seconds it is found: while streams of ours run there, and while idle."""

    fault: str
    busy_s: float
    idle_s: float


def kinds(units: Sequence[Unit]) -> dict[UnitKind, list[str]]:
    """The distinct kinds of units, and the names of those that are of each."""
    found: dict[UnitKind, list[str]] = {}
    for unit in units:
        have = sum(bool(node.agent) for node in unit.nodes)
        agents = "no" if not have else "all" if have == len(unit.nodes) else "some"
        probes = [cast(NodeProbe, probe) for node in unit.nodes for probe in node.probes]
        probe_s = max((probe.period_s for probe in probes if isinstance(probe, NodeProbe)), default=0.0)
        found.setdefault(UnitKind(_counts(unit.engine), agents, probe_s), []).append(unit.name)
    return found


def rows(kind: UnitKind, rules: Rules) -> list[FaultBound]:
    """What is found within which time; of an engine that is not known yet, as if it counted its steps."""
    counts, told_s = kind.counts is not False, LOOK_S + SLACK_S
    hang_s = busy_hang_s(rules, counts), idle_hang_s(rules, counts)
    found = []
    if kind.agents != "no":
        lost_s = lost_machine_s(rules, counts)
        where = "" if kind.agents == "all" else " of a node with an agent"
        found.append(FaultBound(f"a process{where} is killed or stopped", told_s, told_s))
        found.append(FaultBound(f"a machine{where} is lost", min(lost_s, hang_s[0]), min(lost_s, hang_s[1])))
    if kind.agents != "all":
        where = "" if kind.agents == "no" else " of a node without an agent"
        found.append(FaultBound("the leader's address refuses connections", REFUSED_S, REFUSED_S))
        found.append(FaultBound(f"another process{where} is killed or stopped, or a machine lost", *hang_s))
    if kind.probe_s:
        twice_s = 2.0 * kind.probe_s + SLACK_S
        found.append(FaultBound("a probe of a node fails", twice_s, twice_s))
    return [*found, FaultBound("the engine hangs while its processes run", *hang_s)]


def canary_s(rules: Rules, counts: bool) -> float:
    """How long a canary may take: at least as long as silence may; twice where only answers show work."""
    return max(rules.canary_timeout_s, rules.silent_min_s) * (1.0 if counts else 2.0)


def in_line_s(rules: Rules, counts: bool) -> float:
    """How long the canary of a suspect may take without streams of ours: others may be before it in line."""
    return canary_s(rules, True) * (1.0 if counts else IN_LINE)


def busy_hang_s(rules: Rules, counts: bool) -> float:
    """Until its silence is noticed on a tick, and the canary that this calls for has failed.

    Counters are as good as the tick before, when they were asked for, and stale ones hide it for a while.
    """
    noticed_s = rules.silent_min_s + TICK_S
    if counts:
        noticed_s = max(noticed_s + TICK_S, COUNTERS_FRESH_S + TICK_S)
    return noticed_s + GAP_S + canary_s(rules, counts) + SLACK_S


def idle_hang_s(rules: Rules, counts: bool) -> float:
    """Until a canary is due, after the last sign of life or the canary on its way; then two fail.

    A canary on its way may be excused by what it moved itself just before the fault, and is repeated at once.
    Where only answers show work, the next one may excuse itself: a request is there.
    """
    one_s, excused_s = canary_s(rules, counts), 0.0 if counts else canary_s(rules, True)
    due_s = max(rules.canary_idle_s, one_s)
    return due_s + excused_s + one_s + in_line_s(rules, counts) + SLACK_S


def lost_machine_s(rules: Rules, counts: bool) -> float:
    """Until its agent is missed, or the canary on its way is back; then one fails."""
    one_s = canary_s(rules, counts)
    excused_s = 0.0 if counts else canary_s(rules, True)
    return max(SILENCE_S + BEAT_S, one_s) + excused_s + in_line_s(rules, counts) + SLACK_S


def degraded_s() -> float:
    """Until only what is slow is counted, and enough comparisons in a row have said so."""
    return 2.0 * MARK_S + STREAK * COMPARE_S


def _counts(engine: str) -> bool | None:
    """Whether the engine has step counters; None for one that is yet to be found out."""
    if not engine:
        return None
    return any(role is MetricRole.STEPS and name.startswith(f"{engine}:") for name, role in METRICS.items())
