"""Groups of pods or tasks: each is a unit, complete or with its faults. Pure.

An incomplete group becomes a unit as well, so that operators see it. Without a leader's address its URL is
empty.

In this order: `Group`, `Member`, `NodePorts`, `together`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from cellgate.proxy.discovery.base import GROUP, Found, Suspicion
from cellgate.router.nouns import Node, Place, Role, ServingRole, Unit


@dataclass(frozen=True, slots=True)
class Group:
    """All members of one unit. `noun` is what they are called: "pod", "task"; `numbered`: each has a rank."""

    name: str
    noun: str
    members: tuple[Member, ...]
    numbered: bool = False

    def found(self, like: Unit, ports: NodePorts) -> Found:
        """The unit, its faults, and, once it is complete, its epoch."""
        members = sorted(self.members, key=lambda one: (one.rank is None, one.rank or 0, one.name))
        wrong = "; ".join(self._wrong(members))
        suspicions = [
            Suspicion(self.name, one.name, one.trouble, one.fatal) for one in members if one.trouble
        ]
        if wrong:
            suspicions.append(Suspicion(self.name, GROUP, wrong))
        leaders = [one for one in members if one.rank == 0 and one.address]
        roles = [role for role in get_args(ServingRole) if any(one.serves == role for one in members)]
        unit = replace(
            like,
            name=self.name,
            role=roles[0] if roles else like.role,
            url=f"{ports.scheme}://{_at(leaders[0].address, ports.api)}" if leaders else "",
            nodes=tuple(_node(one, ports) for one in members),
        )
        epochs = () if wrong else ((self.name, self._epoch()),)
        return Found((unit,), suspicions=tuple(suspicions), epochs=epochs)

    def _wrong(self, members: Sequence[Member]) -> Iterator[str]:
        """The faults of the group as a whole."""
        noun = self.noun
        sizes = sorted({one.size for one in members if one.size is not None})
        if not sizes:
            yield f"its {noun}s do not state its size"
        elif len(sizes) > 1:
            yield f"its {noun}s do not agree on its size: {' or '.join(map(str, sizes))}"
        elif len(members) != sizes[0]:
            yield f"{_count(len(members), noun)}, its size is {sizes[0]}{self._missing(sizes[0])}"
        if (keys := len({one.key for one in members})) > 1:
            yield f"{keys} groups have this name: the previous one still exists"
        leaders = [one.name for one in members if one.rank == 0]
        if not leaders:
            yield f"no leader among its {noun}s"
        elif len(leaders) > 1:
            yield f"{len(leaders)} leaders: {', '.join(leaders)}"
        elif not any(one.address for one in members if one.rank == 0):
            yield f"its leader {leaders[0]} has no address"

    def _missing(self, size: int) -> str:
        missing = sorted(set(range(1, size)) - {one.rank for one in self.members})
        return f" (missing: {', '.join(map(str, missing))})" if missing and self.numbered else ""

    def _epoch(self) -> str:
        # A new group may keep the key of the old one, so the members count as well.
        born = "\n".join(sorted(one.incarnation for one in self.members))
        digest = hashlib.sha256(born.encode()).hexdigest()[:8]
        key = self.members[0].key[:8]
        return f"{key}-{digest}" if key else digest


@dataclass(frozen=True, slots=True)
class Member:
    """One pod or task of a unit.

    `incarnation` is unique for each instance; `rank` 0 is the leader, None: unknown; `size` is how many
    members there should be, None: unknown or invalid; `key` is common to all members of one unit. `trouble`
    is its fault (empty: none), `fatal` whether that is certain. `address` is empty until it has one.
    """

    name: str
    incarnation: str
    rank: int | None
    size: int | None
    key: str = ""
    address: str = ""
    trouble: str = ""
    fatal: bool = True
    serves: str = ""
    """The unit's role, as it is labelled: prefill, decode or both; else that of the configuration counts."""
    place: Place = ()


@dataclass(frozen=True, slots=True)
class NodePorts:
    """The ports on each node. `agent` 0: there are no agents."""

    api: int
    agent: int = 0
    scheme: str = "http"


def together(founds: Sequence[Found]) -> Found:
    """The results of many groups together."""
    return Found(
        units=tuple(unit for one in founds for unit in one.units),
        suspicions=tuple(suspicion for one in founds for suspicion in one.suspicions),
        epochs=tuple(epoch for one in founds for epoch in one.epochs),
    )


def _node(member: Member, ports: NodePorts) -> Node:
    role = Role.LEADER if member.rank == 0 else Role.FOLLOWER
    agent = _at(member.address, ports.agent) if ports.agent and member.address else ""
    return Node(member.name, role, agent, place=member.place)


def _at(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
