"""The rules, by the words in which they are shown."""

from __future__ import annotations

from collections.abc import Callable

from tests.house import clocks, names, rooms, shapes
from tests.house.findings import Finding

RULES: dict[str, Callable[[], list[Finding]]] = {
    "rooms without a place in the order": rooms.rooms_unknown,
    "arrows that run up": rooms.arrows_up,
    "circles of modules": rooms.circles,
    "names that mean two things": names.names_twice,
    "files of one name": names.files_twice,
    "files that are named and not there": names.files_gone,
    f"files over {shapes.FILE_LINES} lines": shapes.files_long,
    f"functions over {shapes.FUNCTION_LINES} lines": shapes.functions_long,
    "subclasses of what is composed": shapes.subclasses,
    "tests that read a clock or sleep": clocks.clocks_and_sleeps,
}
