"""Prints the rooms, the imports between them, every broken rule, and figures that are to become less.

Exits with 1 if a rule is broken, or a figure is larger than it may be. `python -m tests.house all` shows each
place that a figure counts.
"""

from __future__ import annotations

import sys
from collections import defaultdict

from tests.house.rooms import ORDER, arrows
from tests.house.rules import FIGURES, RULES
from tests.house.source import Source, product


def show_rooms() -> None:
    """Prints a line for each room, from the top: files, lines, and how often it imports which rooms."""
    rooms: defaultdict[str, list[Source]] = defaultdict(list)
    for source in product().values():
        rooms[source.room].append(source)
    every = arrows()
    print(f"{'room':<11}{'files':>6}{'lines':>7}  imports")
    for line in ORDER:
        for room in line.split():
            files = rooms[room]
            below = " ".join(f"{to}({n})" for (above, to), n in sorted(every.items()) if above == room)
            print(f"{room:<11}{len(files):>6}{sum(source.lines for source in files):>7}  {below}")
    print(f"{'all':<11}{len(product()):>6}{sum(source.lines for source in product().values()):>7}")


def show_rules() -> bool:
    """Prints a line for each rule and for each place that breaks it. Returns whether all rules are kept."""
    is_kept = True
    for rule, find in RULES.items():
        found = find()
        print(f"\n{rule}: {len(found)}")
        for where, detail in found:
            print(f"  {where}: {detail}")
        is_kept &= not found
    return is_kept


def show_figures(*, shows_all: bool) -> bool:
    """Prints a line for each figure. Returns whether none is larger than it may be."""
    is_kept = True
    print()
    for figure, (most, find) in FIGURES.items():
        found = find()
        print(f"{figure}: {len(found)} of at most {most}")
        if shows_all:
            for where, detail in found:
                print(f"  {where}: {detail}")
        is_kept &= len(found) <= most
    return is_kept


if __name__ == "__main__":
    show_rooms()
    is_kept = show_rules()
    sys.exit(not (show_figures(shows_all="all" in sys.argv) and is_kept))
