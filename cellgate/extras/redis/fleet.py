"""Applies the reports of other gates to the Board: their verdicts become evidence, their numbers load.

1. A report is believed as it is, because that gate runs the canaries. But a unit that this gate could not
   reach itself comes back only by this gate's own probe (probes/readiness.py).
2. A drain or a hold at the other gate is one here, and ends with it.
3. A unit that is now reached through another gate is the same unit, and keeps its measured values.

In this order: `FleetEvidence`, `FleetUnits`, `FleetRouter`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from cellgate.extras.redis.reports import Seen, UnitReport
from cellgate.extras.redis.roster import Roster
from cellgate.probes.base import FetchError
from cellgate.probes.readiness import GATE_EPOCHS, VIA_GATE, via_gate
from cellgate.proxy.discovery.base import Feed, Found
from cellgate.proxy.observe.events import Action
from cellgate.router.board import Board, Flip
from cellgate.router.health import is_on
from cellgate.router.judge import CANARY_SOURCE
from cellgate.router.nouns import (
    USABLE,
    Case,
    Cell,
    EnginePause,
    Evidence,
    Load,
    Sign,
    Strength,
    Unit,
    Verdict,
)
from cellgate.router.unit_state import UnitState

if TYPE_CHECKING:
    from cellgate.proxy.control.plane import Plane


_CUT = 256
"""Published epochs are cut to this many characters: the last one may be incomplete."""


class FleetEvidence:
    """Applies reports to a Board. `observe` takes evidence, `drain` drains a unit, `tell` records the
    event, `hear` takes whether a unit stands still on purpose.
    """

    def __init__(
        self,
        board: Board,
        observe: Callable[[Evidence], object],
        drain: Callable[[str, bool], object],
        tell: Callable[[Action], None],
        hear: Callable[[UnitState, EnginePause], object],
    ) -> None:
        self._board = board
        self._observe = observe
        self._drain = drain
        self._tell = tell
        self._hear = hear
        self._states: dict[str, UnitState] = {}
        self._drained: dict[str, str] = {}
        """Units that are drained at a gate, and which gate."""
        self._epochs: dict[str, tuple[str, str, int]] = {}
        """By unit: the gate of the last epoch, that epoch, and the number of the incarnation."""
        self._gone: dict[str, float] = {}
        """Units that were said to be gone, and since when."""

    def take(self, fleet_unit: FleetUnit, now: float) -> None:
        """Apply the report of one unit, if it is on the Board."""
        state = self._board.units.get(fleet_unit.name)
        if state is None:
            return
        before, self._states[fleet_unit.name] = self._states.get(fleet_unit.name, state), state
        if before is not state:
            _carry_over(before, state)
        # The engine and models; the address is in its unit.
        state.engine = fleet_unit.latest.report.engine or state.engine
        if fleet_unit.gone_since is None:
            self._take_load(state, fleet_unit)
            self._take_epoch(state, fleet_unit.latest.report, now)
            self._take_drain(fleet_unit)
            self._take_hold(state, fleet_unit.latest.report, now)
        for evidence in self._news(state, fleet_unit, now):
            self._observe(evidence)
        if before is not state:
            # It has not restarted, so no slow start is needed.
            state.up_since = before.up_since

    def _news(self, state: UnitState, fleet_unit: FleetUnit, now: float) -> Iterator[Evidence]:
        """That a unit is gone is said once: its gate may answer all the same, as the unit's canaries show."""
        name, gone_since = fleet_unit.name, fleet_unit.gone_since
        if gone_since is None:
            self._gone.pop(name, None)
        elif self._gone.get(name) == gone_since:
            return
        else:
            self._gone[name] = gone_since
        yield from _words(state, fleet_unit, self._board.rules.passes, now)

    def keep(self, names: set[str]) -> None:
        """Forget all other units."""
        for kept in (self._states, self._drained, self._epochs, self._gone):
            for name in kept.keys() - names:
                del kept[name]

    def _take_load(self, state: UnitState, fleet_unit: FleetUnit) -> None:
        report, at = fleet_unit.latest.report, fleet_unit.latest.at
        state.answered_at = max(state.answered_at, at)
        if (lived_at := fleet_unit.latest.lived_at()) is not None:
            state.progress_at = max(state.progress_at, lived_at)
        if state.load is not None and state.load.at >= at:
            return
        running = report.running if report.running is not None else fleet_unit.in_flight
        # Requests in flight at its gates that the engine does not report yet will reach it in a moment.
        waiting = max(report.waiting or 0, fleet_unit.in_flight - running)
        sent_since = sum(1 for _ in takewhile(lambda lease: lease.opened_at > at, reversed(state.leases)))
        own = state.in_flight - sent_since
        self._board.report(Load(fleet_unit.name, at, running, waiting, report.kv_use or 0.0, own))

    def _take_epoch(self, state: UnitState, report: UnitReport, now: float) -> None:
        name = state.unit.name
        gate, known, incarnation = self._epochs.get(name, ("", "", 1))
        if report.epoch and gate == report.gate and _is_other(known, report.epoch):
            incarnation += 1
        if report.epoch:
            self._epochs[name] = (report.gate, report.epoch, incarnation)
        if dict(state.case.epochs).get(GATE_EPOCHS) != str(incarnation):
            reason, epoch = f"gate {report.gate} reads the epoch {report.epoch}", str(incarnation)
            self._observe(Evidence(name, Sign.NEUTRAL, Strength.WEAK, GATE_EPOCHS, reason, now, epoch=epoch))

    def _take_drain(self, fleet_unit: FleetUnit) -> None:
        report, name = fleet_unit.latest.report, fleet_unit.name
        wanted, known = (
            fleet_unit.drained_by or (report.gate if report.stopping else ""),
            self._drained.get(name, ""),
        )
        if bool(wanted) is bool(known):
            return
        self._drained[name] = wanted
        self._drain(name, bool(wanted))
        why = "it is stopping, and no other gate has the unit" if wanted and not fleet_unit.drained_by else ""
        self._tell(Action("drain" if wanted else "undrain", f"gate {wanted or known}", name, why))

    def _take_hold(self, state: UnitState, report: UnitReport, now: float) -> None:
        if report.hold is not None or is_on(state.hold):
            self._hear(state, EnginePause(state.unit.name, report.hold, now))


