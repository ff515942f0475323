"""The candidates for an ask: one row for each unit, in predicted seconds, for a policy to rank. Pure.

Units in cooling or slow start are candidates only when no other has room, SUSPECT ones only when no other has
a free slot. An ask may wait for a unit with many prompts to compute, because that time can be predicted. It
does not wait for one without a free slot while others have one, because the length of answers is unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from cellgate.router.answers import MODELS_MAX
from cellgate.router.board import Board
from cellgate.router.cost import Expected
from cellgate.router.nouns import Ask, Candidate, Refusal, Verdict
from cellgate.router.shared_prefixes import Reuses
from cellgate.router.split_nouns import SplitPlan
from cellgate.router.unit_state import UnitState

_UP = Verdict.UP
_USABLE = (_UP, Verdict.SUSPECT)
_NO_UNIT = Refusal.NO_UNIT
_NO_SPLITS: Mapping[str, SplitPlan] = {}
Known = tuple[str, UnitState, int]
"""A unit that may get the ask, and how many blocks of its prompt it is believed to hold."""
_new = tuple.__new__
"""What a named tuple's own constructor calls: half as long for a row."""


class Bounds(NamedTuple):
    """What counts as room. A unit with more than `backlog_s` seconds of this gate's prompts to compute has
    none.

    `wait_s` is added to the cost of units without room: so long others come before the ask here. With
    `overcommit` (a share of max_in_flight) only places count, for work that is lost otherwise.
    """

    backlog_s: float
    wait_s: float = 0.0
    overcommit: float = 0.0
    by_seconds: bool = True
    by_cache: bool = True
    """As Policy has them."""
    chance: float = 0.0
    """0 to 1, random for each ask: a unit in slow start is a candidate for only a share of asks."""


class Candidates(NamedTuple):
    """`rows` are those of the first kind of units of which one has room; `refusal` is what to say when
    there is none.

    `expected` is what was expected of the ask wherever it goes; `shared` is how often that part of its
    prompt came of late which some unit holds (None: none does). `splits` are the units for which another one
    is to compute the prompt.
    """

    rows: list[Candidate]
    refusal: Refusal
    expected: Expected
    shared: Reuses | None
    splits: Mapping[str, SplitPlan] = _NO_SPLITS


def find_candidates(
    board: Board,
    ask: Ask,
    now: float,
    tried: Collection[str],
    bounds: Bounds,
    among: Iterable[str] | None = None,
) -> Candidates:
    """The candidates for an ask. `among`: only these units are looked at."""
    model = ask.model
    usable = board.usable.get(model) or _prepared(board, model)
    if tried or among is not None or ask.unit is not None or ask.build is not None:
        usable = _narrowed(board, usable, ask, tried, among)
    blocks = ask.blocks if bounds.by_cache else ()
    known: list[Known] = []
    most = held = 0
    for name, state in usable.items():
        # is_restart_suspected of UnitState, inlined.
        if state.restart_suspected_at >= state.life_at:
            continue
        if blocks:
            held = state.costs.cache.match(blocks)
            if held > most:
                most = held
        known.append((name, state, held))
    if blocks and board.remote:
        most = _add_remote(board.remote.match(blocks), blocks, known, most)
    why_none = _NO_UNIT if known else _why_none(board, ask, tried, among)
    if board.pairs.has_needy:
        why_none = _why_none(board, ask, tried, among)
        known, why_none = board.pairs.served(ask, known, why_none, now)
    shared, charged = None, 1.0
    if most:
        shared = board.shared.of(blocks[most - 1], now)
        # As many will share that beginning again: to compute it on one more unit is charged to them all.
        charged = 1.0 / (1.0 + shared.count / len(_states(board, ask)))
    expected = _new(Expected, (board.answer_lengths.expected(model, ask.max_tokens), most, charged))
    rows = _rows(board, ask, expected, known, bounds, now)
    if model in board.adapters:
        states = board.units
        rows = [row._replace(cost_s=row.cost_s + adapter_s(states[row.unit], ask, expected)) for row in rows]
    if board.pairs.prefillers and ask.splits:
        rows, splits = board.pairs.splits(ask, rows, board.units, expected, now)
        return Candidates(rows, why_none, expected, shared, splits)
    return _new(Candidates, (rows, why_none, expected, shared, _NO_SPLITS))


def _states(board: Board, ask: Ask) -> Mapping[str, UnitState]:
    """The units that an ask may be sent to; one that only computes prompts must be named."""
    return board.pairs.decoders if ask.unit is None else board.units


