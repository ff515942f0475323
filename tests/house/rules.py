"""The rules, by the words in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial

from tests.house import clocks, fields, layout, names, ports, rooms, shapes, topics, words
from tests.house.source import FOLDERS, Finding, Source, sources

OF_A_FILE: dict[str, Callable[[Source], list[Finding]]] = {
    "imports against the layout": layout.imports_refused,
    "core's files that import an extra": layout.extras_in_core,
    "files that are named and not there": names.files_gone,
    f"files over {shapes.FILE_LINES} lines": shapes.files_long,
    f"functions over {shapes.FUNCTION_LINES} lines": shapes.functions_long,
    "tests that read a clock or sleep": clocks.clocks_and_sleeps,
    "files that begin with somebody else": topics.strangers_first,
    "heads of sections above a file's own topic": topics.sections_above,
    "contents that are in another order": topics.order_wrong,
}
OF_THE_WHOLE: dict[str, Callable[[], list[Finding]]] = {
    "rooms without a place in the order": rooms.rooms_unknown,
    "arrows that run up": rooms.arrows_up,
    "circles of modules": rooms.circles,
    "names that mean two things": names.names_twice,
    "files of one name": names.files_twice,
    "subclasses of what is composed": shapes.subclasses,
    "fields that nobody reads": fields.fields_unread,
}


@lru_cache
def in_files() -> Mapping[str, list[Finding]]:
    """What the rules of a file find: each file is read once, and forgotten."""
    found: dict[str, list[Finding]] = {rule: [] for rule in OF_A_FILE}
    for source in sources(*FOLDERS):
        for rule, find in OF_A_FILE.items():
            found[rule] += find(source)
    return found


def of_rule(rule: str) -> list[Finding]:
    return in_files()[rule]


RULES = OF_THE_WHOLE | {rule: partial(of_rule, rule) for rule in OF_A_FILE}


FIGURES: dict[str, tuple[int, Callable[[], list[Finding]]]] = {
    "old words in names": (0, words.old_words),
    "Protocols with one implementation": (4, ports.ports_of_one),
    "constants' names with several values": (17, ports.constants_of_many),
    "classes with attributes that may be absent": (5, ports.absent_attributes),
}
"""What is to become less: how many there may be, and what finds them. A bound is never raised."""
