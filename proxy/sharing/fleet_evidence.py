"""From what the gates of units say to the Board: their verdicts become evidence, their numbers load.

1. A gate's word is believed as it stands: it has seen the canaries. But a unit that this gate itself found
   out of reach comes back by this gate's own look (probes/gate_word.py), whatever others tell.
2. A drain there is one here, and ends with it.
3. A unit that is reached by way of another gate now is the same unit: what was learnt of it goes along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile

from cellgate.probes.gate_word import GATE_EPOCHS
from cellgate.proxy.logs.events import Action
from cellgate.proxy.sharing.fleet_units import USABLE, Sight
from cellgate.proxy.sharing.schema import View
from cellgate.router.board import Board
from cellgate.router.judge import CANARY_SOURCE
from cellgate.router.nouns import Case, Evidence, Load, Sign, Strength, Verdict
from cellgate.router.unit_state import Desk

_CUT = 256
"""Epochs are published in so many characters: the last of more may be incomplete."""


class Fold:
    """Folds sights into a board. `observe` takes evidence, `drain` sets the will of an operator, `tell` notes
    it.
    """

    def __init__(
        self,
        board: Board,
        observe: Callable[[Evidence], object],
        drain: Callable[[str, bool], object],
        tell: Callable[[Action], None],
    ) -> None:
        self._board = board
        self._observe = observe
        self._drain = drain
        self._tell = tell
        self._desks: dict[str, Desk] = {}
        self._drained: dict[str, str] = {}
        """Units that a gate wants nothing for, and which gate."""
        self._epochs: dict[str, tuple[str, str, int]] = {}
        """By unit: whose reading of its epochs was the last, what it was, and of which incarnation."""

    def take(self, sight: Sight, now: float) -> None:
        """Take over what is known of one unit; one that is not on the board (yet) is left alone."""
        desk = self._board.desks.get(sight.name)
        if desk is None:
            return
        before, self._desks[sight.name] = self._desks.get(sight.name, desk), desk
        if before is not desk:
            _carry_over(before, desk)
        # What it runs, not how it is reached: that is in its unit.
        desk.engine = sight.said.view.engine or desk.engine
        if sight.gone_since is None:
            self._take_load(desk, sight)
            self._take_epoch(desk, sight.said.view, now)
            self._take_drain(sight)
        for evidence in _words(desk, sight, self._board.rules.passes, now):
            self._observe(evidence)
        if before is not desk:
            # It has not started anew, and need not be loaded slowly.
            desk.risen_at = before.risen_at

    def keep(self, names: set[str]) -> None:
        """These are all units there are."""
        for kept in (self._desks, self._drained, self._epochs):
            for name in kept.keys() - names:
                del kept[name]

    def _take_load(self, desk: Desk, sight: Sight) -> None:
        view, at = sight.said
        desk.heard_at = max(desk.heard_at, at)
        if view.life_age_s is not None:
            desk.life_at = max(desk.life_at, at - view.life_age_s)
        if desk.load is not None and desk.load.at >= at:
            return
        running = view.running if view.running is not None else sight.in_flight
        # Requests that its gates have in flight and the engine does not know of yet come to it in a moment.
        waiting = max(view.waiting or 0, sight.in_flight - running)
        sent_since = sum(1 for _ in takewhile(lambda lease: lease.opened_at > at, reversed(desk.leases)))
        own = desk.in_flight - sent_since
        self._board.report(Load(sight.name, at, running, waiting, view.kv_use or 0.0, own))

    def _take_epoch(self, desk: Desk, view: View, now: float) -> None:
        name = desk.unit.name
        gate, known, incarnation = self._epochs.get(name, ("", "", 1))
        if view.epoch and gate == view.gate and _is_other(known, view.epoch):
            incarnation += 1
        if view.epoch:
            self._epochs[name] = (view.gate, view.epoch, incarnation)
        if dict(desk.case.epochs).get(GATE_EPOCHS) != str(incarnation):
            reason, epoch = f"gate {view.gate} reads the epoch {view.epoch}", str(incarnation)
            self._observe(Evidence(name, Sign.NEUTRAL, Strength.WEAK, GATE_EPOCHS, reason, now, epoch=epoch))

    def _take_drain(self, sight: Sight) -> None:
        view, name = sight.said.view, sight.name
        wanted, known = sight.drained_by or (view.gate if view.stopping else ""), self._drained.get(name, "")
        if bool(wanted) is bool(known):
            return
        self._drained[name] = wanted
        self._drain(name, bool(wanted))
        why = "it is stopping, and no other gate has the unit" if wanted and not sight.drained_by else ""
        self._tell(Action("drain" if wanted else "undrain", f"gate {wanted or known}", name, why))


def _words(desk: Desk, sight: Sight, passes: int, now: float) -> Iterator[Evidence]:
    """What brings the case of a unit to where its gate has it; each piece is observed before the next."""
    view, at = sight.said
    reason = f"{view.verdict.value} at its gate" + (f": {view.reason}" if view.reason else "")

    def word(sign: Sign, strength: Strength, source: str, why: str) -> Evidence:
        return Evidence(sight.name, sign, strength, source, why, now)

    source = f"gate {view.gate}"
    if sight.gone_since is not None:
        if desk.case.verdict is not Verdict.DOWN:
            why = "it is not heard of any more, and its gate is not ready; the unit has no other"
            yield word(Sign.BAD, Strength.FATAL, source, why)
    elif view.verdict not in USABLE:
        is_due = desk.case.verdict in USABLE or view.verdict is Verdict.DOWN
        if is_due and desk.case.verdict is not Verdict.DOWN:
            yield word(Sign.BAD, Strength.FATAL, source, reason)
    elif not is_own_finding(desk.case) and not _is_newer_doubt(desk.case, view, at):
        for _ in range(passes + 1):
            if desk.case.verdict is not Verdict.UP:
                yield word(Sign.GOOD, Strength.STRONG, CANARY_SOURCE, f"{source}: {reason}")
        if view.verdict is Verdict.SUSPECT:
            yield word(Sign.BAD, Strength.STRONG, source, reason)


def is_own_finding(case: Case, strength: Strength = Strength.WEAK) -> bool:
    """Whether the unit is down by what this gate has seen itself, with no less than this strength."""
    if case.verdict not in (Verdict.DOWN, Verdict.PROBATION) or case.because is None:
        return False
    return case.because.strength >= strength and not case.because.source.startswith("gate ")


def _is_newer_doubt(case: Case, view: View, at: float) -> bool:
    """Whether the unit is suspected, and its gate has not said since that it is well."""
    return case.verdict is Verdict.SUSPECT and (view.verdict is Verdict.SUSPECT or at <= case.since)


def _is_other(known: str, read: str) -> bool:
    """Whether a process that was read is there no more. Others may come to be read one after the other."""
    before = known.split(",")
    if len(known) >= _CUT:
        before.pop()
    return known != "" and not set(before) <= set(read.split(","))


def _carry_over(before: Desk, desk: Desk) -> None:
    desk.drained = before.drained
    desk.pace, desk.books, desk.gaps_ms = before.pace, before.books, before.gaps_ms