def serving(states: Mapping[str, UnitState], model: str | None) -> dict[str, UnitState]:
    """Those of the units that are in rotation and serve a model."""
    return {
        name: state for name, state in states.items() if state.is_usable() and state.serves_model(model)
    }


def _prepared(board: Board, model: str | None) -> dict[str, UnitState]:
    """The units for requests of a model, kept until something about that changes."""
    if len(board.usable) >= MODELS_MAX:
        # Whoever asks may name any model.
        board.usable.clear()
    found = board.usable[model] = serving(board.pairs.decoders, model)
    return found


def _narrowed(
    board: Board,
    usable: Mapping[str, UnitState],
    ask: Ask,
    tried: Collection[str],
    among: Iterable[str] | None,
) -> dict[str, UnitState]:
    """Those that an ask may go to that was tried elsewhere, is bound, or shall be looked for in a sample."""
    if ask.unit is not None:
        usable = serving({n: s for n, s in board.units.items() if n == ask.unit}, ask.model)
    return {
        name: usable[name]
        for name in (usable if among is None else among)
        if name in usable
        and name not in tried
        and (ask.build is None or ask.build == usable[name].build.key)
    }


def _why_none(board: Board, ask: Ask, tried: Collection[str], among: Iterable[str] | None) -> Refusal:
    """What to say when no unit is there for an ask."""
    states = _states(board, ask)
    found = _NO_UNIT
    for name in states if among is None else among:
        state = states.get(name)
        if state is None or state.drained or name in tried or state.case.verdict not in _USABLE:
            continue
        if state.serves(ask):
            if state.is_restart_suspected():
                return Refusal.UNSURE
            if state.hold is not None:
                found = Refusal.ON_HOLD
    return found


def _add_remote(
    remote: Mapping[str, int], blocks: Sequence[int], known: list[Known], most: int
) -> int:
    """Add the blocks that other gates have proven at units; returns the most that one of them holds."""
    for number, (name, state, held) in enumerate(known) if remote else ():
        if (reported := remote.get(name, 0)) > held and not state.costs.cache.lacks(blocks[held]):
            known[number] = name, state, reported
            most = max(most, reported)
    return most


def adapter_s(state: UnitState, ask: Ask, expected: Expected) -> float:
    """What the LoRA adapter of an ask costs on a unit, in seconds; 0 for an ask without one."""
    answer_s = expected.answer_tokens * state.costs.forecast.step_s
    return state.adapters.cost_s(ask.model, answer_s) if ask.model is not None else 0.0


def foreign_at(board: Board, state: UnitState) -> int:
    """Requests of others at a unit. The engine's report includes those of other gates, but is older."""
    elsewhere = board.elsewhere.get(state.unit.name)
    return state.foreign if elsewhere is None else max(state.foreign, elsewhere.in_flight)


def _rows(
    board: Board,
    ask: Ask,
    expected: Expected,
    known: list[Known],
    bounds: Bounds,
    now: float,
) -> list[Candidate]:
    up: list[Candidate] = []
    cooling: list[Candidate] = []
    suspect: list[Candidate] = []
    full: list[Candidate] = []
    slow_start_s, (backlog_s, wait_s, overcommit, by_seconds, _, chance) = board.rules.slow_start_s, bounds
    spread, load, weight = 1.0 + overcommit, 0.0, 1.0
    for name, state, held in known:
        in_flight = len(state.leases)
        cost_s, busy_s = state.costs.estimate(ask, held, expected, now)
        has_room = has_place = in_flight < state.limit * spread and now >= state.full_until
        # Prompts for others queue at their prefiller: to wait there was part of the price.
        if busy_s > backlog_s and overcommit <= 0.0 and state.unit.role != "prefill":
            has_room = False
        if not has_room:
            cost_s += wait_s
        if not by_seconds:
            load, weight = float(in_flight + foreign_at(board, state)), state.steady_weight
        row = _new(Candidate, (name, in_flight, load, weight, cost_s, has_room, held))
        if not has_place:
            full.append(row)
        elif not state.is_up:
            suspect.append(row)
        elif state.cool_until > now or (
            now - state.risen_at < slow_start_s and state.ramp(now, board.rules) < chance
        ):
            cooling.append(row)
        else:
            up.append(row)
    for tier in (up, cooling):
        for row in tier:
            if row[5]:
                return tier
    return up or cooling or suspect or full
