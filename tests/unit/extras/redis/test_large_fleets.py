"""In a large fleet a gate looks only at what was said of units: all that changes is told, and in time."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any, cast

import pytest

from cellgate.extras.redis import sharing
from cellgate.extras.redis.commands import MEMBERS_MAX
from cellgate.extras.redis.link import INDEX_BEATS
from cellgate.extras.redis.reports import WINDOW, UnitReport
from cellgate.extras.redis_client.redis_names import Names
from cellgate.router.attention import SMALL
from cellgate.router.nouns import Ask, Evidence, Models, Sign, Strength
from cellgate.router.unit_state import Lease
from tests.cost.extras.redis.test_beats import Clock, Gate
from tests.sim.redis import SimRedis

UNITS = SMALL + 6
FIELDS = ("verdict", "number", "in_flight", "prefilling", "drained", "models", "reason", "epoch", "stopping")


class Changing:
    """A gate whose units change, and one that hears of it."""

    def __init__(self, seed: int) -> None:
        self.rng, self.clock = Random(seed), Clock()
        redis = SimRedis(cast("Any", self.clock))
        self.one, self.other = (Gate(name, UNITS, self.clock, redis) for name in ("g1", "g2"))
        self.leases: list[Lease] = []
        self.is_stopping = False
        self.one.sharing._is_stopping = lambda: self.is_stopping

    def change(self) -> None:
        """Anything, of any unit."""
        rng, board, now = self.rng, self.one.board, self.clock.now
        name = rng.choice(list(board.units))
        state = board.units[name]
        word = rng.randrange(6)
        if word < 2 and state.is_usable():
            self.leases.append(board.open(name, Ask("m", stream=True), now, retry=False))
        elif word == 2 and self.leases:
            board.close(self.leases.pop(rng.randrange(len(self.leases))), now)
        elif word == 3:
            board.drain(name, drained=not state.drained)
        elif word == 4:
            board.set_models(Models(name, ("m", f"m{rng.randrange(3)}"), now))
        else:
            sign, strength = rng.choice([(Sign.BAD, Strength.FATAL), (Sign.GOOD, Strength.STRONG)])
            epoch = f"e{rng.randrange(3)}" if rng.random() < 0.2 else None
            board.observe(Evidence(name, sign, strength, "canary", f"at {now}", now, epoch=epoch))

    def beat(self) -> None:
        """A tick and a heartbeat of each gate, in any order."""
        self.clock.now += 0.25
        if self.rng.random() < 0.5:
            self.one.board.attention.tick(self.clock.now)
        for gate in self.rng.sample([self.one, self.other], 2):
            gate.beat()

    def wrong(self) -> list[str]:
        """Of which units the other gate does not know what this one does."""
        return [
            name
            for name, state in self.one.board.units.items()
            if _told(self.one.sharing._report(state)) != _told(self.other.roster.said(name, "g1"))
        ]


def _told(report: UnitReport | None) -> list[Any]:
    return [getattr(report, name) for name in FIELDS] if report is not None else []


@pytest.mark.parametrize("seed", range(3))
def test_what_changes_of_any_of_many_units_is_known_at_the_next_heartbeats(seed: int) -> None:
    world = Changing(seed)
    for _ in range(3 * WINDOW):
        world.beat()
    assert world.wrong() == []
    for number in range(40):
        for _ in range(world.rng.randrange(4)):
            world.change()
        world.is_stopping = number > 30
        world.beat()
        world.beat()
        assert world.wrong() == []
    world.one.close()
    world.other.close()


def test_gates_hear_each_other_on_while_somebody_fills_their_index_and_read_a_part_of_that() -> None:
    world = Changing(1)
    redis, (cell,) = world.one._redis, {state.unit.cell for state in world.one.board.units.values()}
    for _ in range(3 * WINDOW):
        world.beat()
    for number in range(3 * MEMBERS_MAX):
        redis.sadd(Names().gates_of(cell), f"evil-{number}")
    for _ in range(INDEX_BEATS + 1):
        world.beat()
    assert world.wrong() == []
    assert world.other.roster.gates(world.clock.now) == {"g1"}
    assert len(world.other.link._gates) <= MEMBERS_MAX + 2
    world.one.close()
    world.other.close()


def test_a_new_gate_reads_a_part_of_what_others_have_written_in_each_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All at once would take so long that heartbeats are missed, and all be read again, for ever."""
    monkeypatch.setattr(sharing, "DOCUMENTS_READ", 100)
    clock = Clock()
    redis = SimRedis(cast("Any", clock))
    others = [Gate(f"g{number}", UNITS, clock, redis) for number in range(4)]
    new, read = Gate("new", UNITS, clock, redis), [0]
    for turn in range(60):
        clock.now += 0.25
        for gate in others:
            gate.beat()
        if turn >= 2 * WINDOW:
            new.beat()
            read.append(new.link.counts["documents_read"])
    # The documents of one gate come at once from this Redis.
    assert max(later - before for before, later in pairwise(read)) <= 100 + UNITS
    # Each at once, and again when the documents have all that was said before.
    assert read[-1] == 2 * len(others) * UNITS
    for name in ("g0", "g1", "g2", "g3"):
        assert all(new.roster.said(unit, name) is not None for unit in new.board.units)
    for each in (*others, new):
        each.close()


def test_what_beats_say_of_requests_counts_before_the_documents_of_their_units_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of many gates it takes minutes to read all."""
    monkeypatch.setattr(sharing, "DOCUMENTS_READ", 0)
    world = Changing(1)
    for _ in range(3 * WINDOW):
        world.beat()
    name = next(iter(world.one.board.units))
    lease = world.one.board.open(name, Ask("m", stream=True), world.clock.now, retry=False)
    world.beat()
    world.beat()
    assert world.other.board.remote_load[name].in_flight == 1
    assert list(world.other.roster.everything()) == []
    monkeypatch.undo()
    for _ in range(3):
        world.beat()
    assert world.wrong() == []
    world.one.board.close(lease, world.clock.now)
    world.one.close()
    world.other.close()
