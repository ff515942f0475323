"""Groups free nodes into units so that each unit spans as few layers of the network as possible. Pure.

A place is the path of a node from the widest layer to the narrowest: (zone, spine, leaf). The span of a unit
is how many layers its nodes do not share: 0 under one leaf, 1 under one spine, and so on.

What is proposed has the least total span that there is. Under any switch with n free nodes at most n // size
units fit. Whole units are taken under the narrowest switches first, and only what is over goes to the wider
ones. That makes exactly so many at every switch: what is over under its children is what is over above them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import yaml

from cellgate.extras.orchestrators import places_by_labels
from cellgate.router.nouns import Place


class PlacedNode(NamedTuple):
    """A node and its place."""

    name: str
    place: Place


class PairedUnit(NamedTuple):
    """Nodes that are to be one unit. `under` is the narrowest switch above all of them, `span` how many
    layers they do not share, `groups` under how many of the narrowest switches they are.
    """

    nodes: tuple[str, ...]
    under: Place
    span: int
    groups: int


class Pairing(NamedTuple):
    """The units, best first, and the nodes that are left over."""

    units: tuple[PairedUnit, ...]
    over: tuple[str, ...]

    @property
    def span(self) -> int:
        """Of all units together."""
        return sum(unit.span for unit in self.units)


def pair(nodes: Iterable[PlacedNode], size: int) -> Pairing:
    """Units of `size` nodes. Raises ValueError when places differ in depth, or a name is there twice."""
    left = sorted(nodes)
    _check(left)
    depth = len(left[0].place) if left else 0
    units: list[PairedUnit] = []
    for span in range(depth + 1):
        left, made = _at_one_layer(left, size, depth - span, span)
        units += made
    return Pairing(tuple(units), tuple(node.name for node in left))


def _check(nodes: Sequence[PlacedNode]) -> None:
    if len({len(node.place) for node in nodes}) > 1:
        first, other = nodes[0], next(node for node in nodes if len(node.place) != len(nodes[0].place))
        raise ValueError(
            f"node {other.name} has {len(other.place)} layers and node {first.name} has {len(first.place)}: "
            "give each node the same layers, from the widest to the narrowest"
        )
    for one, next_one in pairwise(nodes):
        if one.name == next_one.name:
            raise ValueError(f"node {one.name} is there twice")


def _at_one_layer(
    left: Sequence[PlacedNode], size: int, shared: int, span: int
) -> tuple[list[PlacedNode], list[PairedUnit]]:
    """Units whose nodes share the first `shared` layers, and the nodes that are over."""
    under: dict[Place, list[PlacedNode]] = defaultdict(list)
    for node in left:
        under[node.place[:shared]].append(node)
    over: list[PlacedNode] = []
    made: list[PairedUnit] = []
    for place, here in under.items():
        packed, rest = _packed(here, size)
        made += [
            PairedUnit(tuple(node.name for node in unit), place, span, len({node.place for node in unit}))
            for unit in packed
        ]
        over += rest
    return over, made


def _packed(nodes: Sequence[PlacedNode], size: int) -> tuple[list[list[PlacedNode]], list[PlacedNode]]:
    """As many units as fit, each from few of the narrowest switches: large rests are filled up by the largest
    rest that fits, so that rests that make a unit together meet.
    """
    rests: dict[Place, list[PlacedNode]] = defaultdict(list)
    for node in nodes:
        rests[node.place].append(node)
    queue = sorted(rests.values(), key=len, reverse=True)
    units: list[list[PlacedNode]] = []
    count = len(nodes) // size
    while len(units) < count:
        unit = _taken(queue.pop(0), size, queue)
        while len(unit) < size:
            room = size - len(unit)
            at = next((at for at, rest in enumerate(queue) if len(rest) <= room), len(queue) - 1)
            unit += _taken(queue.pop(at), room, queue)
        units.append(unit)
    return units, [node for rest in queue for node in rest]


def _taken(rest: list[PlacedNode], most: int, queue: list[list[PlacedNode]]) -> list[PlacedNode]:
    """Up to so many of a rest; what is over of it goes back."""
    if rest[most:]:
        queue.append(rest[most:])
        queue.sort(key=len, reverse=True)
    return rest[:most]


# Reads where nodes stand: from EC2's DescribeInstanceTopology, from Kubernetes, or from a list of our own.
#
# - EC2: `{"Instances": [{"InstanceId", "NetworkNodes": [widest, …, narrowest]}]}`
# (https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_InstanceTopology.html);
# - Kubernetes: `kubectl get nodes -o json`, with labels of one of the SCHEMES in extras/orchestrators.py;
# - a list: `[{"name", "place": [widest, …, narrowest]}]`, JSON or YAML.


_FORMS = (
    "the JSON of DescribeInstanceTopology, that of `kubectl get nodes -o json`, or a list of {name, place}"
)


def read_nodes(text: str) -> list[PlacedNode]:
    """The nodes in a file. Raises ValueError with one line that says what to do."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(
            f"it is neither JSON nor YAML ({str(error).splitlines()[0]}): give {_FORMS}"
        ) from None
    try:
        if isinstance(found, dict) and "Instances" in found:
            return [_node(each["InstanceId"], each["NetworkNodes"]) for each in found["Instances"]]
        if isinstance(found, dict) and "items" in found:
            labels = {each["metadata"]["name"]: each["metadata"].get("labels", {}) for each in found["items"]}
            return [PlacedNode(name, place) for name, place in places_by_labels(labels).items()]
        if isinstance(found, list):
            return [_node(each["name"], each["place"]) for each in found]
    except (TypeError, KeyError) as error:
        raise ValueError(f"an entry lacks {error}: give {_FORMS}") from None
    raise ValueError(f"it is no list of nodes: give {_FORMS}")


def _node(name: object, place: object) -> PlacedNode:
    if (
        not isinstance(name, str)
        or not isinstance(place, list)
        or not all(isinstance(at, str) for at in place)
    ):
        raise TypeError(f"a name and a place of strings: {name!r}, {place!r}")
    return PlacedNode(name, tuple(place))
