"""How soon each kind of fault takes a unit out of rotation: derived from the rules. Pure.

The times are upper bounds for a gate that does not lag and units with short steps; cli/check.py
prints how much slow work lengthens them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from cellgate.probes.agent import BEAT_S, LOOK_S
from cellgate.probes.agents import SILENCE_S
from cellgate.probes.canary import BLIND_IDLE, IN_LINE
from cellgate.probes.engines import METRICS, MetricRole
from cellgate.probes.nodes import NodeProbe
from cellgate.probes.readiness import Readiness
from cellgate.probes.runner import GAP_S
from cellgate.proxy.config.settings import TICK_S
from cellgate.router.health import COUNTERS_FRESH_S
from cellgate.router.learning import MARK_S
from cellgate.router.nouns import Rules, Unit
from cellgate.router.outliers import COMPARE_S, STREAK

SLACK_S = 0.2
"""For the network, and for the turns of the loops in between."""
REFUSED_S = Readiness().period_s + SLACK_S
"""Until readiness is probed, and either refused or confirmed."""


class UnitKind(NamedTuple):
    """What the times of a unit depend on.

    `counts`: its engine exposes counters that grow with each step (None: not known yet).
    `agents`: whether all of its nodes have an agent, only some, or none. `probe_s`: the longest period of its
    nodes' probes.
    """

    counts: bool | None
    agents: str
    probe_s: float


class FaultBound(NamedTuple):
    """A fault, and within how many seconds it is found: with streams of this gate in flight, and while
    idle.
    """

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
        found.setdefault(UnitKind(_counts(unit.engine), agents, probe_s), []).append(unit.name)
    return found


def rows(kind: UnitKind, rules: Rules) -> list[FaultBound]:
    """Which fault is found within which time; an unknown engine is taken as one that counts its steps."""
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