def _words(state: UnitState, fleet_unit: FleetUnit, passes: int, now: float) -> Iterator[Evidence]:
    """The evidence that brings the case of a unit to the verdict of its gate, to be observed in order."""
    report, at = fleet_unit.latest.report, fleet_unit.latest.at
    reason = f"{report.verdict.value} at its gate" + (f": {report.reason}" if report.reason else "")

    def word(sign: Sign, strength: Strength, source: str, why: str) -> Evidence:
        return Evidence(fleet_unit.name, sign, strength, source, why, now)

    source = f"gate {report.gate}"
    if fleet_unit.gone_since is not None:
        if state.case.verdict is not Verdict.DOWN:
            why = "its gate sends no more reports and is not ready; no other gate has the unit"
            yield word(Sign.BAD, Strength.FATAL, source, why)
    elif report.verdict not in USABLE:
        is_due = state.case.verdict in USABLE or report.verdict is Verdict.DOWN
        if is_due and state.case.verdict is not Verdict.DOWN:
            yield word(Sign.BAD, Strength.FATAL, source, reason)
    elif not is_own_finding(state.case) and not _is_newer_doubt(state.case, report, at):
        for _ in range(passes + 1):
            if state.case.verdict is not Verdict.UP:
                yield word(Sign.GOOD, Strength.STRONG, CANARY_SOURCE, f"{source}: {reason}")
        if report.verdict is Verdict.SUSPECT:
            yield word(Sign.BAD, Strength.STRONG, source, reason)


def is_own_finding(case: Case, strength: Strength = Strength.WEAK) -> bool:
    """Whether the unit is down by evidence of this gate itself, of at least this strength."""
    if case.verdict not in (Verdict.DOWN, Verdict.PROBATION) or case.because is None:
        return False
    return case.because.strength >= strength and not case.because.source.startswith("gate ")


def _is_newer_doubt(case: Case, report: UnitReport, at: float) -> bool:
    """Whether the unit is suspected, and its gate has not reported it as healthy since."""
    return case.verdict is Verdict.SUSPECT and (report.verdict is Verdict.SUSPECT or at <= case.since)


def _is_other(known: str, read: str) -> bool:
    """Whether a process in the known epoch has ended. New ones may be added one after another."""
    before = known.split(",")
    if len(known) >= _CUT:
        before.pop()
    return known != "" and not set(before) <= set(read.split(","))


def _carry_over(before: UnitState, state: UnitState) -> None:
    state.drained = before.drained
    state.step_times, state.costs, state.gaps_ms = before.step_times, before.costs, before.gaps_ms


# The units of the fleet by the reports of gates, and through which gate each is reached. Pure.
#
# 1. A unit stays as long as a gate reports it (see Roster), and FLEET_FORGET_S more, so that a fleet that is
#    down is not taken for an empty one.
# 2. Of several gates of a unit one is its route: the same as long as it is available, and different ones for
#    different units, so that gates share the work.
# 3. A unit that computes prompts for others gets no whole request; its gate splits what goes to the others.
# 4. A gate that has just appeared gets units of others only after FLEET_SETTLE_S: it may be about to restart
# again.


