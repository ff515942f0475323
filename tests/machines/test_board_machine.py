"""The Board under any order of calls, held to what its docstring promises.

The machine keeps books of its own: the leases it was given, and which of them were evicted.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cellgate.policies import POLICIES
from cellgate.router.board import Board
from cellgate.router.fair_queue import FairRules
from cellgate.router.nouns import (
    Ask,
    Cell,
    Evidence,
    Fleet,
    Load,
    Models,
    Refusal,
    Rules,
    Sign,
    Strength,
    Unit,
    Verdict,
)
from cellgate.router.queue import Waiting
from cellgate.router.router import Router
from cellgate.router.unit_state import Desk, Lease

NAMES = ("a", "b", "c", "d")
MODELS = ("small", "large")
RULES = Rules(weak_min=2, passes=2, evict_overcommit=0.5, slow_start_s=0.0)
USABLE = (Verdict.UP, Verdict.SUSPECT)

names = st.sampled_from((*NAMES, "stranger"))
asks = st.builds(
    lambda model, unit, blocks: Ask(model, unit=unit, prompt_bytes=600 * blocks, blocks=tuple(range(blocks))),
    st.sampled_from((None, *MODELS, "unheard of")),
    st.none() | st.sampled_from(NAMES),
    st.integers(0, 20),
)
units = st.builds(
    Unit,
    name=st.sampled_from(NAMES),
    cell=st.just("cell"),
    url=st.sampled_from(("http://here", "http://there")),
    models=st.sampled_from(((), ("small",), MODELS)),
    weight=st.sampled_from((0.5, 1.0, 4.0)),
    max_in_flight=st.integers(1, 4),
)
fleets = st.lists(units, max_size=4, unique_by=lambda unit: unit.name).map(
    lambda some: Fleet((Cell("cell", 2.0),), tuple(some))
)


class BoardMachine(RuleBasedStateMachine):
    """Every rule is something a gate does to its Board."""

    def __init__(self) -> None:
        super().__init__()
        self.board = Board(RULES)
        self.router = Router(
            self.board, POLICIES["least_load"](), random.Random(1), Waiting(FairRules(backlog_s=1e9))
        )
        self.now = 100.0
        self.epochs = 0
        self.fleet = Fleet()
        self.leases: list[Lease] = []
        self.evicted: list[Lease] = []

    def desk(self, name: str) -> Desk | None:
        return self.board.desks.get(name)

    def never_called(self) -> None:
        """The Board marks leases and hands them out; whoever asked for it calls them."""
        raise AssertionError("the Board called a lease")

    # -- the configuration ---------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        fleet = Fleet((Cell("cell"),), tuple(Unit(name, "cell", "http://here") for name in NAMES[:3]))
        self.configure(fleet)
        for name in NAMES[:3]:
            self.start_anew(name)
            self.recover(name)

    @rule(fleet=fleets)
    def configure(self, fleet: Fleet) -> None:
        before = dict(self.board.desks)
        added, removed, _ = self.board.configure(fleet, self.now)
        wanted = {unit.name: unit for unit in fleet.units}
        kept = {name for name, desk in before.items() if name in wanted and self.desk(name) is desk}
        assert {unit.name for unit in added} == wanted.keys() - kept
        assert {unit.name for unit in removed} == before.keys() - kept
        for name in kept:
            assert before[name].unit == wanted[name]
        for unit in added:
            desk = self.board.desks[unit.name]
            assert (desk.case.verdict, desk.in_flight, desk.drained) == (Verdict.STARTING, 0, False)
        assert all(before[unit.name].retired for unit in removed)
        self.fleet = fleet

    @rule(name=names, models=st.sets(st.sampled_from(MODELS), min_size=1))
    def serve(self, name: str, models: set[str]) -> None:
        self.board.serve(Models(name, tuple(models), self.now))
        desk = self.desk(name)
        if desk is not None:
            assert desk.models == (frozenset(desk.unit.models) or models)

    # -- what is seen of units -----------------------------------------------------------------------------

    @rule(
        name=names,
        sign=st.sampled_from(Sign),
        strength=st.sampled_from(Strength),
        source=st.sampled_from(("canary", "request", "readiness")),
        epoch=st.sampled_from((None, None, None, "epoch 1")),
    )
    def observe(self, name: str, sign: Sign, strength: Strength, source: str, epoch: str | None) -> None:
        desk = self.desk(name)
        before = None if desk is None else desk.case
        mine = [lease for lease in self.leases if lease.desk is desk and not lease.evicted]
        evidence = Evidence(name, sign, strength, source, "seen", self.now, epoch=epoch)
        consequence = self.board.observe(evidence)
        if desk is None or before is None:
            assert consequence == (None, (), False)
            return
        after = desk.case
        reborn = after.reborn != before.reborn
        assert (consequence.flip is not None) == (after.verdict is not before.verdict or reborn)
        if consequence.flip is not None:
            flip = consequence.flip
            assert (flip.before, flip.after, flip.evidence) == (before.verdict, after.verdict, evidence)
        falls = after.verdict is Verdict.DOWN and before.verdict is not Verdict.DOWN
        assert list(consequence.evicted) == (mine if falls or reborn else [])
        assert reborn <= (after.verdict is Verdict.STARTING)
        self.evicted += consequence.evicted

    # What chance alone would seldom put together.

    @rule(name=st.sampled_from(NAMES))
    def recover(self, name: str) -> None:
        for _ in range(RULES.passes):
            self.observe(name, Sign.GOOD, Strength.STRONG, "canary", None)

    @rule(name=st.sampled_from(NAMES))
    def fall(self, name: str) -> None:
        self.observe(name, Sign.BAD, Strength.FATAL, "readiness", None)

    @rule(name=st.sampled_from(NAMES))
    def fail(self, name: str) -> None:
        self.observe(name, Sign.BAD, Strength.STRONG, "request", None)

    @rule(name=st.sampled_from(NAMES))
    def start_anew(self, name: str) -> None:
        self.epochs += 1
        self.observe(name, Sign.NEUTRAL, Strength.WEAK, "engine_metrics", f"epoch {self.epochs}")

    @rule(name=names, running=st.integers(0, 9), own=st.integers(0, 9), progress=st.integers(0, 99))
    def report(self, name: str, running: int, own: int, progress: int) -> None:
        desk = self.desk(name)
        life_at = 0.0 if desk is None else desk.life_at
        load = Load(name, self.now, running=running, own_in_flight=own, progress=float(progress))
        self.board.report(load)
        if desk is not None:
            assert desk.load == load
            assert desk.foreign == max(0, running - own)
            assert desk.life_at in (life_at, self.now)

    @rule(name=names, drained=st.booleans())
    def drain(self, name: str, drained: bool) -> None:
        desk = self.desk(name)
        assert self.board.drain(name, drained=drained) == (desk is not None)
        assert desk is None or desk.drained is drained
        self.pick(Ask(unit=name), set(), False, False)

    @rule(name=names)
    def doubt(self, name: str) -> None:
        """Nothing goes to a unit that may have started anew, until it has shown life."""
        desk = self.desk(name)
        was = desk is not None and desk.is_doubted()
        assert self.board.doubt(name, self.now) == (desk is not None and not was)
        assert desk is None or desk.is_doubted()
        self.pick(Ask(unit=name), set(), False, False)

    @rule()
    def tick(self) -> None:
        self.board.tick(self.now)

    @rule(name=names)
    def cool(self, name: str) -> None:
        self.board.cool(name, self.now + 1.0)
        self.pick(Ask(), set(), False, False)

    @rule(seconds=st.sampled_from((0.1, 2.0, 20.0)))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds

    # -- requests ------------------------------------------------------------------------------------------

    @rule(
        ask=asks,
        tried=st.sets(st.sampled_from(NAMES), max_size=3),
        evicted=st.booleans(),
        retry=st.booleans(),
    )
    def pick(self, ask: Ask, tried: set[str], evicted: bool, retry: bool) -> None:
        over = 1.5 if evicted else 1.0
        fit = [desk for desk in self.board if self._fits(desk, ask, tried)]
        sure = [desk for desk in fit if not desk.is_doubted()]
        room = [desk for desk in sure if desk.in_flight < desk.unit.max_in_flight * over]
        answer = self.router.pick(ask, self.now, tuple(tried), evicted=evicted, retry=retry)
        if isinstance(answer, Lease):
            answer.on_evict = self.never_called
            self.leases.append(answer)
            self._examine(answer, room)
            assert (answer.retry, answer.ask, answer.opened_at) == (retry, ask, self.now)
        elif answer in (Refusal.FULL, Refusal.UNSURE):
            assert fit
            assert not room
            assert (answer is Refusal.UNSURE) == (not sure)
        else:
            assert not fit
            unheard = bool(self.board.desks) and all(
                desk.models and ask.model not in desk.models for desk in self.board
            )
            assert (answer is Refusal.UNKNOWN_MODEL) == (ask.model is not None and unheard)

    @rule(name=st.sampled_from(NAMES), number=st.integers(1, 6), evicted=st.booleans())
    def crowd(self, name: str, number: int, evicted: bool) -> None:
        for _ in range(number):
            self.pick(Ask(unit=name), set(), evicted, False)

    def _fits(self, desk: Desk, ask: Ask, tried: set[str]) -> bool:
        return (
            desk.case.verdict in USABLE
            and not desk.drained
            and desk.unit.name not in tried
            and ask.unit in (None, desk.unit.name)
            and (ask.model is None or not desk.models or ask.model in desk.models)
        )

    def _examine(self, lease: Lease, room: list[Desk]) -> None:
        """An UP unit before a cooling one before a SUSPECT one, and none that has no room for one more."""

        def rank(desk: Desk) -> tuple[bool, bool]:
            return desk.case.verdict is Verdict.SUSPECT, desk.cool_until > self.now

        desk = lease.desk
        assert any(desk is other for other in room)
        assert rank(desk)[0] == min(rank(other)[0] for other in room)
        if not rank(desk)[0]:
            assert rank(desk) == min(map(rank, room))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        self.board.close(lease, self.now)
        assert lease.closed
        assert lease.on_evict is None
        with pytest.raises(RuntimeError, match="closed twice"):
            self.board.close(lease, self.now)

    # -- what always holds ---------------------------------------------------------------------------------

    @invariant()
    def counts_are_exactly_the_open_leases(self) -> None:
        for desk in (*self.board, *self.board.leaving):
            assert list(desk.leases) == [lease for lease in self.leases if lease.desk is desk]
        assert self.board.in_flight == len(self.leases)
        assert self.board.retries_in_flight == sum(lease.retry for lease in self.leases)

    @invariant()
    def a_unit_stays_known_until_its_last_lease_has_closed(self) -> None:
        assert all(desk.retired and desk.leases for desk in self.board.leaving)
        assert len(set(map(id, self.board.leaving))) == len(self.board.leaving)
        known = [*self.board, *self.board.leaving]
        assert all(any(lease.desk is desk for desk in known) for lease in self.leases)

    @invariant()
    def each_lease_is_evicted_once_at_most(self) -> None:
        assert len(set(map(id, self.evicted))) == len(self.evicted)
        assert all(lease.evicted for lease in self.evicted)
        assert sum(lease.evicted for lease in self.leases) == sum(not lease.closed for lease in self.evicted)

    @invariant()
    def units_stand_in_the_order_of_the_configuration(self) -> None:
        assert list(self.board.desks) == [unit.name for unit in self.fleet.units]
        assert [desk.unit for desk in self.board] == list(self.fleet.units)
        assert not any(desk.retired for desk in self.board)
        assert all(desk.models == frozenset(desk.unit.models) for desk in self.board if desk.unit.models)
        assert all(desk.weight == desk.unit.weight * self.fleet.cell("cell").weight for desk in self.board)


TestBoard = BoardMachine.TestCase
TestBoard.settings = settings(derandomize=True, deadline=None, max_examples=150, stateful_step_count=50)
