"""What is wrong with the network at the moment: tables that the connections look things up in.

A place is "host" or "host:port", by name or by IP. A fault on a place holds for connections to and from it.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import TypeVar

from tests.sim.tcp import Address, Link

T = TypeVar("T")

NEVER_ANSWERS = 0


class Faults:
    """The passive faults: they change what happens next and are undone by `heal`."""

    def __init__(self) -> None:
        self.default_link = Link()
        self.names: dict[str, list[str]] = {"localhost": ["127.0.0.1"]}
        self._links: dict[str, Link] = {}
        self._connect_faults: dict[str, int] = {}
        self._cuts: list[tuple[str, str | None]] = []
        self._unresolvable: set[str] = set()
        self._exhausted: set[str] = set()

    def refuse(self, place: str) -> None:
        """Refuse new connections."""
        self.fail_connects(place, errno.ECONNREFUSED)

    def blackhole(self, place: str) -> None:
        """Never answer new connections: the caller must have a timeout."""
        self.fail_connects(place, NEVER_ANSWERS)

    def exhaust_files(self, host: str) -> None:
        """Every connect by this host fails at once with EMFILE."""
        self._exhausted.add(self.canonical(host))

    def fail_connects(self, place: str, code: int) -> None:
        """New connections to or from the place fail with this errno."""
        self._connect_faults[self.canonical(place)] = code

    def fail_resolver(self, name: str) -> None:
        """Looking the name up fails with socket.gaierror."""
        self._unresolvable.add(name)

    def partition(self, a: str, b: str | None = None) -> None:
        """Hold every packet between two places (or between one and all others) until `heal`, as TCP would."""
        self._cuts.append((self.canonical(a), b and self.canonical(b)))

    def set_link(self, place: str, link: Link) -> None:
        """Let bytes to and from the place travel like this."""
        self._links[self.canonical(place)] = link

    def slow(self, place: str, bytes_per_s: float) -> None:
        """Make the place's link slow."""
        self.set_link(place, replace(self.default_link, bytes_per_s=bytes_per_s))

    def heal(self, place: str | None = None) -> None:
        """Undo every fault of the place, or all of them."""
        if place is None:
            for table in (self._links, self._connect_faults, self._cuts, self._unresolvable, self._exhausted):
                table.clear()
            return
        where = self.canonical(place)
        self._links.pop(where, None)
        self._connect_faults.pop(where, None)
        self._cuts = [cut for cut in self._cuts if where not in cut]
        self._exhausted.discard(where)
        self._unresolvable.discard(place.partition(":")[0])

    # Looking up

    def link(self, source: Address, target: Address) -> Link:
        if not self._links:
            return self.default_link
        return _first(self._links, source, target) or self.default_link

    def connect_fault(self, source: Address, target: Address) -> int | None:
        """The errno that a new connection meets, `NEVER_ANSWERS`, or None."""
        return _first(self._connect_faults, target, source)

    def is_exhausted(self, source: Address) -> bool:
        """Whether the host has no file descriptor left."""
        return source[0] in self._exhausted

    def is_cut(self, source: Address, target: Address) -> bool:
        if not self._cuts:
            return False
        here, there = places(source), places(target)
        return any(
            (a in here and _is_in(b, there)) or (a in there and _is_in(b, here)) for a, b in self._cuts
        )

    def canonical(self, place: str) -> str:
        """The place with its name replaced by the IP address that it has."""
        host, colon, port = place.partition(":")
        return self.names.get(host, [host])[0] + colon + port


def _first(table: dict[str, T], *addresses: Address) -> T | None:
    if table:
        for address in addresses:
            for place in places(address):
                if place in table:
                    return table[place]
    return None


def places(address: Address) -> tuple[str, str]:
    return f"{address[0]}:{address[1]}", address[0]


def _is_in(place: str | None, places: tuple[str, str]) -> bool:
    return place is None or place in places
