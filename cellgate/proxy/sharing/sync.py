"""Between the Board and Redis: what a gate reports of its units, and how it uses the reports of others.

Pure except for the Board that it reads. Reports of others change no verdict by themselves: their DOWN is
evidence that sends a canary, progress seen by them saves one, their requests count as load. Reports of others
are never published again, or two gates would keep a dead unit alive between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cellgate.proxy.sharing.roster import Roster
from cellgate.proxy.sharing.unit_report import HEARTBEAT_S, Seen, UnitReport, report_of
from cellgate.router.board import Board
from cellgate.router.flip import Flip
from cellgate.router.nouns import Evidence, Sign, Strength, Verdict
from cellgate.router.other_gates import NOTHING_ELSEWHERE, Elsewhere
from cellgate.router.unit_state import UnitState

PACE_BEATS = 20
"""A unit's usual pace is computed once in this many heartbeats (5 s). It takes 0.1 ms, so units take
turns.
"""
IDLE_BATCH = 0.01
"""A unit with fewer requests on average keeps its last pace."""

NEWS_S = HEARTBEAT_S
"""The time of progress seen by another gate is only as exact as the way through Redis, and each slow write
moves it a little later. A time less than this after the last progress is not new progress."""
AT_ONCE_S = 1.0
"""Progress this close together comes from canaries that gates sent at the same time."""


class Sharing:
    """The part of one gate. `observe` takes evidence (`Prober.observe`), `ttft_s` gives the recent time to
    first token of a unit (`Metrics.recent_ttft_s`).
    """

    def __init__(
        self,
        board: Board,
        gate: str,
        roster: Roster,
        now: Callable[[], float],
        observe: Callable[[Evidence], object],
        ttft_s: Callable[[str], float | None],
        *,
        gate_url: Callable[[], str] = str,
        is_stopping: Callable[[], bool] = bool,
    ) -> None:
        self._board = board
        self._gate = gate
        self._roster = roster
        self._now = now
        self._observe = observe
        self._ttft_s = ttft_s
        self._gate_url = gate_url
        self._is_stopping = is_stopping
        self._beats = 0
        self._itl_s: dict[str, float | None] = {}
        self._lives: dict[UnitState, tuple[float, float]] = {}
        """For units whose last progress was seen by others: when this gate saw some, and when they did."""

    def reports(self) -> Iterator[UnitReport]:
        """The reports to publish now, one for each unit."""
        self._beats += 1
        states = list(self._board)
        for number, state in enumerate(states):
            if (self._beats + number) % PACE_BEATS == 0 and state.batch > IDLE_BATCH:
                self._itl_s[state.unit.name] = state.step_times.gap_s(0.5)
            yield self._report(state)
        self._itl_s = {state.unit.name: self._itl_s.get(state.unit.name) for state in states}
        self._lives = {state: lives for state, lives in self._lives.items() if not state.retired}

    def report(self, flip: Flip) -> UnitReport | None:
        """The report to publish at once for a change of verdict."""
        state = self._board.units.get(flip.unit)
        return self._report(state) if state is not None else None

    def heard(self, seen: Seen) -> None:
        """Another gate's verdict has changed."""
        report = seen.report
        if report.unit in self._board.units and report.verdict is Verdict.DOWN:
            reason = f"gate {report.gate} reports it as down: {report.reason}"
            source = f"gate {report.gate}"
            self._observe(Evidence(report.unit, Sign.BAD, Strength.STRONG, source, reason, self._now()))

    def tick(self, now: float) -> dict[str, Elsewhere]:
        """Apply the progress seen by others. Returns what else they report of units."""
        others = {}
        for name in self._roster.units() & self._board.units.keys():
            if (lived := self._roster.lived_at(name)) is not None:
                self._take_life(self._board.units[name], *lived)
            elsewhere = self._roster.elsewhere(name, now)
            if elsewhere != NOTHING_ELSEWHERE:
                others[name] = elsewhere
        return others

    def _take_life(self, state: UnitState, lived_at: float, gate: str) -> None:
        """Another gate has seen progress. The gate that saw it last sends the next canary, too; of several at
        the same time, the one whose name is first.
        """
        if lived_at > state.life_at + NEWS_S:
            self._lives[state] = self._own_life_at(state), lived_at
            state.life_at = state.peer_canary_at = lived_at
        elif gate < self._gate and lived_at > state.life_at - AT_ONCE_S:
            state.peer_canary_at = state.life_at

    def _own_life_at(self, state: UnitState) -> float:
        """When this gate itself last saw progress of the unit; 0: never."""
        own_at, others_at = self._lives.get(state, (0.0, 0.0))
        return own_at if state.life_at == others_at else state.life_at

    def _report(self, state: UnitState) -> UnitReport:
        name = state.unit.name
        return report_of(
            state,
            self._gate,
            self._now(),
            life_at=self._own_life_at(state),
            ttft_s=self._ttft_s(name),
            itl_s=self._itl_s.get(name),
            gate_url=self._gate_url(),
            stopping=self._is_stopping(),
        )
