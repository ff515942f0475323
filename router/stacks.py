"""Software that differs within a unit, or between the units of a cell: versions, drivers, flags. Pure.

A stack is a mapping of names to values, as the agent tells it: `package NAME`, `driver NAME`, `image`,
`program`, `flag NAME`, `argument N`. Values that begin with `#` are hashes: they can only be compared.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from cellgate.router.node_nouns import NodeFacts
from cellgate.router.unit_state import UnitState

SHOWN_MAX = 4
_COMMAND = ("flag ", "argument ")
_OF_THE_NODE = re.compile(
    r"host|port|addr|rank|\bhead(less)?\b|master|node|url|endpoint|log|\bip\b|\binstance\b|^flag -+name$"
)
"""Flags that are meant to differ from node to node, or from unit to unit."""
_HEADLESS = "flag --headless"
_MISSING = "none"

Stack = Mapping[str, str]


def mixed(state: UnitState) -> str:
    """How the nodes of a unit differ from its first one that reports, in words; empty: they do not."""
    reports = [facts for facts in _reports(state) if facts.stack]
    return _few(
        f"{facts.node} has {words}"
        for facts in reports[1:]
        if (words := _few(differences(reports[0].stack, facts.stack, reports[0].node)))
    )


def odd_units(states: Iterable[UnitState]) -> dict[str, str]:
    """For each unit that differs from others of its cell, role and models: how, in words. Drained ones are
    left out, and each unit stands for itself by its first node that reports.
    """
    groups: defaultdict[tuple[str, str, frozenset[str]], dict[str, Stack]] = defaultdict(dict)
    for state in states:
        first = next((facts.stack for facts in _reports(state) if facts.stack), None)
        if first is not None and not state.drained:
            groups[state.unit.cell, state.unit.role, state.base_models()][state.unit.name] = first
    return {unit: words for stacks in groups.values() for unit, words in _odd(stacks)}


def _odd(stacks: Mapping[str, Stack]) -> Iterator[tuple[str, str]]:
    """Those that differ from the most common stack of a group, and how."""
    keys = {unit: tuple(sorted(_compared(stack).items())) for unit, stack in stacks.items()}
    counts = Counter(keys.values())
    if len(counts) < 2:
        return
    # Of equally common ones, that of the first unit: every gate names the same.
    usual = max(sorted(stacks), key=lambda unit: counts[keys[unit]])
    for unit, stack in stacks.items():
        if words := _few(differences(stacks[usual], stack, usual)):
            yield unit, words


def differences(usual: Stack, stack: Stack, whose: str) -> list[str]:
    """What differs from `usual`, the stack of `whose`: one phrase each, what people see first.

    A package, driver or image is compared where both are known; flags where both run the same program. What a
    headless engine has no flag for may be of the API, which it does not serve.
    """
    one, other = _compared(usual), _compared(stack)
    program = one.pop("program", None)
    is_same_program = program is not None and program == other.pop("program", None)
    found = []
    for name in sorted(one.keys() | other.keys(), key=lambda name: (name.startswith(_COMMAND), name)):
        before, after = one.get(name), other.get(name)
        if name.startswith(_COMMAND):
            is_comparable = is_same_program and not (after is None and _HEADLESS in stack)
        else:
            is_comparable = bool(before and after)
        if is_comparable and before != after:
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


def _compared(stack: Stack) -> dict[str, str]:
    return {
        name: value
        for name, value in stack.items()
        if not (name.startswith("flag ") and _OF_THE_NODE.search(name))
    }


def _reports(state: UnitState) -> list[NodeFacts]:
    """In the order of its nodes."""
    facts = state.facts.nodes
    return [facts[node.name] for node in state.unit.nodes if node.name in facts]


def _few(words: Iterable[str]) -> str:
    every = list(words)
    more = f" and {len(every) - SHOWN_MAX} more" if len(every) > SHOWN_MAX else ""
    return ", ".join(every[:SHOWN_MAX]) + more
