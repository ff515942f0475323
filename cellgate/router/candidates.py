"""The candidates for an ask: one row for each unit, in predicted seconds, for a policy to rank. Pure.

Units in cooling or slow start are candidates only when no other has room, SUSPECT ones only when no other has
a free slot. An ask may wait for a unit with many prompts to compute, because that time can be predicted. It
does not wait for one without a free slot while others have one, because the length of answers is unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

from cellgate.router.answers import MODELS_MAX
from cellgate.router.board import Board
from cellgate.router.cost import Expected
from cellgate.router.cost_model import BLOCK_BYTES
from cellgate.router.nouns import Ask, Candidate, Refusal, Verdict
from cellgate.router.shared_prefixes import Reuses
from cellgate.router.split_nouns import SplitPlan
from cellgate.router.unit_state import UnitState, Usable

_USABLE = (Verdict.UP, Verdict.SUSPECT)
_NO_UNIT = Refusal.NO_UNIT
_NO_SPLITS: Mapping[str, SplitPlan] = {}
Known = tuple[str, UnitState, int]
"""A unit that may get the ask, and how many blocks of its prompt it is believed to hold."""
_NONE_HELD = repeat(0)
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
    chance: float = 0.0,
) -> Candidates:
    """The candidates for an ask. `among`: only these units are looked at. `chance` is 0 to 1, random for each
    ask: a unit in slow start is a candidate for only a share of asks.
    """
    model, pairs = ask.model, board.pairs
    usable = board.usable.get(model) or _prepared(board, model)
    states, is_sure, steady_at = usable
    if tried or among is not None or not is_sure or ask.unit is not None or ask.build is not None:
        states, _, steady_at = _narrowed(board, usable, ask, tried, among)
    held: Iterable[int] = _NONE_HELD
    most, shared, charged = 0, None, 1.0
    blocks = ask.blocks if states and bounds.by_cache else ()
    if blocks:
        held = found = [state.costs.cache.match(blocks) for state in states.values()]
        most = max(found)
    known: Iterable[Known] = zip(states, states.values(), held)  # noqa: B905
    if blocks:
        if board.remote:
            known, most = _with_remote(board.remote.match(blocks), blocks, list(known), most)
        if most:
            shared = board.shared.of(blocks[most - 1], now)
            # As many will share that beginning again: to compute it on one more unit is charged to them all.
            charged = 1.0 / (1.0 + shared.count / len(pairs.decoders if ask.unit is None else board.units))
    why_none = _NO_UNIT if states and not pairs.has_needy else _why_none(board, ask, tried, among)
    if pairs.has_needy:
        known, why_none = pairs.served(ask, list(known), why_none, now)
    expected = _new(Expected, (board.answer_lengths.expected(model, ask.max_tokens), most, charged))
    rows, is_any_full = rows_of(known, ask, expected, bounds, now)
    if bounds.wait_s or not bounds.by_seconds:
        rows = [_bounded(board, row, bounds) for row in rows]
    if is_any_full or now < steady_at or now < board.cool_until:
        rows = _first_kind(board, rows, bounds.overcommit, now, chance)
    if model in board.adapters:
        rows = [
            row._replace(cost_s=row.cost_s + adapter_s(board.units[row.unit], ask, expected)) for row in rows
        ]
    if pairs.prefillers and ask.splits:
        rows, splits = pairs.splits(ask, rows, board.units, expected, now)
        return Candidates(rows, why_none, expected, shared, splits)
    return _new(Candidates, (rows, why_none, expected, shared, _NO_SPLITS))


def usable_of(board: Board, states: Mapping[str, UnitState], model: str | None) -> Usable:
    """Those of the units that are in rotation and serve a model."""
    found = {n: state for n, state in states.items() if state.is_usable() and state.serves_model(model)}
    is_sure = all(state.restart_suspected_at < 0.0 for state in found.values())
    slow_start_s = board.rules.slow_start_s
    steady_at = max((state.steady_at(slow_start_s) for state in found.values()), default=0.0)
    return Usable(found, is_sure, steady_at)


def _prepared(board: Board, model: str | None) -> Usable:
    """The units for requests of a model, kept until something about that changes."""
    if len(board.usable) >= MODELS_MAX:
        # Whoever asks may name any model.
        board.usable.clear()
    found = board.usable[model] = usable_of(board, board.pairs.decoders, model)
    return found


def _narrowed(
    board: Board, usable: Usable, ask: Ask, tried: Collection[str], among: Iterable[str] | None
) -> Usable:
    """Those that an ask may go to that was tried elsewhere, is bound, or shall be looked for in a sample."""
    if (only := ask.unit) is not None:
        # One that only computes prompts must be named.
        named = {only: board.units[only]} if only in board.units else {}
        usable = usable_of(board, named, ask.model)
    states = usable.states
    if among is not None:
        states = {name: states[name] for name in among if name in states}
    if tried:
        states = {name: state for name, state in states.items() if name not in tried}
    if ask.build is not None:
        states = {name: state for name, state in states.items() if state.build.key == ask.build}
    if not usable.is_sure:
        states = {name: state for name, state in states.items() if not state.is_restart_suspected()}
    return usable._replace(states=states)


def _why_none(board: Board, ask: Ask, tried: Collection[str], among: Iterable[str] | None) -> Refusal:
    """What to say when no unit is there for an ask."""
    states = board.pairs.decoders if ask.unit is None else board.units
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


def _with_remote(
    remote: Mapping[str, int], blocks: Sequence[int], known: list[Known], most: int
) -> tuple[list[Known], int]:
    """With the blocks that other gates have proven at units, and the most that one of them holds."""
    for number, (name, state, held) in enumerate(known) if remote else ():
        if (reported := remote.get(name, 0)) > held and not state.costs.cache.lacks(blocks[held]):
            known[number] = name, state, reported
            most = max(most, reported)
    return known, most


def adapter_s(state: UnitState, ask: Ask, expected: Expected) -> float:
    """What the LoRA adapter of an ask costs on a unit, in seconds; 0 for an ask without one."""
    answer_s = expected.answer_tokens * state.costs.forecast.step_s
    return state.adapters.cost_s(ask.model, answer_s) if ask.model is not None else 0.0


def foreign_at(board: Board, state: UnitState) -> int:
    """Requests of others at a unit. The engine's report includes those of other gates, but is older."""
    elsewhere = board.elsewhere.get(state.unit.name)
    return state.foreign if elsewhere is None else max(state.foreign, elsewhere.in_flight)


