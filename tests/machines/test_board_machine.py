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
from cellgate.router.board import Board, Consequence
from cellgate.router.departures import is_gone
from cellgate.router.judge import ignores_good_evidence
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
from cellgate.router.pick import Router, usable_of
from cellgate.router.queue import FairRules, Queue
from cellgate.router.unit_state import Lease, UnitState

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
            self.board, POLICIES["least_load"](), random.Random(1), Queue(FairRules(backlog_s=1e9))
        )
        self.now = 100.0
        self.epochs = 0
        self.fleet = Fleet()
        self.leases: list[Lease] = []
        self.evicted: list[Lease] = []

    def unit_state(self, name: str) -> UnitState | None:
        return self.board.units.get(name)

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
        before = dict(self.board.units)
        added, removed, _ = self.board.configure(fleet, self.now)
        wanted = {unit.name: unit for unit in fleet.units}
        kept = {name for name, state in before.items() if name in wanted and self.unit_state(name) is state}
        assert {unit.name for unit in added} == wanted.keys() - kept
        assert {unit.name for unit in removed} == before.keys() - kept
        for name in kept:
            assert before[name].unit == wanted[name]
        for unit in added:
            state = self.board.units[unit.name]
            assert (state.case.verdict, state.in_flight, state.drained) == (Verdict.STARTING, 0, False)
        assert all(before[unit.name].retired for unit in removed)
        self.fleet = fleet

    @rule(name=names, models=st.sets(st.sampled_from(MODELS), min_size=1))
    def serve(self, name: str, models: set[str]) -> None:
        self.board.set_models(Models(name, tuple(models), self.now))
        state = self.unit_state(name)
        if state is not None:
            assert state.models == (frozenset(state.unit.models) or models)

    # -- what is seen of units -----------------------------------------------------------------------------

    @rule(
        name=names,
        sign=st.sampled_from(Sign),
        strength=st.sampled_from(Strength),
        source=st.sampled_from(("canary", "request", "readiness")),
        epoch=st.sampled_from((None, None, None, "epoch 1")),
    )
    def observe(self, name: str, sign: Sign, strength: Strength, source: str, epoch: str | None) -> None:
        state = self.unit_state(name)
        before = None if state is None else state.case
        mine = [lease for lease in self.leases if lease.unit_state is state and not lease.evicted]
        evidence = Evidence(name, sign, strength, source, "seen", self.now, epoch=epoch)
        consequence = self.board.observe(evidence)
        if state is None or before is None:
            assert consequence == Consequence()
            return
        after = state.case
        restarted = after.restarted != before.restarted
        assert (consequence.flip is not None) == (after.verdict is not before.verdict or restarted)
        if consequence.flip is not None:
            flip = consequence.flip
            assert (flip.before, flip.after, flip.evidence) == (before.verdict, after.verdict, evidence)
        falls = after.verdict is Verdict.DOWN and before.verdict is not Verdict.DOWN
        leaving = set(consequence.evicted)
        assert leaving <= set(mine if falls or restarted else [])
        if restarted or (falls and is_gone(after)):
            assert leaving == set(mine), "nothing comes of them there"
        elif falls:
            assert leaving >= {lease for lease in mine if lease.committed}
            assert all(lease.committed or self.board.can_take(lease, self.now) for lease in leaving)
            assert consequence.staying == len(mine) - len(leaving)
        assert restarted <= (after.verdict is Verdict.STARTING)
        if after.verdict is Verdict.UP and before.verdict is not Verdict.SUSPECT:
            # It is back, and keeps what it still has, until it goes again.
            self.evicted = [lease for lease in self.evicted if lease not in state.leases]
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
        state = self.unit_state(name)
        progress_at = 0.0 if state is None else state.progress_at
        load = Load(name, self.now, running=running, own_in_flight=own, progress=float(progress))
        self.board.report(load)
        if state is not None:
            assert state.load == load
            assert state.foreign == max(0, running - own)
            assert state.progress_at in (progress_at, self.now)

    @rule(name=names, drained=st.booleans())
    def drain(self, name: str, drained: bool) -> None:
        state = self.unit_state(name)
        assert self.board.drain(name, drained=drained) == (state is not None)
        assert state is None or state.drained is drained
        self.pick(Ask(unit=name), set(), False, False)

    @rule(name=names)
    def suspect_restart(self, name: str) -> None:
        """Nothing goes to a unit that may have restarted, until it has shown life."""
        state = self.unit_state(name)
        was = state is not None and state.is_restart_suspected()
        assert self.board.suspect_restart(name, self.now) == (state is not None and not was)
        assert state is None or state.is_restart_suspected()
        self.pick(Ask(unit=name), set(), False, False)

    @rule()
    def tick(self) -> None:
        self.board.tick(self.now)

    @rule(name=names)
    def cool(self, name: str) -> None:
        self.board.cool_down(name, self.now + 1.0)
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
        fit = [state for state in self.board if self._fits(state, ask, tried)]
        sure = [state for state in fit if not state.is_restart_suspected()]
        room = [state for state in sure if state.in_flight < state.unit.max_in_flight * over]
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
            unheard = bool(self.board.units) and all(
                state.models and ask.model not in state.models for state in self.board
            )
            assert (answer is Refusal.UNKNOWN_MODEL) == (ask.model is not None and unheard)

    @rule(name=st.sampled_from(NAMES), number=st.integers(1, 6), evicted=st.booleans())
    def crowd(self, name: str, number: int, evicted: bool) -> None:
        for _ in range(number):
            self.pick(Ask(unit=name), set(), evicted, False)

    def _fits(self, state: UnitState, ask: Ask, tried: set[str]) -> bool:
        return (
            state.case.verdict in USABLE
            and not state.drained
            and state.unit.name not in tried
            and ask.unit in (None, state.unit.name)
            and (ask.model is None or not state.models or ask.model in state.models)
        )

    def _examine(self, lease: Lease, room: list[UnitState]) -> None:
        """An UP unit before a cooling one before a SUSPECT one, and none that has no room for one more."""

        def rank(state: UnitState) -> tuple[bool, bool]:
            return state.case.verdict is Verdict.SUSPECT, state.cool_until > self.now

        state = lease.unit_state
        assert any(state is other for other in room)
        assert rank(state)[0] == min(rank(other)[0] for other in room)
        if not rank(state)[0]:
            assert rank(state) == min(map(rank, room))

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
        for state in (*self.board, *self.board.leaving):
            assert list(state.leases) == [lease for lease in self.leases if lease.unit_state is state]
        assert self.board.in_flight == len(self.leases)
        assert self.board.retries_in_flight == sum(lease.retry for lease in self.leases)

    @invariant()
    def what_was_prepared_for_requests_is_what_it_would_be_now(self) -> None:
        board = self.board
        for model, prepared in board.usable.items():
            assert prepared == usable_of(board, board.pairs.decoders, model)
        for state in board:
            assert state.is_healthy_unchanged == ignores_good_evidence(state.case)

    @invariant()
    def a_unit_stays_known_until_its_last_lease_has_closed(self) -> None:
        assert all(state.retired and state.leases for state in self.board.leaving)
        assert len(set(map(id, self.board.leaving))) == len(self.board.leaving)
        known = [*self.board, *self.board.leaving]
        assert all(any(lease.unit_state is state for state in known) for lease in self.leases)

    @invariant()
    def each_lease_is_evicted_once_at_most(self) -> None:
        assert len(set(map(id, self.evicted))) == len(self.evicted)
        assert all(lease.evicted for lease in self.evicted)
        assert sum(lease.evicted for lease in self.leases) == sum(not lease.closed for lease in self.evicted)

    @invariant()
    def units_stand_in_the_order_of_the_configuration(self) -> None:
        assert list(self.board.units) == [unit.name for unit in self.fleet.units]
        assert [state.unit for state in self.board] == list(self.fleet.units)
        assert not any(state.retired for state in self.board)
        assert all(state.models == frozenset(state.unit.models) for state in self.board if state.unit.models)
        assert all(state.weight == state.unit.weight * self.fleet.cell("cell").weight for state in self.board)


TestBoard = BoardMachine.TestCase
TestBoard.settings = settings(derandomize=True, deadline=None, max_examples=80, stateful_step_count=50)
