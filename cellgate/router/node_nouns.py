"""Nouns of what agents report of their nodes beside the state of processes, and what follows from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

CALM_KEPT = 3
"""Reports of quiet times that are kept of each node: error counters are compared with the oldest."""


class RankPlace(NamedTuple):
    """Where a rank of a communicator runs. `host` is its address as NCCL knows it."""

    rank: int
    host: str
    pid: int


class Behind(NamedTuple):
    """A rank that has launched so many collectives of a kind, while another one has launched `most`."""

    place: RankPlace
    operation: str
    launched: int
    most: int


@dataclass(frozen=True, slots=True)
class Communicator:
    """One group of ranks, as NCCL's RAS service reports it.

    `launched` is the sum of all counts of all ranks. `missing` are ranks that do not answer RAS, and whether
    it considers them dead; `failed` are ranks with an error and its number.
    """

    id: str
    size: int
    launched: int = 0
    behind_count: int = 0
    behind: tuple[Behind, ...] = ()
    missing: tuple[tuple[RankPlace, bool], ...] = ()
    failed: tuple[tuple[RankPlace, int], ...] = ()

    @property
    def is_mostly_behind(self) -> bool:
        """More ranks are behind than in front."""
        return 2 * self.behind_count > self.size


AGENT = "agent"
"""The source of evidence from the agents of nodes."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The report of one node's agent.

    `stack` is its software by name (docs/stacks.md), `counters` the error counters of its links and devices
    since they were last reset, `addresses` those of its interfaces. `communicators` are what its ranks say,
    the largest first; empty unless they were asked (`is_of_ranks`).
    """

    unit: str
    node: str
    at: float
    stack: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    addresses: frozenset[str] = frozenset()
    communicators: tuple[Communicator, ...] = ()
    is_of_ranks: bool = False


@dataclass(slots=True)
class UnitFacts:
    """What the nodes of a unit report, by node, and what was concluded from it; an empty text: nothing.

    `before` is the report before the last one. `mixed`: its nodes run different software. `odd`: it runs
    other software than units of its cell. `ranks`: what its ranks and their links say.
    """

    nodes: dict[str, NodeFacts] = field(default_factory=dict)
    before: dict[str, NodeFacts] = field(default_factory=dict)
    mixed: str = ""
    odd: str = ""
    ranks: tuple[str, ...] = ()
    _calm: dict[str, deque[NodeFacts]] = field(default_factory=dict)

    def take(self, facts: NodeFacts) -> None:
        """A new report of a node."""
        if facts.node in self.nodes:
            self.before[facts.node] = self.nodes[facts.node]
        self.nodes[facts.node] = facts
        if not facts.is_of_ranks:
            self._calm.setdefault(facts.node, deque(maxlen=CALM_KEPT)).append(facts)

    def baseline(self, node: str) -> NodeFacts | None:
        """The report that error counters of a node are compared with; None: there is none."""
        calm = self._calm.get(node)
        return calm[0] if calm else None

    def node_of(self, host: str) -> str:
        """The node that has this address; the address itself where no agent has reported it."""
        return next((facts.node for facts in self.nodes.values() if host in facts.addresses), host)

    def forget(self) -> None:
        """Forget what was reported of the previous incarnation."""
        self.nodes.clear()
        self.before.clear()
        self._calm.clear()
