"""How many units a gate asks for, right after one has gone; and what a tick computes."""

from __future__ import annotations

import pytest

from cellgate.extras.scaling import demand as demand_of_pools
from cellgate.extras.scaling.demand import Demand, replay_s
from cellgate.extras.scaling.pool_signals import Scaling
from cellgate.proxy.control.last_requests import LastRequests
from cellgate.router.nouns import Unit
from cellgate.router.queue import FairRules, Queue
from tests.unit.router.fleets import board_up


@pytest.mark.parametrize(("units", "desired"), [(4, 3), (2, 1)])
async def test_one_unit_fewer_is_asked_for_once_and_the_last_one_stays(units: int, desired: int) -> None:
    """Of usable units that have little to do."""
    names = [f"u{n}" for n in range(units)]
    board = board_up(*(Unit(name, "c", f"http://{name}") for name in names), at=1.0)
    lately = LastRequests()
    scaling = Scaling(board, Queue(FairRules()), lately)
    for at in range(60):
        lately.answered.append((float(at), at + 0.1, at + 0.5, 10, names[at % units]))
    for at in range(240, 247):
        scaling.tick(at / 4)
    assert (await scaling.view(2.0))["pools"][0]["desired_units"] == desired
    board.drain("u0", drained=True)
    (found,) = (await scaling.view(2.0))["pools"]
    assert found["desired_units"] == desired
    assert found["wait_p90_s"]["fewer"] is None
    assert found["wait_p90_s"]["now"] is not None


def test_a_tick_replays_what_was_answered_once_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """All replays in one tick would hold the loop for 13 ms."""
    names, replays = ("a", "b", "c"), 0

    def counted(demand: Demand, units: int) -> float:
        nonlocal replays
        replays += 1
        return replay_s(demand, units)

    monkeypatch.setattr(demand_of_pools, "replay_s", counted)
    lately, board = LastRequests(), board_up(*(Unit(name, "c", f"http://{name}") for name in names), at=1.0)
    scaling = Scaling(board, Queue(FairRules()), lately)
    lately.answered.extend((float(at), at + 0.1, at + 0.5, 10, names[at % 3]) for at in range(60))
    each = []
    for at in range(240, 250):
        before = replays
        scaling.tick(at / 4)
        each.append(replays - before)
    assert (max(each), sum(each)) == (1, 3)
