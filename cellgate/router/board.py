"""The Board: cases, loads and open leases; the only mutable routing state.

Every method is synchronous and does no I/O: callers act on what is returned. Rules:
1. `in_flight` of a unit is exactly the number of its open leases.
2. A flip to DOWN, or a new epoch, marks every lease on that unit as evicted, once.
3. A unit that is removed from the configuration stays known until its last lease has closed.

In this order: `Board`, `flip_of`.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import islice
from math import inf
from typing import NamedTuple

from cellgate.router import outliers
from cellgate.router.attention import STAYS_S, Attention
from cellgate.router.cost import Expected
from cellgate.router.cost_model import RemoteLoad
from cellgate.router.departures import leavers
from cellgate.router.fleet_learning import COSTS_AT_ONCE, Learning, foresee
from cellgate.router.judge import ANSWER_SOURCE, STALL_SOURCE, judge, open_case
from cellgate.router.learning import JOINED_S, AnswerLengths
from cellgate.router.nouns import (
    PANIC_MAX_S,
    UNKNOWN_BUILD,
    Ask,
    Case,
    Evidence,
    Fleet,
    Kept,
    Load,
    Models,
    Rules,
    Served,
    Sign,
    Strength,
    Unit,
    Verdict,
)
from cellgate.router.opinions import REFUSING_SOURCE
from cellgate.router.outliers import Outlier
from cellgate.router.pauses import LongWaits
from cellgate.router.prefill_decode import Pairs
from cellgate.router.prefix import ProvenPrefixes, RemotePrefixes, SharedPrefixes
from cellgate.router.queue import Pools
from cellgate.router.unit_state import EventEnds, Lease, UnitState, Usable
from cellgate.router.uses import Uses

_NOTHING_EXPECTED = Expected()
_NONE_KEPT: Mapping[str, Kept] = {}
_NO_HEIRS: Mapping[str, UnitState] = {}


class Board:
    """Cases, loads and leases of all units, by unit name."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.units: dict[str, UnitState] = {}
        self.usable: dict[str | None, Usable] = {}
        """By model: the units for its requests, until anything of that changes (see pick.py)."""
        self.changes = self.fault_changes = 0
        """Grow whenever a unit comes, goes, or changes what it is used for; or has other open faults."""
        self.leaving: list[UnitState] = []
        """Units no longer configured (or replaced) that still have open leases."""
        self.remote_load: dict[str, RemoteLoad] = {}
        """Requests of other gates, by unit, as far as they have reported them."""
        self.answer_lengths = AnswerLengths()
        self.shared = SharedPrefixes()
        self.remote: RemotePrefixes | None = None
        """The prompts that other gates have proven to be cached at units; None without other gates."""
        self.proven: ProvenPrefixes | None = None
        """The prompts that this gate has proven, for others; None without other gates."""
        self.pools = Pools()
        self.awaited: Container[str] = ()
        """The pools for which requests wait."""
        self.ends_known: dict[tuple[str, frozenset[str]], EventEnds] = {}
        self.waits_known: dict[tuple[str, frozenset[str]], LongWaits] = {}
        """How the events of streams end, and long waits for a first token, by engine and models."""
        self.pairs = Pairs()
        self.uses = Uses()
        self.adapters: frozenset[str] = frozenset()
        """The LoRA adapters that some unit lists."""
        self.has_far = False
        """Whether some units are farther away than others."""
        self.attention = Attention()
        """The units that are looked at on a tick."""
        self.is_changing = False
        """Another fleet is about to be configured: who finds no unit waits for it."""
        self.capacity: tuple[int, int] | None = None
        """How many units are in rotation, and their places; None: this has changed."""
        self.cool_until = 0.0
        """When the last unit has cooled down."""
        self.retries_in_flight = 0
        self.in_flight = 0
        self.panic_at: float | None = None
        """Since when the gate is in panic; None: it is not."""
        self.agents_doubted_at = -inf
        """When agents last said of too many units that they are gone (see health.py)."""
        self._out: dict[str, UnitState] = {}
        """Units that went DOWN with requests."""
        self._learning = Learning()
        self._most_running: dict[tuple[str, str, str], int] = {}
        """The most that a unit has run at once, by cell, engine and build."""
        self._best: dict[str, tuple[UnitState | None, float]] = {}
        """By pool: the unit that made progress last, and when that was looked for."""

    def __iter__(self) -> Iterator[UnitState]:
        return iter(self.units.values())

    def configure(
        self,
        fleet: Fleet,
        now: float,
        kept: Mapping[str, Kept] = _NONE_KEPT,
        heirs: Mapping[str, UnitState] = _NO_HEIRS,
    ) -> Changes:
        """Apply a fleet. A unit with a new address is removed and added. For `kept` and `heirs`: kept.py."""
        wanted = {unit.name: unit for unit in fleet.units}
        gone = [d for d in self if d.unit.name not in wanted or wanted[d.unit.name].url != d.unit.url]
        for state in gone:
            del self.units[state.unit.name]
            self._forget_prefixes(state.unit.name)
            state.retired = True
            if state.leases:
                self.leaving.append(state)
        added = tuple(unit for unit in fleet.units if unit.name not in self.units)
        probed_again = []
        for unit in fleet.units:
            known = self.units.get(unit.name)
            if known is None:
                state = self.units[unit.name] = UnitState(unit, fleet.cell(unit.cell), open_case(now))
                state.on_change, state.on_faults = partial(self._changed, state), self._faults_changed
                state.ends_known, state.waits_known = self.ends_known, self.waits_known
                if (old := heirs.get(unit.name)) is not None:
                    state.succeed(old)
                    if unit.name not in kept:
                        # Its address is the same, and what listens there may be something else.
                        state.restart_suspected_at = now
            else:
                if not unit.is_probed_like(known.unit):
                    probed_again.append(unit)
                    # The source of a fatal report may be gone; one that remains will report again.
                    known.case = replace(known.case, faults=frozenset(), epochs=())
                    known.last_evidence = {}
                    known.engine = unit.engine
                known.apply(unit, fleet.cell(unit.cell))
                known.models = frozenset(unit.models) or known.models
            self.units[unit.name].kept = kept.get(unit.name)
        # Units are shown in the order of the configuration.
        self.units = {name: self.units[name] for name in wanted}
        self.pairs.configure(self.units)
        self._changed()
        self.attention.configure(self.units, now)
        self.has_far = any(state.far_s for state in self)
        self._pool()
        self._know_adapters()
        self.update_costs(now)
        return Changes(added, tuple(state.unit for state in gone), tuple(probed_again))

    def observe(self, evidence: Evidence) -> Consequence:
        """Apply evidence. Evidence about a unit that is not configured (any more) is dropped."""
        state = self.units.get(evidence.unit)
        if state is None:
            return _NO_CONSEQUENCE
        state.last_evidence[evidence.node, evidence.source] = evidence
        if evidence.sign is Sign.BAD:
            self.attention.note(state, evidence.at + STAYS_S)
        # Weak good evidence (an answer to /health) is not progress: only work is.
        if evidence.sign is Sign.GOOD and evidence.strength is not Strength.WEAK:
            state.progress_at = max(state.progress_at, evidence.at)
        before = state.case
        after, wants_canary = judge(before, evidence, self.rules)
        falls = after.verdict is Verdict.DOWN and evidence.strength is not Strength.FATAL
        if falls and state.is_usable() and self._panics(state, evidence.at):
            return Consequence(wants_canary=True)
        state.case = after
        if after is not before or evidence.sign is Sign.GOOD:
            self.attention.tell(state)
        restarted = after.restarted != before.restarted
        if after.verdict is before.verdict and not restarted:
            return Consequence(wants_canary=wants_canary) if wants_canary else _NO_CONSEQUENCE
        if restarted:
            self._forget(state)
        if after.verdict is Verdict.UP:
            if before.verdict is not Verdict.SUSPECT:
                state.up_since = evidence.at
                for lease in state.leases:
                    lease.evicted = False
                state.costs.on_up()
            elif before.because is not None and before.because.source == STALL_SOURCE:
                state.cleared_at = evidence.at
            if len(self.units) <= COSTS_AT_ONCE:
                self.update_costs(evidence.at)
        flip = flip_of(state, before, evidence)
        if after.verdict is Verdict.DOWN:
            state.fell_unseen = evidence.is_unseen
            if evidence.is_unseen:
                # If it was slow and not sick, it must be able to show that.
                state.step_times.forget_pace()
            if state.stalls:
                # The unit did not recover from this stall by itself.
                state.stalls.pop()
        if not (restarted or after.verdict is Verdict.DOWN):
            return Consequence(flip, (), wants_canary)
        evicted = self._evict(state, evidence.at)
        return Consequence(flip, evicted, wants_canary, sum(not lease.evicted for lease in state.leases))

    def report(self, load: Load) -> None:
        """Apply an engine's report; growth of its counters is progress."""
        state = self.units.get(load.unit)
        if state is None:
            return
        before = state.load
        if load.sighted:
            state.counters_at = load.at
        if load.progress is not None and before is not None and before.progress is not None:
            # Tokens of this gate since the last report explain the growth, and have more exact times.
            is_own = state.leases or before.own_in_flight or state.last_lease_at >= before.at
            explained = (inf if is_own else CANARY_GROWTH) if state.progress_at > before.at else 0.0
            if load.progress - before.progress > explained:
                state.progress_at = load.at
        state.load = load
        state.foreign = load.foreign
        if load.foreign:
            self.attention.note(state)
        if load.ranks:
            state.ranks.report(load.ranks, state.costs.prefixes.limit, load.at)
        if state.adapters.bases:
            state.adapters.report(load.adapters, load.adapter_places, has_foreign=load.foreign > 0)
        like, slots = (state.unit.cell, state.engine, state.build.key), state.costs.slots
        slots.learn(load, self._most_running.get(like, 0))
        if slots.most > self._most_running.get(like, 0):
            if len(self._most_running) >= BUILDS_MAX:
                self._most_running.clear()
            self._most_running[like] = slots.most

    def suspect_restart(self, name: str, now: float) -> bool:
        """Record a sign of a restart. True when there was none yet: the unit should be probed."""
        state = self.units.get(name)
        if state is None:
            return False
        was_suspected = state.is_restart_suspected()
        state.restart_suspected_at = now
        return not was_suspected

    def tick(self, now: float) -> None:
        """Apply changes that depend only on time; called a few times a second."""
        due, ticks = self.attention.tick(now), self.attention.due_ticks
        share = 1.0 - (1.0 - BATCH_SHARE) ** ticks
        for state in due:
            if state.leases or state.costs.last_plain is not None:
                self.uses.note(state, now)
            if state.leases:
                state.step_times.mark(now)
                state.show_plain(now)
                state.costs.learn_plain()
                if state.held_back:
                    state.park(now)
            if state.learnt_limit < state.unit.max_in_flight:
                state.raise_limit(ticks)
            state.prefilling += share * (bool(state.costs.backlog.queued_tokens) - state.prefilling)
            if state.leases or state.batch > 0.01:
                state.batch += share * (len(state.leases) + state.foreign - state.batch)
            if 0.0 <= state.restart_suspected_at < now - RESTART_SUSPECTED_S:
                state.restart_suspected_at = -1.0
        if self.panic_at is not None and not self._is_cut_off(now):
            self.panic_at = None
        if self.remote:
            self.remote.expire(now)
        self.update_costs(now)

    def update_costs(self, now: float) -> None:
        """Recompute the slow parts of the cost of each unit, and what units take over from peers."""
        self._learning.tick(self.attention, now)
        foresee(self.attention, self.remote_load, now)

    def set_models(self, models: Models) -> None:
        """Set the reported models of a unit that has none configured."""
        state = self.units.get(models.unit)
        if state is None or state.unit.models:
            return
        names, bases = frozenset(models.names), models.bases
        state.cards = models.cards
        if bases != state.adapters.bases:
            state.adapters.set_bases(bases)
            self._know_adapters()
        if names != state.models:
            state.models = names
            self._pool()

    def set_engine(self, served: Served) -> None:
        """Set the detected engine of a unit."""
        state = self.units.get(served.unit)
        if state is not None and not state.unit.engine:
            state.engine = served.engine

    def knows_model(self, model: str) -> bool | None:
        """Whether any unit serves `model`; None while the models of some unit are not known yet."""
        if any(model in state.models for state in self):
            return True
        return False if self.units and all(state.models for state in self) else None

    def peers(self, state: UnitState) -> Iterator[UnitState]:
        """The other units of its pool that are in rotation."""
        pool = self.pools.of_unit(state.unit.name)
        for name, other in self.units.items():
            if other is not state and other.is_usable() and self.pools.has(pool, name):
                yield other

    def is_alone(self, state: UnitState, now: float) -> bool:
        """Whether no other unit of its pool does better than one that shows nothing: there is none in
        rotation, or they show nothing either. One without requests must have answered a canary since.
        """
        pool, since = self.pools.of_unit(state.unit.name), state.quiet_since + JOINED_S
        best, looked_at = self._best.get(pool, (None, -inf))
        if (best is None or not self._does_better(best, since, now)) and looked_at < now:
            # All silent units of a pool share one walk on a tick, and most need none.
            names = (name for name in self.units if self.pools.has(pool, name))
            better = [o for o in map(self.units.__getitem__, names) if self._does_better(o, -inf, now)]
            best = max(better, key=lambda other: other.progress_at, default=None)
            self._best[pool] = best, now
        return best is None or not self._does_better(best, since, now)

    def _does_better(self, state: UnitState, since: float, now: float) -> bool:
        """Whether it is in rotation, has made progress since, and is not silent itself."""
        if not (state.progress_at > since and state.is_usable()):
            return False
        return not state.leases or now - state.quiet_since < self.rules.silent_min_s

    def learn_waits(self, state: UnitState, now: float) -> None:
        """A unit that counts no steps shows nothing: requests may wait as long at peers that do better."""
        for other in islice(self.peers(state), PEERS_WAITING):
            if self._does_better(other, now - self.rules.silent_min_s, now):
                state.overtaken.add(other.overtaken_s(now), now)

    def learn_pause(self, pool: str, pause_s: float, at: float) -> None:
        """A unit of a pool has gone on by itself after so long: all of them may do so again."""
        for name, state in self.units.items():
            if self.pools.has(pool, name):
                state.pauses.learn(pause_s, at)

    def room(self) -> tuple[int, int]:
        """How many units are in rotation, and how many requests they take at once."""
        if self.capacity is None:
            usable = [state for state in self if state.is_usable()]
            self.capacity = len(usable), sum(state.unit.max_in_flight for state in usable)
        return self.capacity

    def is_awaited(self, state: UnitState) -> bool:
        """Whether requests wait for a slot that a unit could give."""
        return state.is_awaited or self.pools.of_unit(state.unit.name) in self.awaited

    def could_serve(self, ask: Ask, tried: Iterable[str]) -> bool:
        """Whether waiting may help: a unit not tried yet serves this ask, or will once it is up again."""
        units = self.units if ask.unit is not None else self.pairs.decoders
        return any(not d.drained and name not in tried and d.serves(ask) for name, d in units.items())

    def able(self, ask: Ask, tried: Collection[str] = ()) -> Iterator[UnitState]:
        """The units that could take it now and have not been tried, whether they have room or not."""
        units = self.units if ask.unit is not None else self.pairs.decoders
        for name, state in units.items():
            if name not in tried and state.is_usable() and state.serves(ask):
                yield state

    def can_take(self, lease: Lease, now: float, tried: Collection[str] = ()) -> bool:
        """Whether another unit is in rotation, does not stand still, and could serve a lease's request."""
        return any(
            state is not lease.unit_state and not self._stands_still(state, now)
            for state in self.able(lease.ask, tried)
        )

    def _stands_still(self, state: UnitState, now: float) -> bool:
        """Whether a unit is suspected because it has work and shows nothing."""
        is_suspect = state.case.verdict is Verdict.SUSPECT and bool(state.leases)
        return is_suspect and now - state.quiet_since >= self.rules.silent_min_s

    def cool_down(self, name: str, until: float) -> None:
        """Until then, use a unit that answered with an error only when there is no other: an error comes
        faster than any answer, so a unit that sends them would look the least loaded of all.
        """
        state = self.units.get(name)
        if state is not None:
            state.cool_until = until
            self.cool_until = max(self.cool_until, until)

    def tokens_s(self, pool: str | None = None) -> float:
        """How many uncached tokens a second all usable units compute together, or those of one pool."""
        return sum(
            state.costs.rates.prefill_tokens_s.value
            for name, state in self.units.items()
            if state.is_usable() and (pool is None or self.pools.has(pool, name))
        )

    def is_sure_of(self, pool: str) -> bool:
        """Whether the rates of all usable units of a pool were measured."""
        return all(
            state.costs.is_sure()
            for name, state in self.units.items()
            if state.is_usable() and self.pools.has(pool, name)
        )

    def open(
        self,
        name: str,
        ask: Ask,
        now: float,
        retry: bool,
        expected: Expected = _NOTHING_EXPECTED,
        held: int | None = None,
    ) -> Lease:
        """Open a lease on a unit; `held` blocks of the prompt are cached there (None: unknown yet)."""
        state = self.units[name]
        if held is None:
            held = self.held(state, ask.blocks)
        lease = Lease(state, ask, now, retry)
        lease.job = state.costs.add(lease, ask, expected, held, now)
        if not state.leases:
            state.work_at = now
            if self.attention.is_large:
                self.attention.look_at(state, now)
        state.last_lease_at = now
        state.leases[lease] = None
        if self.adapters:
            state.adapters.open(ask.model)
        if state.ranks.count:
            state.ranks.open(lease, expected, state.costs.cost_terms)
        self.in_flight += 1
        self.retries_in_flight += retry
        return lease

    def prove(self, lease: Lease) -> None:
        """An attempt has committed: if it was a retry, it no longer draws on the budget.

        The budget limits requests that may fail again; a stream may continue for minutes.
        """
        if lease.retry:
            lease.retry = False
            self.retries_in_flight -= 1
        if self.proven is not None and lease.ask.blocks and not lease.unit_state.retired:
            self.proven.record(lease.unit, lease.ask.blocks, lease.job.shared_blocks)

    def held(self, state: UnitState, blocks: Sequence[int]) -> int:
        """How many blocks at the beginning of a prompt a unit holds, as far as this gate or another knows."""
        held = state.costs.cache.match(blocks)
        reported = self.remote.match(blocks).get(state.unit.name, 0) if self.remote else 0
        return reported if reported > held and not state.costs.cache.lacks(blocks[held]) else held

    def close(self, lease: Lease, now: float) -> None:
        """Close a lease. Raises RuntimeError the second time: an in-flight count must never drift."""
        if lease.closed:
            raise RuntimeError(f"{lease!r} closed twice")
        lease.closed = True
        lease.on_evict = None
        state = lease.unit_state
        del state.leases[lease]
        if state.held_back:
            state.unpark(lease)
        if state.adapters.in_use:
            state.adapters.close(lease.ask.model)
        if state.ranks.ranks and lease.rank >= 0:
            state.ranks.close(lease)
        lease.beside = state.costs.remove(lease, now)
        self.in_flight -= 1
        self.retries_in_flight -= lease.retry
        if state.retired and not state.leases and state in self.leaving:
            self.leaving.remove(state)

    def drain(self, name: str, *, drained: bool) -> bool:
        """Drain or undrain a unit; False when there is no such unit."""
        state = self.units.get(name)
        if state is None:
            return False
        state.drained = drained
        return True

    def _changed(self, state: UnitState | None = None) -> None:
        """Something of a unit, or the fleet, has changed that requests ask for."""
        self.usable.clear()
        self.changes += 1
        self.capacity = None
        if state is not None:
            self.attention.note(state)
        else:
            self._faults_changed()

    def _faults_changed(self) -> None:
        self.fault_changes += 1

    def _pool(self) -> None:
        self.pools = Pools((name, state.models) for name, state in self.units.items())
        self._best = {}

    def _know_adapters(self) -> None:
        self.adapters = frozenset(name for state in self for name in state.adapters.bases)

    def _panics(self, state: UnitState, now: float) -> bool:
        """Whether panic keeps this unit in rotation instead of DOWN."""
        if not state.is_unreachable(now):
            return False
        panic_at = now if self.panic_at is None else self.panic_at
        if now - panic_at >= PANIC_MAX_S or not self._is_cut_off(now):
            return False
        self.panic_at = panic_at
        return True

    def _is_cut_off(self, now: float) -> bool:
        """Whether so many units do not answer that it may be the gate."""
        rotation = [d for d in self if d.is_usable()]
        unreachable = sum(d.is_unreachable(now) for d in rotation)
        return outliers.is_cut_off(unreachable, len(rotation))

    def _forget(self, state: UnitState) -> None:
        """Forget what was measured of the previous incarnation."""
        state.load, state.foreign, state.counters_at = None, 0, 0.0
        for known in (state.costs, state.adapters, state.ranks, state.facts):
            known.forget()
        self.pairs.forget(state)
        self._forget_prefixes(state.unit.name)
        state.outlier = Outlier()
        state.can_hold = state.is_hold_spent = False
        state.slots_shown = 0
        state.step_times.forget_pace()
        state.engine = state.unit.engine
        state.build, state.answers = UNKNOWN_BUILD, None

    def _forget_prefixes(self, unit: str) -> None:
        """Forget the reported contents of its cache."""
        if self.remote is not None:
            self.remote.forget(unit)
        if self.proven is not None:
            self.proven.forget(unit)

    def known_objects(self) -> int:
        """How many objects in memory stand for prompts that units are believed to hold."""
        return self.shared.objects + sum(state.costs.prefixes.objects for state in self.units.values())

    def leavers(self, now: float) -> tuple[Lease, ...]:
        """The requests that leave units which are out, as they are found to be lost, or others to be able to
        take them. They are evicted once.
        """
        found = list[Lease]()
        for name, state in list(self._out.items()):
            if state.case.verdict is not Verdict.DOWN or not state.leases:
                del self._out[name]
            else:
                found += leavers(state, now, self.rules, self.can_take)
        for lease in found:
            lease.evicted = True
        return tuple(found)

    def _evict(self, state: UnitState, now: float) -> tuple[Lease, ...]:
        # What ended the unit, or its process, has ended a hold, too.
        state.hold = None
        self._out[state.unit.name] = state
        shown = [lease for lease in state.leases if lease.committed and not lease.evicted]
        leases = (*shown, *leavers(state, now, self.rules, self.can_take))
        for lease in leases:
            lease.evicted = True
        return leases


