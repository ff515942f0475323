"""What a roll keeps out of rotation, and what operators have drained or undrain meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cellgate.proxy.config.action_settings import SetImage
from cellgate.proxy.extras.operator.plan import RecoveryReport, RecoveryResult
from cellgate.proxy.extras.operator.roll_plan import OrderError, Phase
from cellgate.router.nouns import Fleet
from tests.unit.operator.site import DONE, POLICY, Site


async def failing(units: str) -> Site:
    """A place where the roll of the first of these units has failed; it does not get its old software."""
    site = Site(units)
    one, _ = site.gates
    one.report = RecoveryReport(RecoveryResult.FAILED, "it exited with 3")
    one.roller._policy = replace(POLICY, undo=None)
    await one.order("start")
    while Phase.FAILED not in one.phases():
        await site.wait(1)
    await site.wait(1)
    return site


async def test_a_unit_that_comes_back_at_another_address_stays_out_until_it_has_proven_itself() -> None:
    site = Site("a")
    one, other = site.gates
    one.restarts = False
    await one.order("start")
    while one.phases() != [Phase.PROVING]:
        await site.wait(1)
    site.move("a")
    await site.wait(1)
    assert one.drained == other.drained == {"a"}
    site.renewed_ms["a"] = site.store.clock_ms()
    await site.wait(1)
    assert one.phases() == [Phase.SOAKING]
    await site.wait(1)
    assert one.drained == other.drained == set()


async def test_a_unit_that_has_failed_stays_out_at_another_address_until_an_operator_undrains_it() -> None:
    site = await failing("a")
    one, other = site.gates
    site.move("a")
    await site.wait(1)
    assert one.drained == other.drained == {"a"}
    one.drain("a", False)
    await site.wait(5)
    assert (one.drained, other.drained) == (set(), {"a"})
    await one.order("undo")
    await site.wait(1)
    assert one.drained == other.drained == {"a"}


async def test_a_unit_that_was_found_while_it_is_rolled_is_out_too() -> None:
    site = Site("a")
    one, other = site.gates
    other.board.configure(Fleet(), site.now)
    await one.order("start")
    await site.wait(2)
    site.move("a")
    await site.wait(1)
    assert other.drained == {"a"}


async def test_what_an_operator_has_drained_stays_drained_after_it_was_rolled() -> None:
    site = Site("a")
    one, other = site.gates
    other.drain("a", True)
    await one.order("start")
    await site.wait(2)
    assert one.drained == other.drained == {"a"}
    site.move("a")
    await site.wait(20)
    assert one.phases() == [Phase.DONE]
    assert (one.drained, other.drained) == (set(), {"a"})


async def test_a_gate_that_begins_during_a_roll_with_the_drains_of_its_predecessor_undrains_the_unit() -> (
    None
):
    site = Site("a")
    one, other = site.gates
    other.is_alive = False
    await one.order("start")
    await site.wait(2)
    other.drain("a", True)
    other.is_alive = True
    await site.wait(20)
    assert one.phases() == [Phase.DONE]
    assert one.drained == other.drained == set()


async def test_a_gate_that_has_missed_how_the_next_roll_began_drains_the_unit_for_it() -> None:
    site = await failing("a")
    one, other = site.gates
    other.drain("a", False)
    await one.order("start")
    await site.wait(2)
    assert one.phases() == other.phases() == [Phase.DRAINING]
    assert one.drained == other.drained == {"a"}


async def test_a_unit_that_has_failed_gets_no_requests_by_the_start_of_another_roll_and_is_its_first() -> (
    None
):
    site = await failing("ab")
    one, other = site.gates
    one.report, one.ends = DONE, False
    site.commands.clear()
    await one.order("start")
    for _ in range(5):
        await site.wait(1)
        assert one.drained == other.drained == {"a"}
    assert [unit for _, unit in site.commands] == ["a"]
    assert one.phases() == [Phase.ACTING, Phase.WAITING]
    await one.roller.close()


@pytest.mark.parametrize("asked", [{"cells": ("d",)}, {"dry_run": True}], ids=["another cell", "dry run"])
async def test_a_unit_that_has_failed_and_is_not_rolled_stays_out(asked: dict[str, Any]) -> None:
    site = await failing("ab")
    one, other = site.gates
    one.report = DONE
    site.cells["b"] = "d"
    await one.order("start", **asked)
    await site.wait(30)
    assert one.drained == other.drained == {"a"}
    assert one.phases() == [Phase.WAITING, Phase.FAILED]
    assert one.roller.roll is not None
    assert one.roller.roll.reason == "unit b waits: a out of rotation, max_unavailable 1"
    one.drain("a", False)
    await site.wait(30)
    assert one.phases() == [Phase.DONE, Phase.FAILED]


async def test_a_unit_that_has_failed_and_is_gone_is_out_when_it_comes_back_during_another_roll() -> None:
    site = await failing("ab")
    one, other = site.gates
    one.report = DONE
    del site.cells["a"], site.renewed_ms["a"]
    place = site.places.pop("a")
    for gate in site.gates:
        gate.board.configure(Fleet(units=tuple(site.fleet())), site.now)
    await one.order("start")
    await site.wait(20)
    assert one.phases() == [Phase.DONE, Phase.FAILED]
    site.places["a"], site.cells["a"] = place, "c"
    site.move("a")
    assert one.drained == other.drained == {"a"}


async def test_a_unit_that_has_failed_and_was_undrained_is_rolled_like_any_other() -> None:
    site = await failing("ba")
    one, other = site.gates
    one.report = DONE
    for gate in site.gates:
        gate.drain("b", False)
    await one.order("start")
    await site.wait(1)
    assert one.phases() == [Phase.DRAINING, Phase.WAITING]
    await site.wait(30)
    assert one.phases() == [Phase.DONE, Phase.DONE]
    assert one.drained == other.drained == set()


async def test_groups_that_are_taken_in_a_fixed_order_are_not_rolled_over_one_that_failed() -> None:
    site = await failing("ab")
    one, _ = site.gates
    one.roller._policy = replace(POLICY, action=SetImage("new"))
    with pytest.raises(OrderError, match="unit a failed in the last roll and is still out: groups of a set"):
        await one.order("start")
    one.drain("a", False)
    await one.order("start")
