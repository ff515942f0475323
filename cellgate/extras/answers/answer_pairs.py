"""Asks a unit and its peers the known prompt in pairs: are its answers worse, and not by chance?

Some answers in a row that differ prove nothing where units do not agree with themselves: not all kernels are
deterministic, and a unit may be several engines behind one address. So they only raise the question. Each
pair is one answer of the unit and one of a peer, at the same time; router/equals.py says what they prove.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from cellgate.extras.answers.known_answer import ask_again
from cellgate.extras.answers.wrong_answers import Doubted
from cellgate.probes.base import Fetch
from cellgate.router.board import Board
from cellgate.router.equals import Comparison
from cellgate.router.known_answers import is_same
from cellgate.router.unit_state import UnitState

IN_USE_S, IN_USE_TIMES = 1.0, 60
"""A unit with requests answers a little otherwise: so long, so many times, until both are idle."""
UNANSWERED_MAX = 3
"""So many pairs without two answers, and nothing is learnt."""


class AnswerPairs(NamedTuple):
    """Asks units of a board."""

    board: Board
    fetch_of: Callable[[UnitState], Fetch]
    now: Callable[[], float]

    def is_there(self, state: UnitState) -> bool:
        """Whether a unit may be asked: it is in rotation, and has answered before."""
        is_known = self.board.units.get(state.unit.name) is state
        return is_known and state.answers is not None and state.is_usable()

    async def compare(
        self, state: UnitState, claim: Doubted, peers: list[UnitState], *, is_urgent: bool = False
    ) -> Comparison | None:
        """Of a unit with peers that the `claim` names, one after another; None: it could not be asked.
        `is_urgent`: whether they have requests or not.
        """
        assert state.answers is not None
        comparison, question, unanswered, waited = Comparison(), state.answers.question, 0, 0
        while not comparison.is_over:
            present = [peer for peer in peers if self.is_there(peer)]
            is_over = unanswered > UNANSWERED_MAX or waited > IN_USE_TIMES
            if is_over or not present or not self.is_there(state):
                return None
            peer = present[comparison.pairs % len(present)]
            if not is_urgent and (state.in_flight or peer.in_flight):
                waited += 1
                await asyncio.sleep(IN_USE_S)
                continue
            asked = (ask_again(self.fetch_of(each), question, each.engine) for each in (state, peer))
            said = await asyncio.gather(*asked)
            if said[0] is None or said[1] is None:
                unanswered += 1
                continue
            comparison.add(
                is_bad=not is_same(said[0], claim.expected),
                other_is_bad=not is_same(said[1], claim.peers[peer.unit.name]),
            )
        return comparison