FLEET_FORGET_S = 60.0
FLEET_SETTLE_S = 10.0
_LEAST_WEIGHT = 0.001
_DEFAULT = Unit("", "", "")


class TimedView(NamedTuple):
    """The report of one gate, and when the gate last said that it holds. `reported_at`: when it was written,
    if     that was earlier.
    """

    report: UnitReport
    at: float
    reported_at: float | None = None

    def lived_at(self) -> float | None:
        """When the unit last made progress."""
        age_s = self.report.life_age_s
        return None if age_s is None else (self.at if self.reported_at is None else self.reported_at) - age_s


class FleetUnit(NamedTuple):
    """One unit of the fleet. `name` is its name on the Board; `latest` is the report of the gate that is its
    route, `in_flight` how many requests all gates have there, `drained_by` names a gate that has drained it.

    `gone_since`: no gate reports it since then, and `latest` is the last report.
    """

    name: str
    latest: TimedView
    in_flight: int
    drained_by: str = ""
    gone_since: float | None = None


class FleetUnits:
    """The known fleet. `lost` are URLs of gates that do not answer, set by the caller."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._sights: dict[tuple[str, str], FleetUnit] = {}
        self._since: dict[str, float] = {}
        """Since when each gate, by its URL, reports."""
        self.lost: set[str] = set()

    def refresh(self, now: float) -> dict[str, FleetUnit]:
        """All units now, by their name on the Board."""
        reported: defaultdict[tuple[str, str], dict[str, TimedView]] = defaultdict(dict)
        for (unit, gate), report, at in self._roster.everything():
            if report.gate_url:
                by_url = reported[report.cell, unit]
                one = TimedView(report, at, self._roster.reported_at(unit, gate))
                # One URL may belong to a gate that stops and to its successor.
                by_url[report.gate_url] = max(by_url.get(report.gate_url, one), one, key=_standing)
        self._note_gates((url for by_url in reported.values() for url in by_url), now)
        shared = _shared(unit for _, unit in reported.keys() | self._sights.keys())
        self._sights = {
            key: self._sight(key, reported.get(key), now, shared)
            for key in sorted(reported.keys() | self._sights.keys())
            if key in reported or not self._is_forgotten(key, now)
        }
        return {fleet_unit.name: fleet_unit for fleet_unit in self._sights.values()}

    def restarted(self, gates: Collection[str]) -> set[str]:
        """Those of these gates at whose URL another one has reported since."""
        last: dict[str, tuple[float, str]] = {}
        for (_, gate), report, at in self._roster.everything():
            last[gate] = max(last.get(gate, (at, report.gate_url)), (at, report.gate_url))
        newest: dict[str, float] = {}
        for at, url in last.values():
            newest[url] = max(newest.get(url, at), at)
        return {gate for gate in gates if gate in last and newest[last[gate][1]] > last[gate][0]}

    def _sight(
        self,
        key: tuple[str, str],
        reported: Mapping[str, TimedView] | None,
        now: float,
        shared: frozenset[str],
    ) -> FleetUnit:
        cell, unit = key
        name = f"{cell}.{unit}" if unit in shared else unit
        before = self._sights.get(key)
        if reported is None:
            assert before is not None
            since = before.gone_since if before.gone_since is not None else now
            return before._replace(name=name, in_flight=0, gone_since=since)
        url = self._choose(unit, reported, before.latest.report.gate_url if before is not None else "", now)
        drained_by = next((one.report.gate for one in reported.values() if one.report.drained), "")
        return FleetUnit(
            name, reported[url], sum(one.report.in_flight for one in reported.values()), drained_by
        )

    def _choose(self, unit: str, reported: Mapping[str, TimedView], known: str, now: float) -> str:
        if len(reported) == 1:
            return next(iter(reported))

        def rank(url: str) -> tuple[bool, bool, bool, bool, int]:
            is_new = url != known and now - self._since[url] < FLEET_SETTLE_S
            is_usable = url == known or reported[url].report.verdict in USABLE
            tie = crc32(f"{unit} {url}".encode())
            return url in self.lost, reported[url].report.stopping, not is_usable, is_new, tie

        return min(reported, key=rank)

    def _is_forgotten(self, key: tuple[str, str], now: float) -> bool:
        since = self._sights[key].gone_since
        return since is not None and now - since >= FLEET_FORGET_S

    def _note_gates(self, urls: Iterable[str], now: float) -> None:
        self._since = {url: self._since.get(url, now) for url in urls}
        self.lost &= self._since.keys()


def found(fleet_units: Iterable[FleetUnit]) -> Found:
    """The fleet, as discovery has it."""
    units = tuple(_unit(fleet_unit) for fleet_unit in fleet_units)
    cells = tuple(Cell(name) for name in sorted({unit.cell for unit in units}))
    return Found(units, cells)


def _unit(fleet_unit: FleetUnit) -> Unit:
    report = fleet_unit.latest.report
    return Unit(
        fleet_unit.name,
        report.cell,
        report.gate_url,
        report.models,
        max(report.weight, _LEAST_WEIGHT),
        report.max_in_flight or _DEFAULT.max_in_flight,
        nodes=via_gate(report.unit),
        engine=VIA_GATE,
        role=report.role,
    )


def _standing(reported: TimedView) -> tuple[bool, float]:
    return not reported.report.stopping, reported.at


def _shared(names: Iterable[str]) -> frozenset[str]:
    """Names that units of several cells have."""
    return frozenset(name for name, count in Counter(names).items() if count > 1)


# The fleet router: keeps a gate's fleet and its verdicts to what other gates publish in Redis.
#
# 1. Without Redis the last fleet is kept. A gate whose reports are missing is probed at its /readyz before
#    its units count as gone.
# 2. Nothing here waits for Redis, and no request waits for this module.


CHECK_S = 0.5
FLEET_READY_S = 1.0
"""The timeout of a gate's /readyz, which it answers from memory."""


