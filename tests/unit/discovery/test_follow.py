"""From what sources tell to what the board believes: merged, held against units in time, and never lost."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from cellgate.proxy.config.settings import Source
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

    def tell(self, action: Action) -> None:
        self.events.append((action.kind, action.detail))

    def up(self, name: str) -> None:
        """A canary has passed."""
        self.board.observe(Evidence(name, Sign.GOOD, Strength.STRONG, "canary", "", self.now()))

    def verdict(self, name: str) -> Verdict:
        return self.board.units[name].case.verdict


def unit(name: str, host: str = "a", *nodes: str) -> Unit:
    all_nodes = tuple(Node(node, Role.FOLLOWER if n else Role.LEADER) for n, node in enumerate(nodes))
    return Unit(name, "c", f"http://{host}:1", nodes=all_nodes)


@pytest.fixture(autouse=True)
def play() -> Callable[[Coroutine[Any, Any, None]], None]:
    return lambda scenario: run(World(1), scenario)


async def begin(gate: Gate, *sources: Source, fixed: Fleet = FIXED) -> Discovery:
    discovery = Discovery(gate, random.Random(1), {"scripted": Scripted.follow})
    discovery.take(fixed, sources)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return discovery


def names(gate: Gate) -> list[str]:
    return list(gate.board.units)


async def test_what_is_found_stands_beside_what_is_fixed_and_changes_while_it_runs() -> None:
    _worlds["x"] = [Found((unit("a"), unit("b", "b"))), Found((unit("b", "b"), unit("d", "d")))]
    gate = Gate()
    discovery = await begin(gate, Scripted("x"))
    assert names(gate) == ["fixed", "a", "b"]
    await asyncio.sleep(1.5)
    assert names(gate) == ["fixed", "b", "d"]
    assert gate.events == [
        ("discovered", "scripted x: 2 units; +a +b"),
        ("discovered", "scripted x: 2 units; +d -a"),
    ]
    await discovery.close()


def test_a_source_may_bring_whole_cells_with_their_weights() -> None:
    found = Found((Unit("a", "far", "http://a:1"),), (Cell("far", 3.0), Cell("c", 9.0)))
    fleet, left_out = merge(FIXED, [found])
    assert [(cell.name, cell.weight) for cell in fleet.cells] == [("c", 1.0), ("far", 3.0)]
    assert left_out == (frozenset(),)


async def test_who_comes_first_keeps_a_name_and_the_other_is_named_once() -> None:
    _worlds["x"] = [Found((unit("fixed", "other"), unit("a")))]
    gate = Gate()
    discovery = await begin(gate, Scripted("x"))
    await asyncio.sleep(5.0)
    assert gate.board.units["fixed"].unit.url == "http://fixed:1"
    clashes = [detail for kind, detail in gate.events if kind == "clash"]
    assert clashes == ["scripted x: its unit fixed is ignored: another unit has that name"]
    await discovery.close()


async def test_a_lost_world_leaves_the_last_units_and_is_told_once_and_again_when_it_is_back() -> None:
    lost = SourceError("nobody answers")
    _worlds["x"] = [Found((unit("a"),)), lost, lost, lost, ValueError("odd"), Found((unit("a"),))]
    gate = Gate()
    discovery = await begin(gate, Scripted("x"))
    await asyncio.sleep(1.5)
    assert (names(gate), discovery.connected()) == (["fixed", "a"], {"scripted x": False})
    await asyncio.sleep(5 * PAUSE_MAX_S)
    assert (names(gate), discovery.connected()) == (["fixed", "a"], {"scripted x": True})
    assert gate.events[1:] == [
        ("source_lost", "scripted x: nobody answers; its last 1 units are kept, and it is retried"),
        ("source_back", "scripted x: it answers again"),
    ]
    await discovery.close()


async def test_a_source_that_was_never_seen_takes_nothing_away() -> None:
    _worlds["x"] = [SourceError("nobody answers")]
    gate = Gate()
    discovery = await begin(gate, Scripted("x"))
    assert names(gate) == ["fixed"]
    assert gate.events == [
        ("source_lost", "scripted x: nobody answers; it has given no units yet, and it is retried")
    ]
    await discovery.close()


async def test_what_was_found_before_this_process_stays_until_all_sources_have_found_something() -> None:
    _worlds["x"] = [Found((unit("a"),))]
    _worlds["y"] = [SourceError("nobody answers"), Found((unit("b", "b"),))]
    gate = Gate()
    discovery = Discovery(gate, random.Random(1), {"scripted": Scripted.follow})
    discovery.take(FIXED, [Scripted("x"), Scripted("y")])
    before = (unit("fixed", "other"), unit("a"), unit("b", "b"), unit("old", "old"))
    discovery.remember(Found(before, (Cell("c", 3.0), Cell("far", 2.0))))
    assert names(gate) == ["fixed", "a", "b", "old"]
    assert gate.board.units["fixed"].unit.url == "http://fixed:1"
    gate.board.units["a"].drained = True
    await asyncio.sleep(0.5)
    assert names(gate) == ["fixed", "a", "b", "old"]
    assert gate.events[-1] == (
        "source_lost",
        "scripted y: nobody answers; its last 4 units are kept, and it is retried",
    )
    await asyncio.sleep(2.0)
    assert names(gate) == ["fixed", "a", "b"]
    assert gate.board.units["a"].drained
    discovery.remember(Found(before))
    assert names(gate) == ["fixed", "a", "b"], "that is known better by now"
    await discovery.close()


async def test_without_sources_nothing_is_remembered() -> None:
    gate = Gate()
    discovery = await begin(gate)
    discovery.remember(Found((unit("a"),)))
    assert names(gate) == ["fixed"]


async def test_a_fatal_doubt_takes_a_unit_out_at_once_and_only_its_end_lets_it_back() -> None:
    suspicion = Suspicion("a", "a-1", "its pod is being deleted")
    _worlds["x"] = [Found((unit("a"),)), Found((unit("a"),), suspicions=(suspicion,)), Found((unit("a"),))]
    gate = Gate()
    discovery = await begin(gate, Scripted("x"))
    gate.up("a")
    lease = gate.board.open("a", Ask(), gate.now(), retry=False)
    await asyncio.sleep(1.1)
    assert (gate.verdict("a"), gate.evicted) == (Verdict.DOWN, [lease])
    gate.up("a")
    assert gate.verdict("a") is Verdict.DOWN
    await asyncio.sleep(1.0)
    gate.up("a")
    assert gate.verdict("a") is Verdict.PROBATION
    await discovery.close()


async def test_a_doubt_that_is_not_fatal_is_a_suspicion_told_once() -> None:
    suspicion = Suspicion("a", "a-1", "its pod is not ready", fatal=False)
    doubted = Found((unit("a"),), suspicions=(suspicion,))
    more = Found((unit("a"), unit("b", "b")), suspicions=(suspicion,))
    _worlds["x"] = [Found((unit("a"),)), doubted, doubted, more]
    gate = Gate()
    discovery = await begin(gate, Scripted("x"))
    gate.up("a")
    await asyncio.sleep(1.1)
    assert gate.verdict("a") is Verdict.SUSPECT
    gate.up("a")
    await asyncio.sleep(3.0)
    assert gate.verdict("a") is Verdict.UP
    await discovery.close()


async def test_a_doubt_stands_for_a_unit_that_is_found_with_it_and_for_one_that_is_probed_anew() -> None:
    suspicion = Suspicion("a", "group", "1 pod, its size is 2")
    alone = Found((unit("a", "a", "a-0"),), suspicions=(suspicion,))
    moved = Found((unit("a", "a", "a-0", "a-1"),), suspicions=(suspicion,))
    _worlds["x"] = [alone, moved]
    gate = Gate()
    discovery = await begin(gate, Scripted("x"))
    assert gate.verdict("a") is Verdict.DOWN
    await asyncio.sleep(1.1)
    assert gate.board.units["a"].case.faults == {("group", "scripted")}
    await discovery.close()


async def test_another_incarnation_evicts_even_when_the_nodes_change_with_it() -> None:
    _worlds["x"] = [
        Found((unit("a", "a", "a-0"),), epochs=(("a", "first"),)),
        Found((unit("a", "a", "a-0", "a-1"),), epochs=(("a", "second"),)),
    ]
    gate = Gate()
    discovery = await begin(gate, Scripted("x"))
    gate.up("a")
    lease = gate.board.open("a", Ask(), gate.now(), retry=False)
    await asyncio.sleep(1.1)
    assert (gate.verdict("a"), gate.evicted) == (Verdict.STARTING, [lease])
    await discovery.close()


async def test_another_incarnation_at_another_address_evicts_what_runs_at_the_old_one() -> None:
    _worlds["x"] = [
        Found((unit("a", "old"),), epochs=(("a", "first"),)),
        Found((unit("a", "new"),), epochs=(("a", "second"),)),
    ]
    gate = Gate()
    discovery = await begin(gate, Scripted("x"))
    gate.up("a")
    lease = gate.board.open("a", Ask(), gate.now(), retry=False)
    await asyncio.sleep(1.1)
    assert gate.evicted == [lease]
    assert (gate.board.units["a"].unit.url, gate.verdict("a")) == ("http://new:1", Verdict.STARTING)
    await discovery.close()


async def test_requests_of_a_unit_that_is_gone_for_good_move_and_none_waits_to_find_out() -> None:
    _worlds["x"] = [Found((unit("a"),)), Found()]
    gate = Gate()
    discovery = await begin(gate, Scripted("x"))
    gate.up("a")
    lease = gate.board.open("a", Ask(), gate.now(), retry=False)
    await asyncio.sleep(1.1)
    assert (names(gate), gate.evicted) == (["fixed"], [lease])
    assert [state.unit.name for state in gate.board.leaving] == ["a"]
    await discovery.close()


async def test_a_reload_keeps_what_a_source_found_that_stays_and_follows_it_on() -> None:
    _worlds["x"] = [Found((unit("a"),)), Found((unit("b", "b"),))]
    gate = Gate()
    discovery = await begin(gate, Scripted("x"))
    other = Fleet((Cell("c"),), (Unit("also", "c", "http://also:1"),))
    assert discovery.take(other, [Scripted("x")]) == "+also -fixed"
    assert names(gate) == ["also", "a"]
    await asyncio.sleep(1.1)
    assert names(gate) == ["also", "b"]
    await discovery.close()


async def test_units_of_a_source_that_is_replaced_stay_until_the_new_one_has_found_some() -> None:
    _worlds["x"] = [Found((unit("a"), unit("b", "b")))]
    _worlds["y"] = [SourceError("not yet"), Found((unit("b", "b"), unit("d", "d")))]
    gate = Gate()
    discovery = await begin(gate, Scripted("x"))
    discovery.take(FIXED, [Scripted("y")])
    await asyncio.sleep(0.1)
    assert names(gate) == ["fixed", "a", "b"]
    kept = gate.board.units["b"]
    await asyncio.sleep(2.0)
    assert names(gate) == ["fixed", "b", "d"]
    assert gate.board.units["b"] is kept
    assert "clash" not in dict(gate.events)
    await discovery.close()


async def test_what_a_replaced_source_held_against_a_unit_ends_with_it() -> None:
    _worlds["x"] = [Found((unit("a"),), suspicions=(Suspicion("a", "a-1", "its pod is being deleted"),))]
    _worlds["y"] = [SourceError("not yet"), Found((unit("a"),))]
    gate = Gate()
    discovery = await begin(gate, Scripted("x"))
    discovery.take(FIXED, [Scripted("y")])
    await asyncio.sleep(0.1)
    assert gate.verdict("a") is Verdict.DOWN
    await asyncio.sleep(2.0)
    assert gate.board.units["a"].case.faults == frozenset()
    await discovery.close()


async def test_what_is_held_against_a_unit_is_not_held_against_another_of_its_name() -> None:
    namesake = unit("fixed", "other")
    suspicion = Suspicion("fixed", "fixed", "its pod is being deleted")
    _worlds["x"] = [Found((namesake,), suspicions=(suspicion,), epochs=(("fixed", "1"),)), Found()]
    gate = Gate()
    discovery = await begin(gate, Scripted("x"))
    gate.up("fixed")
    await asyncio.sleep(1.1)
    assert (gate.verdict("fixed"), gate.told) == (Verdict.UP, [])
    await discovery.close()


async def test_without_sources_the_fleet_is_what_is_fixed() -> None:
    _worlds["x"] = [Found((unit("a"),))]
    gate = Gate()
    discovery = await begin(gate, Scripted("x"))
    discovery.take(FIXED, [])
    assert (names(gate), discovery.connected()) == (["fixed"], {})
    await discovery.close()
