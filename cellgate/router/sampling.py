"""Which units are looked at for an ask: some of many, and now and then one that seems slower. Pure.

Sampling, when there are too many units to consider all:
1. The unit that last got the longest prefix of the prompt is included, if known, and the one that holds
   the longest by the reports of other gates.
2. The others are random: the best of SAMPLE is nearly as good as the best of all, and not all find one.
3. It only proposes units: the caller decides.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from math import inf

from cellgate.router.board import Board
from cellgate.router.cost import Expected
from cellgate.router.cost_model import CostModel
from cellgate.router.nouns import Ask, Candidate

LOOK_AT_ALL = 24
"""With up to this many units all are considered."""
SAMPLE = 8
RENEWED_S = 0.25
"""How old the list may be that is drawn from, where units have changed since."""
HOLDERS_MAX = 200_000


class Sampler:
    """Proposes units of a board."""

    def __init__(self, board: Board, rng: random.Random) -> None:
        self._board = board
        self._rng = rng
        self._usable: dict[str | None, tuple[float, int, list[str]]] = {}
        """By model: when it was listed, as of how many changes of the Board, and who serves it."""
        self._holders: dict[int, str] = {}
        """By the hash of the last block of a prompt: who got it last. The oldest comes first."""

    def of(self, ask: Ask, now: float) -> Collection[str] | None:
        """The units to consider; None: all of them."""
        if len(self._board.units) <= LOOK_AT_ALL:
            return None
        if ask.unit is not None:
            return (ask.unit,)
        names = self._list(ask, now)
        if len(names) <= LOOK_AT_ALL:
            return names
        # Not rng.sample, which takes three times as long.
        chance, size, chosen = self._rng.random, len(names), dict[str, None]()
        while len(chosen) < SAMPLE:
            chosen[names[int(chance() * size)]] = None
        if (holder := self._holder(ask)) is not None:
            chosen[holder] = None
        if self._board.remote and (held := self._board.remote.match(ask.blocks)):
            chosen[max(held, key=held.__getitem__)] = None
        return chosen

    def record(self, ask: Ask, unit: str) -> None:
        """`ask` goes to `unit`, which will hold its prompt."""
        if ask.blocks:
            self._holders.pop(ask.blocks[-1], None)
            self._holders[ask.blocks[-1]] = unit
            if len(self._holders) > HOLDERS_MAX:
                del self._holders[next(iter(self._holders))]

    def _holder(self, ask: Ask) -> str | None:
        """Who got the longest prompt that this one goes on from."""
        holders = self._holders
        for block in reversed(ask.blocks):
            if block in holders:
                return holders[block]
        return None

    def _list(self, ask: Ask, now: float) -> list[str]:
        board = self._board
        at, as_of, names = self._usable.get(ask.model, (-RENEWED_S, -1, []))
        if as_of != board.changes and now - at >= RENEWED_S:
            if len(self._usable) > len(board.units):
                # Whoever asks may name any model.
                self._usable.clear()
            names = [state.unit.name for state in board.able(ask._replace(build=None))]
            self._usable[ask.model] = now, board.changes, names
        return names


# Exploration: when a unit gets a request although another would serve it sooner, to measure its speed.
# Pure.
#
# A unit that was slow once would otherwise never get the request that shows its present speed. It gets one
# that would go there if it were as fast as the best unit, and none that stays where its prompt is cached.
# One whose cache is empty would get none of those that begin as many do: it gets those that would be as
# well off there if that beginning were cached, one at a time. The cost is limited to a share of all waiting
# time: each pick adds to a budget, and exploring takes out what it costs more. A cold unit is first: what
# it lacks is known. All others get the same of it: the one that has been idle for the longest, measured by
# its price, is next, and the budget is saved for it. So a unit that seems ten times slower is explored
# rarely, and one that is cheaper does not take it all; once whatever the budget is, when it seems slower
# because of its weight, and was never tried. Asks with a deadline never explore.


SHARE = 0.02
"""The share of the predicted seconds of all picks that may be spent on exploration."""
BUDGET_MAX_S = 60.0
IDLE_S = 2.0
"""A unit that got a request this recently needs no exploration."""
LOOK_S = 0.1
"""How often such units are searched."""
SAME_S = 0.001
"""So little is no difference."""
COMMON, BRANCHES = 0.6, 3
"""A beginning of which at most so much is charged (see Expected) comes about once a minute for each unit, or
more often, and if prompts go on from it in so many ways, it is not that of one session: whoever computes it
once will soon be asked for it again."""
COLD = 0.25
"""A unit is cold that holds at most so much of what the best one does: in time each gets what comes often."""
ALIKE = 1.05
"""A unit that would cost so many times what the best one does, if it were warm, is as good as that one."""


class Explorer:
    """The budget of exploration, from `look_at` on; where a unit is cold, at any time for a common beginning.
    Each pick adds SHARE of its prediction.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self.look_at = 0.0
        self.is_any_cold = False
        self.budget_s = 0.0

    def choose(
        self, rows: Iterable[Candidate], best: Candidate, ask: Ask, expected: Expected, now: float
    ) -> Candidate:
        """`best`, or instead of it the idle unit of its cell whose turn it is, if the budget affords it."""
        self.budget_s = min(self.budget_s, BUDGET_MAX_S)
        self.look_at = now + LOOK_S
        states, most_due, chosen, price_s = self._board.units, (False, 0.0), best, 0.0
        usual = states[best.unit]
        fast, is_common = usual.costs.cost_terms, _is_common(usual.costs, ask, expected)
        few, self.is_any_cold = COLD * len(usual.costs.prefixes), False
        for row in rows:
            state = states[row.unit]
            idle_s, costs = now - state.last_lease_at, state.costs
            if row.in_flight or not row.has_room or state.unit.cell != usual.unit.cell:
                continue
            if is_cold := len(costs.prefixes) < few:
                self.is_any_cold = True
                is_cold = is_common and _is_as_good_warm(costs, row, best, ask, expected, now)
            if idle_s <= IDLE_S and not is_cold:
                continue
            own = costs.cost_terms
            is_slow = own.token_s > fast.token_s or own.step_s > fast.step_s or own.latency_s > fast.latency_s
            if not (is_slow or is_cold):
                continue
            # One that has had no request since it came up may be dearer for its weight alone.
            is_guessed = state.last_lease_at <= state.up_since and state.weight < usual.weight
            regret_s = row.cost_s - best.cost_s
            due = (is_cold, inf if is_guessed else idle_s / max(regret_s, SAME_S))
            if due > most_due and (is_guessed or regret_s <= BUDGET_MAX_S):
                as_fast = costs.estimate(ask, row.cached_blocks, expected, now, like=usual.costs)
                if is_cold or as_fast.terms[0] <= best.cost_s + SAME_S:
                    most_due, chosen, price_s = due, row, max(regret_s, 0.0)
        if price_s > self.budget_s and most_due[1] < inf:
            return best
        self.budget_s = max(self.budget_s - price_s, 0.0)
        return chosen


def _is_common(costs: CostModel, ask: Ask, expected: Expected) -> bool:
    """Whether many prompts begin as this one, as far as a unit that holds them knows."""
    shared = expected.shared_blocks
    return expected.charged <= COMMON and costs.prefixes.branches(ask.blocks[shared - 1]) >= BRANCHES


def _is_as_good_warm(
    costs: CostModel, row: Candidate, best: Candidate, ask: Ask, expected: Expected, now: float
) -> bool:
    """Whether a unit would be as good as the best one if it held what is shared of the prompt."""
    held = max(row.cached_blocks, expected.shared_blocks)
    return costs.estimate(ask, held, expected, now).terms[0] <= ALIKE * best.cost_s
