"""What a roll sees of units, and what becomes of its command when a unit is not there any more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cellgate.proxy.config.action_settings import RollPolicy, RunCommand
from cellgate.proxy.extras.operator.plan import RecoveryReport, RecoveryResult
from cellgate.proxy.extras.operator.roll_plan import OwnRoll, Roll, UnitRoll
from cellgate.proxy.extras.operator.roller import RollPorts, roll_units, slower_than_cell
from cellgate.router.board import Board
from cellgate.router.cost_model import RemoteLoad
from cellgate.router.nouns import Fleet, Rules, Unit

POLICY = RollPolicy(RunCommand(("roll",)), "audit")


def ports(board: Board) -> RollPorts:
    async def never(*_: object) -> RecoveryReport:
        raise AssertionError("it was run")

    settings = SimpleNamespace(known_answer=SimpleNamespace(every_s=0.0))
    plane: Any = SimpleNamespace(
        board=board,
        now=lambda: 1.0,
        settings=settings,
        set_drain=None,
        events=SimpleNamespace(add=None),
        ticker=SimpleNamespace(looks=[]),
        on_fleet=[],
    )
    return roll_units(plane, POLICY, OwnRoll(), cast("Any", never))._ports


def board_of(*names: str) -> Board:
    board = Board(Rules())
    board.configure(Fleet(units=tuple(Unit(name, "c", f"http://{name}") for name in names)), 0.0)
    return board


def test_a_unit_that_another_gate_has_drained_is_drained() -> None:
    board = board_of("a", "b", "c")
    board.drain("a", drained=True)
    board.elsewhere = {"b": RemoteLoad(drained=True)}
    assert [row.drained for row in ports(board).rows(())] == [True, True, False]


def test_a_unit_that_is_not_there_any_more_gets_no_command() -> None:
    roll, gone = Roll("r1", "op", 0, ()), UnitRoll("gone", "c")
    report = asyncio.run(cast("Any", ports(board_of("a")).act(POLICY, roll, gone, 0)))
    assert report == RecoveryReport(RecoveryResult.FAILED, "it is not there; nothing was done")


@pytest.mark.parametrize(
    ("gap_s", "others_s", "slower"),
    [
        (0.04, (0.01, 0.01), 0.75),
        (0.04, (0.01, 0.0), 0.75),
        (0.019, (0.01, 0.01), 0.0),
        (0.0, (0.01,), 0.0),
        (0.04, (0.0,), 0.0),
        (0.04, (), 0.0),
        (0.005, (0.01,), 0.0),
    ],
)
def test_half_as_fast_is_the_least_that_counts(
    gap_s: float, others_s: tuple[float, ...], slower: float
) -> None:
    assert slower_than_cell(gap_s, others_s) == pytest.approx(slower)
