"""Applies what becomes of split requests to the links of their pairs, and reports links that fail or
recover.

In this order: `LinkWatch`, `PairTally`, `split_metrics`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import Metric

from cellgate.proxy.observe.events import Action, EventLog
from cellgate.proxy.observe.families import counter, one_gauge, summary
from cellgate.proxy.observe.text import one_line
from cellgate.router.board import Board
from cellgate.router.nouns import ORPHANED, RELEASED, TRANSFERRED, UNCLAIMED_S, SplitStep
from cellgate.router.prefill_decode import AVOID_S


class LinkWatch:
    """The links of one gate. `steps` counts steps by pair and kind, `pairs` has what was transferred; both of
    units on the Board.
    """

    def __init__(self, board: Board, events: EventLog, now: Callable[[], float]) -> None:
        self._board = board
        self._events = events
        self._now = now
        self._orphaned_at: deque[float] = deque()
        self.steps: Counter[tuple[str, str, str]] = Counter()
        self.pairs: dict[tuple[str, str], PairTally] = {}
        self._units = board.units

    def apply(self, step: SplitStep) -> None:
        now, pair = self._now(), (step.prefiller, step.decoder)
        if self._units is not self._board.units:
            # It was configured since.
            self._forget_gone()
        self.steps[(*pair, step.kind)] += 1
        if step.kind == ORPHANED:
            self._orphaned_at.append(now)
            self.unclaimed()
            return
        if step.kind == RELEASED:
            if self._orphaned_at:
                self._orphaned_at.popleft()
            return
        was_failing = pair in self._board.pairs.links and self._board.pairs.links[pair].failures > 0
        has_failed = self._board.pairs.apply(step, now)
        who = f"link {step.prefiller} -> {step.decoder}"
        if has_failed:
            more = f"this pair is avoided for {AVOID_S:.0f} s at first, both units stay in rotation"
            detail = one_line(f"{who}: {step.reason}; {more}")
            self._events.add(Action("link_lost", "gate", step.decoder, detail))
        elif step.kind == TRANSFERRED:
            self.pairs.setdefault(pair, PairTally()).add(step.seconds)
            if was_failing:
                self._events.add(Action("link_back", "gate", step.decoder, who))

    def unclaimed(self) -> int:
        """Prompts whose blocks are held for nobody, as far as is known."""
        while self._orphaned_at and self._now() - self._orphaned_at[0] > UNCLAIMED_S:
            self._orphaned_at.popleft()
        return len(self._orphaned_at)

    def _forget_gone(self) -> None:
        units = self._units = self._board.units
        self.steps = Counter({key: n for key, n in self.steps.items() if {key[0], key[1]} <= units.keys()})
        self.pairs = {pair: tally for pair, tally in self.pairs.items() if set(pair) <= units.keys()}


@dataclass(slots=True)
class PairTally:
    """The transfers of one pair that were timed, and their seconds."""

    timed: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Blocks have arrived; `seconds` 0: not timed."""
        self.timed += seconds > 0.0
        self.seconds += seconds


_PAIR = ("prefiller", "decoder")


def split_metrics(board: Board, counts: LinkWatch) -> Iterator[Metric]:
    """Metrics of prompts that one unit computes for another; nothing where no unit has a role."""
    counts, pairs = counts, board.pairs
    if not pairs.prefillers and not counts.steps:
        return
    yield counter(
        "split_steps",
        "Steps of split requests by what became of them; not_paying: those not split for that.",
        (*_PAIR, "step"),
        [*counts.steps.items(), (("", "", "not_paying"), pairs.not_paying)],
    )
    yield summary(
        "transfer_seconds",
        "Time from a decoder's request to its first token, after its prompt was computed elsewhere.",
        _PAIR,
        [(pair, tally.timed, tally.seconds) for pair, tally in counts.pairs.items()],
    )
    yield one_gauge("split_orphans", "Computed prompts whose blocks are held for nobody.", counts.unclaimed())
