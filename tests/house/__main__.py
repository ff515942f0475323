"""Shows the house: rooms, arrows between them, and whether the rules are kept. Fails if one is not."""

from __future__ import annotations

import sys
from collections import defaultdict

from tests.house.open import OPEN
from tests.house.rooms import ORDER, arrows
from tests.house.rules import RULES
from tests.house.source import Source, product


def show_rooms() -> None:
    """A line a room, in their order: files, lines, and the rooms that it imports, with how often."""
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


def show_rules() -> bool:
    """A line a rule, and what does not keep it. Whether just what is known to be open does not."""
    is_kept = True
    for rule, find in RULES.items():
        found, known = find(), OPEN.get(rule, ())
        print(f"\n{rule}: {len(found)}")
        for key, detail in found:
            print(f"  {'open' if key in known else 'NEW '}  {key}: {detail}")
        mended = sorted(set(known) - {finding.key for finding in found})
        for key in mended:
            print(f"  MENDED  {key}: take its line out of tests/house/open.py")
        is_kept &= not mended and all(finding.key in known for finding in found)
    return is_kept


if __name__ == "__main__":
    show_rooms()
    sys.exit(not show_rules())