class FleetRouter:
    """For a gate whose units belong to other gates. The gate calls `tick` and `received`."""

    def __init__(self, plane: Plane, roster: Roster, feed: Feed) -> None:
        self._plane = plane
        self._roster = roster
        self._feed = feed
        self._units = FleetUnits(roster)
        self._evidence = FleetEvidence(
            plane.board, plane.prober.observe, plane.set_drain, plane.events.add, plane.hold_watch.hear
        )
        self._sights: dict[str, FleetUnit] = {}
        self._is_due = False
        self._check_at = 0.0
        self._checking: asyncio.Task[None] | None = None
        feed.on_taken = self._on_taken

    def received(self, _: Seen) -> None:
        """A verdict of another gate has changed: apply all changes of this turn at once."""
        self._tick_soon()

    def flipped(self, flip: Flip) -> None:
        """A verdict has changed here: a unit whose gate refuses may have another gate."""
        if flip.after is Verdict.DOWN:
            self._tick_soon()

    def _tick_soon(self) -> None:
        if not self._is_due:
            # All units of a gate that is gone may be DOWN now, and the way by another gate is known already.
            self._is_due = self._plane.board.is_changing = True
            asyncio.get_running_loop().call_soon(lambda: self.tick(self._plane.now()))

    def tick(self, now: float) -> None:
        """Take over what is known now."""
        self._is_due = False
        self._note_refusals()
        self._sights = self._units.refresh(now)
        self._plane.board.is_changing = self._feed.put(found(self._sights.values()))
        self._evidence.keep(set(self._sights))
        self._apply_all()
        if now >= self._check_at and (self._checking is None or self._checking.done()):
            self._check_at = now + CHECK_S
            self._checking = asyncio.get_running_loop().create_task(self._check(), name="gates of the fleet")

    def _on_taken(self) -> None:
        self._plane.board.is_changing = False
        self._apply_all()

    def _apply_all(self) -> None:
        now = self._plane.now()
        for fleet_unit in self._sights.values():
            self._evidence.take(fleet_unit, now)

    def _note_refusals(self) -> None:
        """A gate that refuses connections is gone; its units may have another one."""
        for state in self._plane.board:
            if state.case.verdict is Verdict.DOWN and is_own_finding(state.case, Strength.FATAL):
                self._units.lost.add(state.unit.url)

    # -- asking gates --------------------------------------------------------------------------------------

    async def _check(self) -> None:
        """Check the readiness of gates that are missing or have refused a request."""
        now, missed = self._plane.now(), self._roster.missed(self._plane.now())
        restarted = self._units.restarted(missed)
        self._roster.not_ready(restarted, now)
        missed -= restarted
        urls = {report.gate_url for (_, name), report, _ in self._roster.everything() if name in missed}
        asked = sorted(urls | self._units.lost)
        answers = dict(zip(asked, await asyncio.gather(*map(self._is_ready, asked)), strict=True))
        self._units.lost -= {url for url, is_ready in answers.items() if is_ready}
        reported = self._roster.everything()
        gone = {gate for (_, gate), report, _ in reported if not answers.get(report.gate_url, True)}
        self._roster.not_ready(gone & missed, self._plane.now())

    async def _is_ready(self, url: str) -> bool:
        """Whether the gate at a URL is ready."""
        try:
            reply = await self._plane.reach.net().fetch(url)("GET", "/readyz", timeout_s=FLEET_READY_S)
        except FetchError:
            return False
        return reply.status == 200