class DownCause(Enum):
    """Label of `cellgate_unit_downs_total`."""

    WEDGED = "wedged"
    """Its health check was good all the while, and it generated nothing."""
    REFUSED = "refused"
    """Nothing accepts connections at its address, or its engine says that it is dead."""
    NODE = "node"
    """An agent or a source of units reported that one of its nodes is gone or stands still."""
    UNHEALTHY = "unhealthy"
    """Its health check failed as well, or gave no answer."""
    WRONG_ANSWERS = "wrong_answers"
    REFUSES_REQUESTS = "refuses_requests"
    """It refuses, or answers with nonsense, what other units serve."""

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Flip:
    """A change of verdict, with its reason: what /events and the log show. `cause` is of one to DOWN."""

    unit: str
    cell: str
    before: Verdict
    after: Verdict
    at: float
    evidence: Evidence
    cause: DownCause | None = None


BUILDS_MAX = 64
"""Of so many builds it is known how much their units run at once."""
CANARY_GROWTH = 64.0
"""So much a canary or two may add to an engine's counters."""
RESTART_SUSPECTED_S = 5.0
"""A suspected restart without confirmation for this long is dropped: probably only connections were lost."""

PEERS_WAITING = 4
"""So many peers of a silent unit are looked at for requests that wait as well."""
BATCH_SHARE = 0.1
"""The weight of one tick in the mean of a unit's requests, which covers the last few seconds."""


