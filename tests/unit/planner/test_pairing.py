"""Units from free nodes: the least span there is, whatever the network looks like."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter

import pytest

from cellgate.proxy.extras.planner.topology import PlacedNode, pair


def nodes(*places: str) -> list[PlacedNode]:
    return [PlacedNode(f"n{at}", tuple(place.split("/"))) for at, place in enumerate(places)]


def network(rng: random.Random, count: int, zones: int, spines: int, leaves: int) -> list[PlacedNode]:
    def place() -> tuple[str, ...]:
        zone, spine, leaf = rng.randrange(zones), rng.randrange(spines), rng.randrange(leaves)
        return f"z{zone}", f"z{zone}s{spine}", f"z{zone}s{spine}l{leaf}"

    return [PlacedNode(f"n{at:04d}", place()) for at in range(count)]


def least_span(free: list[PlacedNode], size: int) -> int:
    """A bound that needs no pairing: of the units under a switch, those that are under none of its children
    span at least its layer.
    """
    depth, total, narrower = len(free[0].place) if free else 0, 0, 0
    for span in range(depth + 1):
        counts = Counter(node.place[: depth - span] for node in free)
        here = sum(count // size for count in counts.values())
        total += span * (here - narrower)
        narrower = here
    return total


def brute(free: list[PlacedNode], size: int) -> int:
    """The least span of all ways to make as many units as there can be."""
    if len(free) < size:
        return 0
    best = 10**9
    first, rest = free[0], free[1:]
    for others in itertools.combinations(rest, size - 1):
        unit = (first, *others)
        depth = len(first.place)
        shared = next((at for at in range(depth) if len({node.place[at] for node in unit}) > 1), depth)
        left = [node for node in rest if node not in others]
        best = min(best, depth - shared + brute(left, size))
    if len(free) % size:
        best = min(best, brute(rest, size))
    return best


def test_nodes_under_one_switch_are_one_unit() -> None:
    found = pair(nodes("z/a", "z/b", "z/a", "z/b"), 2)
    assert [(unit.nodes, unit.span) for unit in found.units] == [(("n0", "n2"), 0), (("n1", "n3"), 0)]
    assert found.over == ()


def test_what_is_over_under_switches_meets_under_the_next_wider_one() -> None:
    found = pair(nodes("z/a", "z/a", "z/a", "z/b", "y/c"), 2)
    assert [(unit.nodes, unit.under, unit.span, unit.groups) for unit in found.units] == [
        (("n0", "n1"), ("z", "a"), 0, 1),
        (("n2", "n3"), ("z",), 1, 2),
    ]
    assert found.over == ("n4",)


def test_rests_that_make_a_unit_together_meet() -> None:
    found = pair(nodes("z/a", "z/a", "z/a", "z/b", "z/b", "z/c", "z/d", "z/d"), 4)
    assert sorted(unit.groups for unit in found.units) == [2, 2]


@pytest.mark.parametrize("seed", range(60))
def test_no_other_choice_spans_less(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([2, 3])
    free = network(rng, rng.randint(size, 7), 2, 2, 2)
    found = pair(free, size)
    assert found.span == least_span(free, size) == brute(free, size)
    assert sorted([*itertools.chain(*(unit.nodes for unit in found.units)), *found.over]) == sorted(
        node.name for node in free
    )


@pytest.mark.alone
def test_a_thousand_nodes_are_paired_at_the_bound_within_two_seconds() -> None:
    free = network(random.Random(1), 1000, 3, 8, 12)
    began_at = time.process_time()
    found = pair(free, 4)
    assert time.process_time() - began_at < 2.0
    assert len(found.units) == 250
    assert found.span == least_span(free, 4)


def test_places_of_different_depths_are_refused() -> None:
    with pytest.raises(ValueError, match="node n1 has 1 layers and node n0 has 2"):
        pair(nodes("z/a", "z"), 2)


def test_a_node_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="node n0 is there twice"):
        pair([PlacedNode("n0", ("a",))] * 2, 2)
