"""The capacity of each model: who serves it now, how many did at most within the last hour, and who is
missing, with the reason. A change is an event. And units whose start takes longer than usual.

1. A unit is missing that has served a model and does not now, as long as it is configured and nobody has
   drained it. One that serves something else is missing for an hour; what it serves then never misses it.
2. A new capacity is looked at once a second at most, and only when units have changed.

In this order: `Capacity`, `Starts`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Metric

from cellgate.proxy.ingress.reasons import why
from cellgate.proxy.observe.events import Action
from cellgate.proxy.observe.families import gauge
from cellgate.proxy.observe.text import duration, one_line
from cellgate.router.board import Board, Flip
from cellgate.router.kept import listed
from cellgate.router.nouns import USABLE, Verdict
from cellgate.router.unit_state import UnitState

CAPACITY_LOOK_S = 1.0
HOUR_S = 3600.0
HOUR_STEPS = 60
"""The last hour in minutes."""
CAPACITY_STEP_S = HOUR_S / HOUR_STEPS
CAPACITY_MODELS_MAX, CAPACITY_OF_UNIT = 512, 128
"""More models are not watched, of all units and of one within an hour: units may list any number, and other
names after each restart.
"""
CAUSE_MAX = 160
"""Characters of a cause."""
PREFILL = "prefill"


@dataclass(slots=True)
class _Missing:
    """Since when a unit does not serve a model, and why not. `other`: it serves something else since then."""

    since: float
    cause: str
    other: bool


@dataclass(slots=True)
class _Model:
    serving: frozenset[str] = frozenset()
    missing: dict[str, _Missing] = field(default_factory=dict)
    first: frozenset[str] = frozenset()
    """Who served it when it was first seen."""
    counts: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=HOUR_STEPS))
    """By minute in which that changed: the most units at once, and how many there were at its end."""

    def note(self, now: float) -> None:
        """So many serve it now."""
        minute, count = int(now // CAPACITY_STEP_S), len(self.serving)
        most = count
        if self.counts and self.counts[-1][0] == minute:
            most = max(count, self.counts.pop()[1])
        self.counts.append((minute, most, count))

    def peak(self, now: float) -> int:
        """How many units served it at most within the last hour."""
        first = int(now // CAPACITY_STEP_S) - HOUR_STEPS
        ends = [count for minute, _, count in self.counts if minute < first]
        within = [most for minute, most, _ in self.counts if minute >= first]
        return max([*ends[-1:], *within, len(self.serving)])


class Capacity:
    """Of one gate. `tell` records an event."""

    def __init__(self, board: Board, tell: Callable[[Action], None], now: Callable[[], float]) -> None:
        self._board = board
        self._tell = tell
        self._now = now
        self._models: dict[str, _Model] = {}
        self._strays: set[str] = set()
        """Units that are missing somewhere because they serve something else."""
        self._changes = -1
        self._look_at = 0.0

    def tick(self, now: float) -> None:
        """Look, if something has changed."""
        if now < self._look_at or self._board.changes == self._changes:
            return
        self._look_at, self._changes = now + CAPACITY_LOOK_S, self._board.changes
        serving: dict[str, set[str]] = {}
        for name, state in self._board.units.items():
            if state.is_usable() and state.unit.role != PREFILL:
                for model in state.base_models():
                    serving.setdefault(model, set()).add(name)
        said: dict[str, list[str]] = {}
        self._strays = {
            name for known in self._models.values() for name, each in known.missing.items() if each.other
        }
        self._models = {
            model: known
            for model, known in self._models.items()
            if model in serving or known.serving or known.missing or known.peak(now)
        }
        self._know({model: units for model, units in serving.items() if model not in self._models})
        for model, known in self._models.items():
            if words := self._follow(known, model, frozenset(serving.get(model, ())), now):
                said.setdefault(words, []).append(model)
        for words, models in said.items():
            self._tell(Action("capacity", "gate", None, one_line(f"{listed(sorted(models))}: {words}")))

    def view(self) -> list[dict[str, Any]]:
        now = self._now()
        return [
            {
                "name": model,
                "units": len(known.serving),
                "most_last_hour": known.peak(now),
                "serving": sorted(known.serving),
                "missing": [
                    {"unit": name, "since_s": round(now - each.since, 1), "cause": each.cause}
                    for name, each in known.missing.items()
                ],
                "why": self._why(model, known, now),
            }
            for model, known in sorted(self._models.items())
        ]

    def collect(self) -> Iterator[Metric]:
        now, models = self._now(), list(self._models.items())
        yield gauge(
            "model_units",
            "Units of a model: that serve it now, and that have served it and do not now.",
            ("model", "state"),
            (
                ((model, state), count)
                for model, known in models
                for state, count in (("serving", len(known.serving)), ("missing", len(known.missing)))
            ),
        )
        yield gauge(
            "model_units_most",
            "Units that served a model at once, at most within the last hour.",
            "model",
            ((model, known.peak(now)) for model, known in models),
        )

    # -- what has changed ----------------------------------------------------------------------------------

    def _know(self, new: Mapping[str, set[str]]) -> None:
        """Begin to follow models, as many as there may be, in all and by the units that came with them."""
        named = Counter[str]()
        for known in self._models.values() if new else ():
            named.update(known.first)
        for model, units in new.items():
            least = min(named[name] for name in units)
            if len(self._models) < CAPACITY_MODELS_MAX and least < CAPACITY_OF_UNIT:
                named.update(units)
                self._models[model] = _Model(first=frozenset(units))

    def _follow(self, known: _Model, model: str, serving: frozenset[str], now: float) -> str:
        """Take over who serves a model now; returns what is to be said of it."""
        before, known.serving = known.serving, serving
        known.note(now)
        # Where as many came in their place, units that are configured no more have left nothing behind.
        is_even = len(serving) >= len(before)
        lost = [name for name in sorted(before - serving) if not (is_even and self._is_replaced(name))]
        words = []
        for name in lost:
            cause, other = self._cause(name, model)
            words.append(f"{name} left: {cause}")
            if cause != _CAPACITY_GONE and not self._is_drained(name) and name not in self._strays:
                known.missing[name] = _Missing(now, cause, other)
        back = [name for name in sorted(serving - before) if known.missing.pop(name, None) is not None]
        if back:
            words.append(f"{listed(back)} {'serves' if len(back) == 1 else 'serve'} it again")
        words += self._look_at_missing(known, model, now, set(lost))
        if not words:
            return ""
        count, most = len(serving), known.peak(now)
        shown, more = words[:3], f"; {len(words) - 3} more" if len(words) > 3 else ""
        return f"{_units(count)} it now, {most} at most in the last hour; {'; '.join(shown)}{more}"

    def _look_at_missing(self, known: _Model, model: str, now: float, new: set[str]) -> Iterable[str]:
        words = []
        for name, each in list(known.missing.items()):
            cause, other = self._cause(name, model)
            is_over = each.other and other and now - each.since > HOUR_S
            if cause == _CAPACITY_GONE or self._is_drained(name) or is_over:
                del known.missing[name]
                continue
            if other and not each.other:
                each.since, each.other = now, True
                if name not in new:
                    words.append(f"{name}: {cause}")
            each.cause = cause
        return words

    def _is_replaced(self, name: str) -> bool:
        """Whether a unit has gone, or one that has never served anything has its name."""
        state = self._board.units.get(name)
        return state is None or not state.progress_at

    def _is_drained(self, name: str) -> bool:
        state = self._board.units.get(name)
        return state is not None and state.drained

    def _cause(self, name: str, model: str) -> tuple[str, bool]:
        """Why a unit does not serve a model now; and whether it serves something else."""
        state = self._board.units.get(name)
        if state is None:
            return _CAPACITY_GONE, False
        if state.is_usable() and not state.serves_model(model):
            return f"it came up with another model: {listed(sorted(state.base_models()))}", True
        return _out_because(state)[:CAUSE_MAX], False

    def _why(self, model: str, known: _Model, now: float) -> list[str]:
        """The explanation, the most important first; each item is one line."""
        count, most = len(known.serving), known.peak(now)
        lines = [f"{model}: {_units(count)} it now, {most} at most in the last hour."]
        if known.serving:
            lines.append(f"In rotation: {', '.join(sorted(known.serving))}.")
        for name, each in known.missing.items():
            # The reason may have changed since, without a change of state.
            cause, _ = self._cause(name, model)
            lines.append(f"{name} is missing, for {duration(now - each.since)}: {cause}")
        for name, each in known.missing.items():
            again = f"You can start the engine of {name} with {model} again, or drain the unit."
            lines.append(again if each.other else f"Next: cellgate why {name}.")
        for state in self._board:
            if state.unit.name not in known.missing and not state.is_usable() and model in state.models:
                lines.append(f"{state.unit.name} does not serve it either: {_out_because(state)}")
        return lines


_CAPACITY_GONE = "it is not configured any more"


def _units(count: int) -> str:
    return "1 unit serves" if count == 1 else f"{count or 'no'} units serve"


def _out_because(state: UnitState) -> str:
    if state.drained:
        return why(state)
    return f"{state.case.verdict.value if state.hold is None else state.hold.kind.value}: {why(state)}"


CAPACITY_KNOWN_S = 5.0
"""Who is up sooner was not loading: this gate has just begun to look at it."""
USUAL_TIMES = 2.0
LEAST_S = 60.0
UNKNOWN_S = 1800.0
"""The limit while no start in a cell was seen: the largest models load for half an hour."""
STARTS_KEPT = 8


class Starts:
    """Units that start for longer than units of their cell usually do."""

    def __init__(self, board: Board, tell: Callable[[Action], None]) -> None:
        self._board = board
        self._tell = tell
        self._took_s: dict[str, deque[float]] = {}
        """By cell: how long the last starts took."""
        self._out_since: dict[str, float] = {}
        """By unit: one that starts again and again is out since the first time."""
        self._late: dict[UnitState, str] = {}
        """Units that are late, with the reason at that moment: a label of a metric must not change."""
        self._look_at = 0.0

    def flipped(self, flip: Flip) -> None:
        """A verdict has changed."""
        if flip.after is Verdict.UP:
            took_s = flip.at - self._out_since.pop(flip.unit, flip.at)
            if took_s >= CAPACITY_KNOWN_S and flip.before is not Verdict.SUSPECT:
                self._took_s.setdefault(flip.cell, deque(maxlen=STARTS_KEPT)).append(took_s)
        elif flip.after not in USABLE:
            self._out_since.setdefault(flip.unit, flip.at)

    def limit_s(self, cell: str) -> float:
        """How long a start there may take."""
        took = self._took_s.get(cell)
        return max(LEAST_S, USUAL_TIMES * max(took)) if took else UNKNOWN_S

    def tick(self, now: float) -> None:
        """Look for units that are late, once in a while."""
        if now < self._look_at:
            return
        self._look_at = now + (60.0 if self._board.attention.is_large else 10.0) * CAPACITY_LOOK_S
        starting = [state for state in self._board if _is_starting(state)]
        self._out_since = {name: at for name, at in self._out_since.items() if name in self._board.units}
        self._late = {state: reason for state, reason in self._late.items() if state in starting}
        for state in starting:
            since = self._out_since.setdefault(state.unit.name, state.case.since)
            since_s, limit_s = now - since, self.limit_s(state.unit.cell)
            if since_s > limit_s and state not in self._late:
                self._late[state] = why(state)[:CAUSE_MAX]
                detail = f"for {duration(since_s)}, of {duration(limit_s)} at most; last: {self._late[state]}"
                self._tell(Action("start_overdue", "gate", state.unit.name, detail))

    def collect(self) -> Iterator[Metric]:
        yield gauge(
            "unit_start_overdue",
            "1 for a unit that starts for longer than is usual in its cell; the last reason at that time.",
            ("unit", "cell", "reason"),
            (((state.unit.name, state.unit.cell, reason), 1) for state, reason in self._late.items()),
        )


def _is_starting(state: UnitState) -> bool:
    return state.case.verdict is Verdict.STARTING and not state.drained and state.hold is None
