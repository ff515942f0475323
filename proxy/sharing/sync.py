"""Between the Board and the line to Redis: what a gate tells of its units, what it makes of what it hears.

Pure but for the Board it looks at. What others say changes no verdict by itself: their DOWN is evidence that
sends a canary, their proof of life spares one, their requests count as load. Nothing that was heard is told
again: two gates would keep a dead unit alive between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cellgate.proxy.sharing.roster import Roster
from cellgate.proxy.sharing.unit_report import HEARTBEAT_S, Seen, UnitReport, report_of
from cellgate.router.board import Board
from cellgate.router.cost_model import Elsewhere
from cellgate.router.nouns import Evidence, Flip, Sign, Strength, Verdict
from cellgate.router.unit_state import UnitState

PACE_BEATS = 20
"""A unit's usual pace is found out anew every so many beats: 5 s. It takes 0.1 ms, so they take turns."""
IDLE_BATCH = 0.01
"""A unit with fewer requests on average keeps the pace it had."""

NEWS_S = HEARTBEAT_S
"""When another gate saw a unit live is known no better than the way through Redis takes, and seems a little
later with each slow writing. What is less than this after the last sign of life is none of its own."""
AT_ONCE_S = 1.0
"""Signs of life so near to each other are of canaries that no gate could spare another one."""


class Sharing:
    """One gate's part in what gates share. `observe` takes evidence (`Prober.observe`), `ttft_s` tells what
    is usual of late at a unit (`Metrics.recent_ttft_s`).
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
        """Of units whose last sign of life others have seen: when we saw one ourselves, and when they did."""

    def reports(self) -> Iterator[UnitReport]:
        """What there is to tell now, one unit after the other."""
        self._beats += 1
        states = list(self._board)
        for number, state in enumerate(states):
            if (self._beats + number) % PACE_BEATS == 0 and state.batch > IDLE_BATCH:
                self._itl_s[state.unit.name] = state.step_times.gap_s(0.5)
            yield self._report(state)
        self._itl_s = {state.unit.name: self._itl_s.get(state.unit.name) for state in states}
        self._lives = {state: lives for state, lives in self._lives.items() if not state.retired}

    def report(self, flip: Flip) -> UnitReport | None:
        """What to tell at once of a verdict that has changed."""
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
        """Take over others' proofs of life. What they have on each unit that they use."""
        others = {}
        for name in self._roster.units() & self._board.units.keys():
            if (lived := self._roster.lived_at(name)) is not None:
                self._take_life(self._board.units[name], *lived)
            elsewhere = self._roster.elsewhere(name, now)
            if elsewhere.in_flight:
                others[name] = elsewhere
        return others

    def _take_life(self, state: UnitState, lived_at: float, gate: str) -> None:
        """Another gate has seen the unit live. The one that saw it last sends the next canary, too; of those
        that saw it at once, the one whose name comes first.
        """
        if lived_at > state.life_at + NEWS_S:
            self._lives[state] = self._own_life_at(state), lived_at
            state.life_at = state.peer_canary_at = lived_at
        elif gate < self._gate and lived_at > state.life_at - AT_ONCE_S:
            state.peer_canary_at = state.life_at

    def _own_life_at(self, state: UnitState) -> float:
        """When this gate itself last saw the unit live; 0: never."""
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