class Consequence(NamedTuple):
    """What the caller has to do after evidence was applied."""

    flip: Flip | None = None
    evicted: tuple[Lease, ...] = ()
    wants_canary: bool = False
    staying: int = 0
    """Requests that stay on a unit that is out, because nobody does better."""


class Changes(NamedTuple):
    """What a new configuration has changed. `probed_again`: units that stay, with other probes."""

    added: tuple[Unit, ...]
    removed: tuple[Unit, ...]
    probed_again: tuple[Unit, ...]


_NO_CONSEQUENCE = Consequence()


# A change of verdict, and why a unit went DOWN, in one word for alerts. Pure.


HEALTH_SOURCE = "readiness"
"""The source of evidence about the engine's own health check (probes/readiness.py)."""


def flip_of(state: UnitState, before: Case, evidence: Evidence) -> Flip:
    """What `evidence` has made of the case `before` of a unit."""
    after, cause = state.case.verdict, None
    if after is Verdict.DOWN:
        cause = down_cause(before, evidence, state.last_evidence.get((None, HEALTH_SOURCE)))
    return Flip(state.unit.name, state.unit.cell, before.verdict, after, evidence.at, evidence, cause)


def down_cause(before: Case, evidence: Evidence, health: Evidence | None) -> DownCause:
    """Why `evidence` moved the case `before` to DOWN; `health` is the last evidence of the health check.

    A health check that has said nothing since the suspicion began proves nothing: a leader that was killed
    was healthy a second ago as well.
    """
    if evidence.source == ANSWER_SOURCE:
        return DownCause.WRONG_ANSWERS
    if evidence.source == REFUSING_SOURCE:
        return DownCause.REFUSES_REQUESTS
    if evidence.node is not None:
        return DownCause.NODE
    if evidence.strength is Strength.FATAL:
        return DownCause.REFUSED
    is_healthy = health is not None and health.sign is Sign.GOOD and health.at >= before.since
    return DownCause.WEDGED if is_healthy else DownCause.UNHEALTHY
