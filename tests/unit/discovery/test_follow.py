"""From what sources tell to what the board believes: merged, held against units in time, and never lost."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from cellgate.proxy.discovery.base import Found, SourceError, Suspicion
from cellgate.proxy.discovery.follow import PAUSE_MAX_S, Discovery, merge
from cellgate.proxy.observe.events import Action
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Cell, Evidence, Fleet, Node, Role, Rules, Sign, Strength, Unit, Verdict
from cellgate.router.unit_state import Lease
from tests.sim.world import World, run

FIXED = Fleet((Cell("c"),), (Unit("fixed", "c", "http://fixed:1"),))
_worlds: defaultdict[str, list[Found | Exception]] = defaultdict(list)
"""What each scripted source meets, one thing a second; the last stays."""


@dataclass(frozen=True, slots=True)
class Scripted:
    kind: ClassVar[str] = "scripted"
    gone_is_dead: ClassVar[bool] = True

    name: str

    @property
    def title(self) -> str:
        return f"scripted {self.name}"

    async def follow(self) -> AsyncGenerator[Found, None]:
        while True:
            script = _worlds[self.name]
            met = script.pop(0) if len(script) > 1 else script[0]
            if isinstance(met, Exception):
                raise met
            yield met
            await asyncio.sleep(1.0)


@dataclass(slots=True)
class Gate:
    """The gate, as far as discovery needs it, on a real board."""

    board: Board = field(default_factory=lambda: Board(Rules()))
    told: list[str] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)
    evicted: list[Lease] = field(default_factory=list)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def configure(self, fleet: Fleet) -> str:
        added, removed, _ = self.board.configure(fleet, self.now())
        return " ".join([*(f"+{unit.name}" for unit in added), *(f"-{unit.name}" for unit in removed)])

    def observe(self, evidence: Evidence) -> None:
        self.told.append(f"{evidence.unit} {evidence.sign.value}: {evidence.reason}")
        self.evicted += self.board.observe(evidence).evicted

    def add(self, action: Action) -> None:
        self.events.append((action.kind, action.detail))

    def up(self, name: str) -> None:
        """A canary has passed."""
        self.board.observe(Evidence(name, Sign.GOOD, Strength.STRONG, "canary", "", self.now()))

    def lease(self, name: str) -> Lease:
        """It is UP, and has a request."""
        self.up(name)
        return self.board.open(name, Ask(), self.now(), retry=False)

    def verdict(self, name: str) -> Verdict:
        return self.board.units[name].case.verdict


def unit(name: str, host: str = "a", *nodes: str) -> Unit:
    all_nodes = tuple(Node(node, Role.FOLLOWER if n else Role.LEADER) for n, node in enumerate(nodes))
    return Unit(name, "c", f"http://{host}:1", nodes=all_nodes)


_begun: list[Discovery] = []


@pytest.fixture(autouse=True)
def play() -> Callable[[Coroutine[Any, Any, None]], None]:
    """Run a test in virtual time, and end what it has begun."""

    async def whole(scenario: Coroutine[Any, Any, None]) -> None:
        try:
            await scenario
        finally:
            while _begun:
                await _begun.pop().close()

    return lambda scenario: run(World(1), whole(scenario))


async def begin(*script: Found | Exception, sources: str = "x", turns: int = 2) -> tuple[Gate, Discovery]:
    """A gate that follows sources, of which x meets this, beside what is fixed; so many turns later."""
    gate, _worlds["x"] = Gate(), [*script]
    plane: Any = SimpleNamespace(
        now=gate.now, configure=gate.configure, board=gate.board, prober=gate, events=gate
    )
    _begun.append(discovery := Discovery(plane, random.Random(1), {"scripted": Scripted.follow}))
    discovery.take(FIXED, [Scripted(name) for name in sources])
    for _ in range(turns):
        await asyncio.sleep(0)
    return gate, discovery


def names(gate: Gate) -> list[str]:
    return list(gate.board.units)


A, B, D = (Found((unit(name, name),)) for name in "abd")
DELETED = Suspicion("a", "a-1", "its pod is being deleted")


async def test_what_is_found_stands_beside_what_is_fixed_and_changes_while_it_runs() -> None:
    gate, discovery = await begin(Found(A.units + B.units), Found(B.units + D.units))
    assert names(gate) == ["fixed", "a", "b"]
    await asyncio.sleep(1.5)
    assert names(gate) == ["fixed", "b", "d"]
    assert gate.events == [
        ("discovered", "scripted x: 2 units; +a +b"),
        ("discovered", "scripted x: 2 units; +d -a"),
    ]
    discovery.take(FIXED, [])
    assert (names(gate), discovery.connected()) == (["fixed"], {})
    discovery.remember(A)
    assert names(gate) == ["fixed"], "without sources nothing is remembered"


def test_a_source_may_bring_whole_cells_with_their_weights() -> None:
    found = Found((Unit("a", "far", "http://a:1"),), (Cell("far", 3.0), Cell("c", 9.0)))
    fleet, left_out = merge(FIXED, [found])
    assert [(cell.name, cell.weight) for cell in fleet.cells] == [("c", 1.0), ("far", 3.0)]
    assert left_out == (frozenset(),)


async def test_who_comes_first_keeps_a_name_and_the_other_is_named_once() -> None:
    """What is held against the one is not held against the other."""
    gate, _ = await begin(Found((unit("fixed", "other"), unit("a"))))
    await asyncio.sleep(5.0)
    assert gate.board.units["fixed"].unit.url == "http://fixed:1"
    clashes = [detail for kind, detail in gate.events if kind == "clash"]
    assert clashes == ["scripted x: its unit fixed is ignored: another unit has that name"]
    namesake, held = unit("fixed", "other"), replace(DELETED, unit="fixed")
    gate, _ = await begin(Found((namesake,), suspicions=(held,), epochs=(("fixed", "1"),)), Found())
    gate.up("fixed")
    await asyncio.sleep(1.1)
    assert (gate.verdict("fixed"), gate.told) == (Verdict.UP, [])


async def test_a_lost_world_leaves_the_last_units_and_is_told_once_and_again_when_it_is_back() -> None:
    lost = SourceError("nobody answers")
    gate, discovery = await begin(A, lost, lost, lost, ValueError("odd"), A)
    await asyncio.sleep(1.5)
    assert (names(gate), discovery.connected()) == (["fixed", "a"], {"scripted x": False})
    await asyncio.sleep(5 * PAUSE_MAX_S)
    assert (names(gate), discovery.connected()) == (["fixed", "a"], {"scripted x": True})
    assert gate.events[1:] == [
        ("source_lost", "scripted x: nobody answers; its last unit is kept, and it is retried"),
        ("source_back", "scripted x: it answers again"),
    ]
    gate, _ = await begin(lost)
    assert names(gate) == ["fixed"]
    never = "scripted x: nobody answers; it has given no units yet, and it is retried"
    assert gate.events == [("source_lost", never)]


async def test_what_was_found_before_this_process_stays_until_all_sources_have_found_something() -> None:
    _worlds["y"] = [SourceError("nobody answers"), B]
    gate, discovery = await begin(A, sources="xy", turns=0)
    before = (unit("fixed", "other"), *A.units, *B.units, unit("old", "old"))
    discovery.remember(Found(before, (Cell("c", 3.0), Cell("far", 2.0))))
    assert names(gate) == ["fixed", "a", "b", "old"]
    assert gate.board.units["fixed"].unit.url == "http://fixed:1"
    gate.board.units["a"].drained = True
    await asyncio.sleep(0.5)
    assert names(gate) == ["fixed", "a", "b", "old"]
    lost = "scripted y: nobody answers; its last 4 units are kept, and it is retried"
    assert gate.events[-1] == ("source_lost", lost)
    await asyncio.sleep(2.0)
    assert names(gate) == ["fixed", "a", "b"]
    assert gate.board.units["a"].drained
    discovery.remember(Found(before))
    assert names(gate) == ["fixed", "a", "b"], "that is known better by now"


async def test_a_fatal_doubt_takes_a_unit_out_at_once_and_only_its_end_lets_it_back() -> None:
    """One that is not fatal is a suspicion told once."""
    gate, _ = await begin(A, replace(A, suspicions=(DELETED,)), A)
    lease = gate.lease("a")
    await asyncio.sleep(1.1)
    assert (gate.verdict("a"), gate.evicted) == (Verdict.DOWN, [lease])
    gate.up("a")
    assert gate.verdict("a") is Verdict.DOWN
    await asyncio.sleep(1.0)
    gate.up("a")
    assert gate.verdict("a") is Verdict.PROBATION
    doubted = replace(A, suspicions=(replace(DELETED, reason="its pod is not ready", fatal=False),))
    gate, _ = await begin(A, doubted, doubted, replace(doubted, units=A.units + B.units))
    gate.up("a")
    await asyncio.sleep(1.1)
    assert gate.verdict("a") is Verdict.SUSPECT
    gate.up("a")
    await asyncio.sleep(3.0)
    assert gate.verdict("a") is Verdict.UP


async def test_a_doubt_stands_for_a_unit_that_is_found_with_it_and_for_one_that_is_probed_anew() -> None:
    suspicion = Suspicion("a", "group", "1 pod, its size is 2")
    alone = Found((unit("a", "a", "a-0"),), suspicions=(suspicion,))
    gate, _ = await begin(alone, replace(alone, units=(unit("a", "a", "a-0", "a-1"),)))
    assert gate.verdict("a") is Verdict.DOWN
    await asyncio.sleep(1.1)
    assert gate.board.units["a"].case.faults == {("group", "scripted")}


@pytest.mark.parametrize(
    "after", [unit("a", "a", "a-0", "a-1"), unit("a", "new", "a-0")], ids=["other nodes", "another address"]
)
async def test_another_incarnation_evicts_even_when_the_nodes_or_the_address_change_with_it(
    after: Unit,
) -> None:
    before = Found((unit("a", "a", "a-0"),), epochs=(("a", "first"),))
    gate, _ = await begin(before, Found((after,), epochs=(("a", "second"),)))
    lease = gate.lease("a")
    await asyncio.sleep(1.1)
    assert gate.evicted == [lease]
    assert (gate.board.units["a"].unit.url, gate.verdict("a")) == (after.url, Verdict.STARTING)


async def test_requests_of_a_unit_that_is_gone_for_good_move_and_none_waits_to_find_out() -> None:
    gate, _ = await begin(A, Found())
    lease = gate.lease("a")
    await asyncio.sleep(1.1)
    assert (names(gate), gate.evicted) == (["fixed"], [lease])
    assert [state.unit.name for state in gate.board.leaving] == ["a"]


async def test_a_reload_keeps_what_a_source_found_that_stays_and_follows_it_on() -> None:
    """Units of one that is replaced stay until the new one has found some, with what it held against them."""
    gate, discovery = await begin(A, B)
    other = Fleet((Cell("c"),), (Unit("also", "c", "http://also:1"),))
    assert discovery.take(other, [Scripted("x")]) == "+also -fixed"
    assert names(gate) == ["also", "a"]
    await asyncio.sleep(1.1)
    assert names(gate) == ["also", "b"]
    _worlds["y"] = [SourceError("not yet"), Found(B.units + D.units)]
    held = replace(DELETED, unit="b")
    gate, discovery = await begin(Found(A.units + B.units, suspicions=(held,)))
    discovery.take(FIXED, [Scripted("y")])
    await asyncio.sleep(0.1)
    assert (names(gate), gate.verdict("b")) == (["fixed", "a", "b"], Verdict.DOWN)
    kept = gate.board.units["b"]
    await asyncio.sleep(2.0)
    assert names(gate) == ["fixed", "b", "d"]
    assert gate.board.units["b"] is kept
    assert kept.case.faults == frozenset()
    assert "clash" not in dict(gate.events)
