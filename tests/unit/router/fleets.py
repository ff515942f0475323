"""Boards, most of them with units that are all UP, and routers over them."""

from __future__ import annotations

import random

from cellgate.policies import POLICIES
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Cell, Evidence, Fleet, Rules, Sign, Strength, Unit
from cellgate.router.pick import Router
from cellgate.router.queue import FairRules, Queue
from cellgate.router.unit_state import Lease


def board_of(
    *units: Unit, rules: Rules | None = None, cells: tuple[Cell, ...] = (), at: float = 0.0
) -> Board:
    """Nothing is known of them yet."""
    board = Board(rules or Rules())
    board.configure(Fleet(cells, units), at)
    return board


def board_up(
    *units: Unit, rules: Rules | None = None, cells: tuple[Cell, ...] = (), at: float = 0.0
) -> Board:
    """Each has passed a canary at that time."""
    board = board_of(*units, rules=rules, cells=cells, at=at)
    for unit in units:
        board.observe(Evidence(unit.name, Sign.GOOD, Strength.STRONG, "canary", "one token", at))
    return board


def router_over(
    board: Board, policy: str = "prefix_affinity", rules: FairRules | None = None, seed: int = 1
) -> Router:
    return Router(board, POLICIES[policy](), random.Random(seed), Queue(rules or FairRules()))


def picked(router: Router, ask: Ask, now: float = 3.0) -> Lease:
    """What is given to an ask for which there is room."""
    lease = router.pick(ask, now)
    assert isinstance(lease, Lease), lease
    return lease
