"""The Board: cases, loads and open leases; the only mutable routing state.

Every method is synchronous and does no I/O: callers act on what is returned. Rules:
1. `in_flight` of a desk is exactly the number of its open leases.
2. A flip to DOWN, or a new epoch, marks every lease on that unit as evicted, once.
3. A unit taken off the configuration stays known until its last lease has closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from cellgate.router import panic, peers, stall
from cellgate.router.answers import AnswerLengths
from cellgate.router.cost import Expected
from cellgate.router.cost_model import Elsewhere
from cellgate.router.judge import judge, open_case
from cellgate.router.nouns import (
    Ask,
    Evidence,
    Fleet,
    Flip,
    Load,
    Models,
    Rules,
    Served,
    Sign,
    Strength,
    Unit,
    Verdict,
)
from cellgate.router.outliers import Slowness
from cellgate.router.pools import Pools
from cellgate.router.remote_prefixes import ProvenPrefixes, RemotePrefixes
from cellgate.router.shared_prefixes import SharedPrefixes
from cellgate.router.unit_state import BUSY_S, Desk, Lease

ERRORS_S = 1.0
"""Errors so soon after each other, with no life between them, are of an engine that has nothing else."""
DOUBT_S = 5.0
"""A doubt that nothing has settled for so long ends: most likely only connections were lost."""

PEERS_S = 1.0
"""How often units take over from their peers what they have not seen themselves."""
BATCH_SHARE = 0.1
"""How much one tick moves the mean of a unit's requests: the mean is of the last few seconds."""


class Consequence(NamedTuple):
    """What the caller has to do after evidence was folded in."""

    flip: Flip | None = None
    evicted: tuple[Lease, ...] = ()
    wants_canary: bool = False


class Changes(NamedTuple):
    """What another configuration has changed. `probed_anew`: units that stay, and are looked at otherwise."""

    added: tuple[Unit, ...]
    removed: tuple[Unit, ...]
    probed_anew: tuple[Unit, ...]


_NOTHING = Consequence()
_NOTHING_EXPECTED = Expected()