def rows_of(
    known: Iterable[Known], ask: Ask, expected: Expected, bounds: Bounds, now: float
) -> tuple[list[Candidate], bool]:
    """A row for each unit; and whether one of them takes no more requests.

    This is made for each unit and ask. So costs are the totals of CostModel.quote without the terms, and from
    a price a tick old.
    """
    prompt_bytes, (answer_tokens, shared, charged) = ask.prompt_bytes, expected
    backlog_s, _, overcommit, _, _ = bounds
    spread, is_any_full = 1.0 + overcommit, False
    rows: list[Candidate] = []
    add = rows.append
    for name, state, held in known:
        costs = state.costs
        room, fixed_s, step_s, token_s, byte_tokens, front = costs.backlog.tariff or costs.tariff()
        tokens, in_flight = prompt_bytes * byte_tokens, len(state.leases)
        cost_s = fixed_s + answer_tokens * step_s
        has_room = in_flight < state.limit * spread and now >= state.full_until
        if not has_room:
            is_any_full = True
        if front is not None:
            # As Backlog.backlog_tokens, without the call.
            behind, front_tokens, since, tokens_s, queued_s, sure_tokens_s = front
            queued = behind + (abs(front_tokens - (now - since) * tokens_s) if now > since else front_tokens)
            if queued > 0.0:
                cost_s += queued * queued_s
                # Prompts for others queue at their prefiller: to wait there was part of the price.
                if queued > backlog_s * sure_tokens_s and not overcommit and state.unit.role != "prefill":
                    has_room = False
        if tokens + answer_tokens > room:
            cost_s = costs.quote(ask, held, expected, now).terms[0]
        else:
            if held:
                tokens -= held * BLOCK_BYTES * byte_tokens * costs.prefixes.trust
            if tokens < 1.0:
                tokens = 1.0
            if shared > held:
                tokens -= (shared - held) * BLOCK_BYTES * byte_tokens * (1.0 - charged)
                if tokens < 0.0:
                    tokens = 0.0
            cost_s += tokens * token_s
        add(_new(Candidate, (name, in_flight, 0.0, 1.0, cost_s, has_room, held)))
    return rows, is_any_full


def _bounded(board: Board, row: Candidate, bounds: Bounds) -> Candidate:
    """A row with the wait for room, or for a policy that does not rank by seconds."""
    if bounds.wait_s and not row.has_room:
        row = row._replace(cost_s=row.cost_s + bounds.wait_s)
    if bounds.by_seconds:
        return row
    state = board.units[row.unit]
    return row._replace(load=float(row.in_flight + foreign_at(board, state)), weight=state.steady_weight)


def _first_kind(
    board: Board, rows: list[Candidate], overcommit: float, now: float, chance: float
) -> list[Candidate]:
    """The rows of the first kind of units of which one has room."""
    up: list[Candidate] = []
    cooling: list[Candidate] = []
    suspect: list[Candidate] = []
    full: list[Candidate] = []
    for row in rows:
        state = board.units[row.unit]
        if not (row.has_room or state.has_room(now, overcommit)):
            full.append(row)
        elif state.case.verdict is not Verdict.UP:
            suspect.append(row)
        elif state.cool_until > now or state.ramp(now, board.rules) < chance:
            cooling.append(row)
        else:
            up.append(row)
    if cooling and up and all(row.in_flight for row in up):
        # One at a time is no burden for a unit in slow start, and spares the others.
        units = board.units
        up += [row for row in cooling if not row.in_flight and units[row.unit].cool_until <= now]
    for kind in (up, cooling):
        if any(row.has_room for row in kind):
            return kind
    return up or cooling or suspect or full
