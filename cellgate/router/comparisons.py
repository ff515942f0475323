"""Builds that differ within a cell: units of one model that are not the same engine, so configured. Pure.

In this order: `other_builds`, `Stacks`, `conclusions`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from cellgate.router.nouns import Build, Communicator, NodeFacts, RankPlace, UnitFacts
from cellgate.router.unit_state import UnitState

NAMES_MAX = 5
"""Units that are named for each unit; a cell may have thousands."""


def other_builds(states: Iterable[UnitState]) -> dict[str, tuple[str, ...]]:
    """For each unit that differs, some units of its cell and model with another known build.

    Units whose build is unknown, and drained ones, are left out.
    """
    cells: defaultdict[str, defaultdict[Build, list[UnitState]]] = defaultdict(lambda: defaultdict(list))
    for state in states:
        if state.build.key and not state.drained:
            cells[state.unit.cell][state.build._replace(changes=0)].append(state)
    differing = {}
    for builds in cells.values():
        for build, units in builds.items() if len(builds) > 1 else ():
            others = [other for its, found in builds.items() if its.differs(build) for other in found]
            for state in units:
                if names := _sharing(state, others):
                    differing[state.unit.name] = names
    return differing


def _sharing(state: UnitState, others: list[UnitState]) -> tuple[str, ...]:
    """Some of `others` that serve a model of this unit; without known models a unit may serve any."""
    names = []
    for other in others:
        if not (state.models and other.models) or not state.models.isdisjoint(other.models):
            names.append(other.unit.name)
            if len(names) == NAMES_MAX:
                break
    return tuple(names)


# Software that differs within a unit, or between the units of a cell: versions, drivers, flags. Pure.
#
# A stack is a mapping of names to values, as the agent tells it: `package NAME`, `driver NAME`, `image`,
# `program`, `flag NAME`, `argument N`. Values that begin with `#` are hashes: they can only be compared.


SHOWN_MAX = 4
_COMMAND = ("flag ", "argument ")
_OF_THE_NODE = re.compile(
    r"host|port|addr|rank|\bhead(less)?\b|master|node|url|endpoint|log|\bip\b|\binstance\b|^flag -+name$"
)
"""Flags that are meant to differ from node to node, or from unit to unit."""
_HEADLESS = "flag --headless"
_MISSING = "none"

Stack = Mapping[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class Software:
    """What of a stack is compared, and as a set, which is the same for the same software."""

    compared: Mapping[str, str]
    key: frozenset[tuple[str, str]]
    is_headless: bool


@dataclass(slots=True)
class _Unit:
    """What was read of a unit: by node, in order, the report and what it says; and how its nodes differ."""

    nodes: dict[str, tuple[NodeFacts, Software]] = field(default_factory=dict)
    mixed: str = ""

    def reported(self) -> list[tuple[str, Software]]:
        """That of the nodes that report any."""
        return [(name, software) for name, (facts, software) in self.nodes.items() if facts.stack]


class Stacks:
    """The software of all units. What takes long is a generator: between two of its steps at most one stack
    is read or compared, and none is read again that has not changed.
    """

    def __init__(self) -> None:
        self._units: dict[UnitState, _Unit] = {}
        self._softwares: dict[tuple[frozenset[tuple[str, str]], bool], Software] = {}
        """One for all nodes that run the same, because a thousand equal sets take long to compare."""

    def read(self, state: UnitState) -> Iterator[None]:
        """Read what was reported of a unit since the last time."""
        unit = self._units.setdefault(state, _Unit())
        before, unit.nodes = unit.nodes, {}
        has_changed = False
        for facts in _reports(state):
            known = before.get(facts.node)
            if known is not None and (known[0] is facts or known[0].stack == facts.stack):
                unit.nodes[facts.node] = facts, known[1]
            else:
                read, has_changed = software_of(facts.stack), True
                unit.nodes[facts.node] = facts, self._softwares.setdefault((read.key, read.is_headless), read)
            if known is None or known[0] is not facts:
                yield
        if has_changed or list(before) != list(unit.nodes):
            yield from _compare_nodes(unit)

    def mixed(self, state: UnitState) -> str:
        """How the nodes of a unit differ from its first one that reports, in words; empty: they do not."""
        return self._units[state].mixed if state in self._units else ""

    def odd(self, states: Iterable[UnitState]) -> Iterator[tuple[UnitState, str]]:
        """For each unit how it differs from others of its cell, role and models, in words; empty: it does
        not. Drained ones are left out, and each unit stands for itself by its first node that reports.
        """
        groups: defaultdict[tuple[str, str, frozenset[str]], dict[UnitState, Software]] = defaultdict(dict)
        for state in states:
            found = self._units[state].reported() if state in self._units else []
            if found and not state.drained:
                groups[state.unit.cell, state.unit.role, state.base_models()][state] = found[0][1]
        for group in groups.values():
            usual = usual_of({state.unit.name: software.key for state, software in group.items()})
            [whose] = (software for state, software in group.items() if state.unit.name == usual)
            for state, software in group.items():
                yield state, _few(differences(whose, software, usual))

    def keep(self, states: Iterable[UnitState]) -> None:
        """Forget all other units."""
        self._units = {state: self._units[state] for state in states if state in self._units}
        used = (software for unit in self._units.values() for _, software in unit.nodes.values())
        self._softwares = {(software.key, software.is_headless): software for software in used}


def _compare_nodes(unit: _Unit) -> Iterator[None]:
    softwares, found = unit.reported(), []
    for name, software in softwares[1:]:
        usual, first = softwares[0]
        if words := _few(differences(first, software, usual)):
            found.append(f"{name} has {words}")
        yield
    unit.mixed = _few(found)


def usual_of(keys: Mapping[str, Hashable]) -> str:
    """The unit that has the most common of these."""
    counts = Counter(keys.values())
    # Of equally common ones, that of the first unit: every gate names the same.
    return max(sorted(keys), key=lambda unit: counts[keys[unit]])


def software_of(stack: Stack) -> Software:
    """What of a stack is compared: no flags that are meant to differ."""
    compared = {
        name: value
        for name, value in stack.items()
        if not (name.startswith("flag ") and _OF_THE_NODE.search(name))
    }
    return Software(compared, frozenset(compared.items()), _HEADLESS in stack)


def differences(usual: Software, software: Software, whose: str) -> list[str]:
    """What differs from `usual`, that of `whose`: one phrase each, what people see first.

    A package, driver or image is compared where both are known; flags where both run the same program. What a
    headless engine has no flag for may be of the API, which it does not serve.
    """
    if usual is software:
        return []
    one, other = usual.compared, software.compared
    is_same_program = "program" in one and one["program"] == other.get("program")
    found = []
    names = {name for name, _ in usual.key ^ software.key} - {"program"}
    for name in sorted(names, key=lambda name: (name.startswith(_COMMAND), name)):
        before, after = one.get(name), other.get(name)
        if name.startswith(_COMMAND):
            is_comparable = is_same_program and not (after is None and software.is_headless)
        else:
            is_comparable = bool(before and after)
        if is_comparable:
            found.append(_phrase(name, before, after, whose))
    return found


def _phrase(name: str, before: str | None, after: str | None, whose: str) -> str:
    shown = name.removeprefix("flag ").removeprefix("package ")
    if after is None:
        return f"no {shown} ({whose} has it)"
    if before is None:
        return f"{shown} ({whose} has {_MISSING})"
    if "#" in (before[:1], after[:1]):
        return f"another {shown} than {whose}"
    return f"{shown} {after or 'without a value'} ({whose}: {before or 'without a value'})"


def _reports(state: UnitState) -> list[NodeFacts]:
    """In the order of its nodes."""
    facts = state.facts.nodes
    return [facts[node.name] for node in state.unit.nodes if node.name in facts]


def _few(words: Iterable[str]) -> str:
    every = list(words)
    more = f" and {len(every) - SHOWN_MAX} more" if len(every) > SHOWN_MAX else ""
    return ", ".join(every[:SHOWN_MAX]) + more


# What ranks say of a unit that stands still: who has not entered a collective, which links failed. Pure.
#
# NCCL counts the collectives that each rank has launched, by kind. Ranks that run ahead for a moment are
# usual. So a rank is called behind only when two reports, one after the other, have the same counts.


COMPARED_NAMED_MAX = 4
FRESH_S = 60.0
"""A report that is older says nothing of the present."""

_NCCL_ERRORS = {
    1: "unhandled CUDA error",
    2: "system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote process error",
}
"""ncclResult_t, without success (0) and in progress (7)."""


def conclusions(facts: UnitFacts, now: float) -> tuple[str, ...]:
    """Sentences without a full stop, the most telling first."""
    nodes = [node for node in facts.nodes.values() if now - node.at <= FRESH_S]
    of_ranks = (
        line for node in nodes for line in _of_ranks(facts.before.get(node.node), node, facts.node_of)
    )
    of_devices = (line for node in nodes for line in _of_devices(facts.baseline(node.node), node))
    return tuple(dict.fromkeys((*of_ranks, *of_devices)))[:COMPARED_NAMED_MAX]


def _of_ranks(before: NodeFacts | None, now: NodeFacts, node_of: Callable[[str], str]) -> Iterator[str]:
    known = {comm.id: comm for comm in before.communicators} if before is not None else {}
    named = set[tuple[str, int]]()
    for comm in now.communicators:
        stands_still = comm == known.get(comm.id)
        for place, words in _of_communicator(comm, stands_still=stands_still):
            # Its number differs from communicator to communicator; the largest one comes first.
            if (place.host, place.pid) not in named:
                named.add((place.host, place.pid))
                yield f"rank {place.rank} on node {node_of(place.host)} (process {place.pid}) {words}"
        if stands_still and comm.is_mostly_behind and comm.behind:
            late = comm.behind[0]
            yield f"{comm.behind_count} of {comm.size} ranks have not entered {late.operation} {late.most}"


def _of_communicator(comm: Communicator, *, stands_still: bool) -> Iterator[tuple[RankPlace, str]]:
    for place, is_dead in comm.missing:
        lasts = ", for a minute or more" if is_dead else ""
        yield place, f"does not answer the other ranks{lasts}"
    for place, code in comm.failed:
        yield place, f"reports an NCCL error: {_NCCL_ERRORS.get(code, f'number {code}')}"
    for late in comm.behind if stands_still and not comm.is_mostly_behind else ():
        more = f" and {late.most - late.launched - 1} before it" if late.most - late.launched > 1 else ""
        yield (
            late.place,
            f"never entered {late.operation} {late.most}{more}, which {comm.size - comm.behind_count} of "
            f"{comm.size} ranks wait in",
        )


def _of_devices(before: NodeFacts | None, now: NodeFacts) -> Iterator[str]:
    """Error counters of links and devices that have grown."""
    if before is None:
        return
    for name, count in now.counters.items():
        more = count - before.counters.get(name, count)
        if more > 0:
            yield f"node {now.node} counts {name} +{more} within {now.at - before.at:.0f} s"