class Board:
    """Cases, loads and leases of all units, by unit name."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.desks: dict[str, Desk] = {}
        self.leaving: list[Desk] = []
        """Desks of units no longer configured (or replaced) that still have open leases."""
        self.others: dict[str, Elsewhere] = {}
        """Requests of other gates, by unit, as far as they told."""
        self.answers = AnswerLengths()
        self.shared = SharedPrefixes()
        self.remote: RemotePrefixes | None = None
        """What other gates have proven to be cached at units; None while nobody tells."""
        self.proven: ProvenPrefixes | None = None
        """What this gate has proven, for others; None while there is nobody to tell."""
        self.pools = Pools()
        self.has_far = False
        """Whether some units are farther away than others."""
        self.retries_in_flight = 0
        self.in_flight = 0
        self.panic_at: float | None = None
        """Since when units are held in rotation although nothing of them answers."""
        self._peers_at = 0.0

    def __iter__(self) -> Iterator[Desk]:
        return iter(self.desks.values())

    def configure(self, fleet: Fleet, now: float) -> Changes:
        """Take over a fleet. A unit whose address changed is removed and added."""
        wanted = {unit.name: unit for unit in fleet.units}
        gone = [d for d in self if d.unit.name not in wanted or wanted[d.unit.name].url != d.unit.url]
        for desk in gone:
            del self.desks[desk.unit.name]
            self._forget_prefixes(desk.unit.name)
            desk.retired = True
            if desk.leases:
                self.leaving.append(desk)
        added = tuple(unit for unit in fleet.units if unit.name not in self.desks)
        probed_anew = []
        for unit in fleet.units:
            known = self.desks.get(unit.name)
            if known is None:
                self.desks[unit.name] = Desk(unit, fleet.cell(unit.cell), open_case(now))
            else:
                if not unit.is_probed_like(known.unit):
                    probed_anew.append(unit)
                    # Who said a fatal thing may not be asked any more; who is, will say it again.
                    known.case = replace(known.case, faults=frozenset(), epochs=())
                    known.news = {}
                    known.engine = unit.engine
                known.settle(unit, fleet.cell(unit.cell))
                known.models = frozenset(unit.models) or known.models
        # The order of the configuration is the order people see.
        self.desks = {name: self.desks[name] for name in wanted}
        self.has_far = any(desk.far_s for desk in self)
        self._pool()
        self.forecast(now)
        return Changes(added, tuple(desk.unit for desk in gone), tuple(probed_anew))

    def observe(self, evidence: Evidence) -> Consequence:
        """Fold evidence in. Evidence about a unit that is not configured (any more) is dropped."""
        desk = self.desks.get(evidence.unit)
        if desk is None:
            return _NOTHING
        desk.news[evidence.node, evidence.source] = evidence
        # Weak good news (an answer to /health) is no proof of life: only work is.
        if evidence.sign is Sign.GOOD and evidence.strength is not Strength.WEAK:
            desk.life_at = max(desk.life_at, evidence.at)
        before = desk.case
        after, wants_canary = judge(before, evidence, self.rules)
        falls = after.verdict is Verdict.DOWN and evidence.strength is not Strength.FATAL
        if falls and desk.is_usable() and self._panics(desk, evidence.at):
            return Consequence(wants_canary=True)
        desk.case = after
        reborn = after.reborn != before.reborn
        if after.verdict is before.verdict and not reborn:
            return Consequence(wants_canary=wants_canary) if wants_canary else _NOTHING
        if reborn:
            self._forget(desk)
        if after.verdict is Verdict.UP:
            if before.verdict is not Verdict.SUSPECT:
                desk.risen_at = evidence.at
                desk.books.rise()
            elif before.because is not None and before.because.source == stall.SOURCE:
                desk.cleared_at = evidence.at
            self.forecast(evidence.at)
        flip = Flip(desk.unit.name, desk.unit.cell, before.verdict, after.verdict, evidence.at, evidence)
        if after.verdict is Verdict.DOWN and desk.stills:
            # This one it did not come out of by itself.
            desk.stills.pop()
        evicted = self._evict(desk) if reborn or after.verdict is Verdict.DOWN else ()
        return Consequence(flip, evicted, wants_canary)

    def report(self, load: Load) -> None:
        """Take over an engine's report; progress of its counters is a proof of life."""
        desk = self.desks.get(load.unit)
        if desk is None:
            return
        before = desk.load
        if load.sighted:
            desk.counters_at = load.at
        if load.progress is not None:
            grew = before is not None and before.progress is not None and load.progress > before.progress
            # Tokens of ours that came since the last report explain the growth, and tell better when it was.
            if grew and before is not None and desk.life_at <= before.at:
                desk.life_at = load.at
        desk.load = load
        desk.foreign = load.foreign
        desk.books.seats.learn(load)

    def doubt(self, name: str, now: float) -> bool:
        """Note a sign that the unit has started anew. True when it was not in doubt: it should be asked."""
        desk = self.desks.get(name)
        if desk is None:
            return False
        was_doubted = desk.is_doubted()
        desk.doubted_at = now
        return not was_doubted

    def tick(self, now: float) -> None:
        """What only time changes; called a few times a second."""
        mute = rotation = 0
        for desk in self.desks.values():
            if desk.leases:
                desk.pace.mark(now)
                desk.show_plain(now)
            desk.widen()
            desk.prefilling += BATCH_SHARE * (bool(desk.books.work.queued_tokens) - desk.prefilling)
            if desk.leases or desk.batch > 0.01:
                desk.batch += BATCH_SHARE * (len(desk.leases) + desk.foreign - desk.batch)
            if 0.0 <= desk.doubted_at < now - DOUBT_S:
                desk.doubted_at = -1.0
            if desk.is_usable():
                rotation += 1
                mute += desk.is_mute(now)
        if self.panic_at is not None and not panic.hold(mute, rotation, 0.0, self.rules):
            self.panic_at = None
        if self.remote:
            self.remote.expire(now)
        self.forecast(now)

    def forecast(self, now: float) -> None:
        """Work out anew what changes slowly in the cost of each unit, and what units learn of each other."""
        if now - self._peers_at >= PEERS_S:
            peers.learn(self, now - self._peers_at)
            self._peers_at = now
        peers.foresee(self.desks.values(), self.others, now)

    def serve(self, models: Models) -> None:
        """Take over the list of models of a unit that has none configured."""
        desk = self.desks.get(models.unit)
        if desk is not None and not desk.unit.models and desk.models != (names := frozenset(models.names)):
            desk.models = names
            self._pool()

    def runs(self, served: Served) -> None:
        """Take over which engine a unit turned out to run."""
        desk = self.desks.get(served.unit)
        if desk is not None and not desk.unit.engine:
            desk.engine = served.engine

    def knows_model(self, model: str) -> bool | None:
        """Whether any unit serves `model`; None while some unit has not told its models yet."""
        if any(model in desk.models for desk in self):
            return True
        return False if self.desks and all(desk.models for desk in self) else None

    def could_serve(self, ask: Ask, tried: Iterable[str]) -> bool:
        """Whether waiting may help: a unit not tried yet serves this ask, or will once it is up again."""
        return any(not d.drained and name not in tried and d.serves(ask) for name, d in self.desks.items())

    def cool(self, name: str, until: float) -> None:
        """Offer a unit that answered with an error only when there is no other, until then.

        An error comes faster than any answer, so a unit that sends them would look the least loaded of all.
        """
        desk = self.desks.get(name)
        if desk is not None:
            desk.cool_until = until

    def errs_only(self, name: str, now: float) -> bool:
        """Note an error of a unit; True when the last thing it did, a moment ago, was another one.

        Its engine may have died a moment ago: then errors are all that it has for anyone.
        """
        desk = self.desks.get(name)
        if desk is None:
            return False
        again = desk.erred_at > desk.life_at and now - desk.erred_at < ERRORS_S
        desk.erred_at = now
        return again

    def is_falsely_busy(self, name: str, now: float) -> bool:
        """Note a 503 of a unit; True when its engine has said since the one before that it is idle."""
        desk = self.desks.get(name)
        if desk is None:
            return False
        if now - desk.busy_at > BUSY_S:
            desk.busy_at = now
            return False
        load = desk.load
        is_idle = load is not None and load.at > desk.busy_at and load.running + load.waiting == 0
        return is_idle and len(desk.leases) <= 1

    def tokens_s(self, pool: str | None = None) -> float:
        """How many uncached tokens a second all usable units compute together, or those of one pool."""
        return sum(
            desk.books.rates.prefill_tokens_s.value * desk.weight
            for name, desk in self.desks.items()
            if desk.is_usable() and (pool is None or self.pools.has(pool, name))
        )

    def is_sure_of(self, pool: str) -> bool:
        """Whether the rates of all usable units of a pool have been learnt, and are no guess."""
        return all(
            desk.books.is_sure()
            for name, desk in self.desks.items()
            if desk.is_usable() and self.pools.has(pool, name)
        )

    def open(
        self,
        name: str,
        ask: Ask,
        now: float,
        *,
        retry: bool,
        expected: Expected = _NOTHING_EXPECTED,
        held: int | None = None,
    ) -> Lease:
        """Open a lease on a unit; `held` blocks of the prompt are there (None: that is looked up)."""
        desk = self.desks[name]
        if held is None:
            held = self.held(desk, ask.blocks)
        lease = Lease(desk, ask, expected, held, now, retry)
        if not desk.leases:
            desk.work_at = now
        desk.asked_at = now
        desk.leases[lease] = None
        self.in_flight += 1
        self.retries_in_flight += retry
        return lease

    def prove(self, lease: Lease) -> None:
        """An attempt has shown something: if it was a retry, it draws on the budget no longer.

        The budget is there lest retries load units with what fails again; a stream may go on for minutes.
        """
        if lease.retry:
            lease.retry = False
            self.retries_in_flight -= 1
        if self.proven is not None and lease.ask.blocks and not lease.desk.retired:
            self.proven.note(lease.unit, lease.ask.blocks, lease.bet.expected.shared_blocks)

    def held(self, desk: Desk, blocks: Sequence[int]) -> int:
        """How many blocks at the beginning of a prompt a unit holds, as far as this gate or another knows."""
        held = desk.books.prefixes.match(blocks)
        return max(held, self.remote.match(blocks).get(desk.unit.name, 0)) if self.remote else held

    def close(self, lease: Lease, now: float) -> None:
        """Close a lease. Raises RuntimeError the second time: an in-flight count must never drift."""
        if lease.closed:
            raise RuntimeError(f"{lease!r} closed twice")
        lease.closed = True
        lease.on_evict = None
        desk = lease.desk
        del desk.leases[lease]
        lease.beside = desk.books.strike(lease, lease.ask, lease.bet, now, in_vain=not lease.committed)
        self.in_flight -= 1
        self.retries_in_flight -= lease.retry
        if desk.retired and not desk.leases and desk in self.leaving:
            self.leaving.remove(desk)

    def drain(self, name: str, *, drained: bool) -> bool:
        """Set the operator's will; False when there is no such unit."""
        desk = self.desks.get(name)
        if desk is None:
            return False
        desk.drained = drained
        return True

    def _pool(self) -> None:
        self.pools = Pools((name, desk.models) for name, desk in self.desks.items())

    def _panics(self, desk: Desk, now: float) -> bool:
        """Whether this unit is kept in rotation although it is about to go DOWN."""
        if not desk.is_mute(now):
            return False
        rotation = [d for d in self if d.is_usable()]
        mute = sum(d.is_mute(now) for d in rotation)
        held_s = now - self.panic_at if self.panic_at is not None else 0.0
        if not panic.hold(mute, len(rotation), held_s, self.rules):
            return False
        self.panic_at = self.panic_at if self.panic_at is not None else now
        return True

    def _forget(self, desk: Desk) -> None:
        """What was learnt of the incarnation before does not hold for this one."""
        desk.load, desk.foreign, desk.counters_at = None, 0, 0.0
        desk.books.forget()
        self._forget_prefixes(desk.unit.name)
        desk.slowness = Slowness()
        desk.engine = desk.unit.engine

    def _forget_prefixes(self, unit: str) -> None:
        """What was told of its cache, or was to be told, does not hold."""
        if self.remote is not None:
            self.remote.forget(unit)
        if self.proven is not None:
            self.proven.forget(unit)

    def _evict(self, desk: Desk) -> tuple[Lease, ...]:
        leases = tuple(lease for lease in desk.leases if not lease.evicted)
        for lease in leases:
            lease.evicted = True
        return leases
