"""Rolling at gates: a step is written before it is done, and gates that share a roll go on with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from cellgate.proxy.extras.operator.plan import RecoveryReport, RecoveryResult
from cellgate.proxy.extras.operator.roll_plan import OrderError, Phase, RollStatus
from cellgate.proxy.extras.operator.roller import WRITE_AGAIN_MS
from tests.unit.operator.site import POLICY, Site


async def test_all_units_are_rolled_and_both_gates_keep_the_unit_of_the_moment_out() -> None:
    site = Site()
    one, other = site.gates
    await other.order("start")
    await site.wait(2)
    assert one.drained == other.drained == {"a"}
    await site.wait(20)
    assert site.commands == [("g1", "a"), ("g1", "b")]
    assert one.drained == other.drained == set()
    assert other.roller.roll is not None
    assert other.roller.roll.status is RollStatus.DONE
    assert [entry["step"] for entry in one.entries] == ["begin", "end"] * 2


async def test_when_the_conductor_dies_another_goes_on_and_repeats_no_command() -> None:
    site = Site()
    one, _ = site.gates
    await one.order("start")
    while not site.commands:
        await site.wait(1)
    one.is_alive = False
    site.store.leader = "g2"
    await site.wait(60)
    assert site.commands == [("g1", "a"), ("g2", "b")]


async def test_a_step_that_cannot_be_written_is_not_done() -> None:
    site = Site()
    one, _ = site.gates
    await one.order("start")
    await site.wait(1)
    site.store.is_refusing = True
    await site.wait(60)
    assert site.commands == []
    site.store.is_refusing = False
    await site.wait(3)
    assert site.commands == [("g1", "a")]


async def test_a_unit_without_an_audit_log_gets_no_command() -> None:
    site = Site()
    one, _ = site.gates

    async def full(_path: str, _entry: Mapping[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    one.roller._ports = replace(one.roller._ports, record=full)
    await one.order("start")
    await site.wait(10)
    assert site.commands == []
    assert one.roller.roll is not None
    assert "No space left on device; nothing was done" in one.roller.roll.reason


async def test_orders_that_make_no_sense_are_refused_at_once() -> None:
    site = Site()
    one, _ = site.gates
    for verb in ("pause", "resume", "stop", "undo"):
        with pytest.raises(OrderError, match="there is no roll: start one"):
            await one.order(verb)
    with pytest.raises(OrderError, match="there is no cell 'x'; the cells are: c"):
        await one.order("start", cells=("x",))
    await one.order("start")
    await site.wait(2)
    with pytest.raises(OrderError, match="a roll is under way"):
        await one.order("start")


async def test_paused_resumed_and_undone() -> None:
    site = Site()
    one, _ = site.gates
    await one.order("start")
    await site.wait(1)
    await one.order("pause")
    await site.wait(30)
    assert one.phases() == [Phase.DONE, Phase.WAITING]
    await one.order("resume")
    await site.wait(30)
    assert one.phases() == [Phase.DONE, Phase.DONE]
    await one.order("undo")
    await site.wait(30)
    assert [unit for _, unit in site.commands] == ["a", "b", "b", "a"]
    assert one.roller.roll is not None
    assert one.roller.roll.status is RollStatus.DONE


async def test_an_order_survives_the_gate_that_read_it_and_is_carried_out_once() -> None:
    site = Site("a")
    one, other = site.gates
    await one.order("start")
    order = await site.store.asked()
    assert order is not None
    site.store.is_refusing = True
    await site.wait(2)
    one.is_alive, site.store.is_refusing, site.store.leader = False, False, "g2"
    await site.wait(20)
    assert site.commands == [("g2", "a")]
    assert other.phases() == [Phase.DONE]
    # Its gate wrote the roll down and died before it took the order off the list.
    await site.store.ask(order)
    await site.wait(20)
    assert await site.store.asked() is None
    assert site.commands == [("g2", "a")]
    assert [action.kind for action in other.told if action.kind == "roll_failed"] == []


async def test_a_fault_of_the_gate_fails_the_unit_at_once() -> None:
    site = Site("a")
    one, _ = site.gates
    one.fault = KeyError("a")
    one.roller._policy = replace(POLICY, undo=None)
    await one.order("start")
    await site.wait(5)
    assert one.roller.roll is not None
    assert one.roller.roll.reason == "unit a: its command failed: the gate's own fault: KeyError('a')"
    assert one.entries[-1]["result"] == "failed"


async def test_the_end_of_an_earlier_command_is_not_taken_for_that_of_another_gate() -> None:
    site = Site("a")
    one, other = site.gates
    await one.order("start")
    await site.wait(20)
    assert one.phases() == [Phase.DONE]
    site.store.leader, other.ends = "g2", False
    await other.order("undo")
    await site.wait(5)
    assert one.phases() == other.phases() == [Phase.ACTING]
    site.store.leader = "g1"
    await site.wait(5)
    assert one.phases() == [Phase.ACTING]
    await other.roller.close()


async def test_a_roll_is_written_again_while_it_goes_on_or_keeps_a_unit_out() -> None:
    site = Site("a")
    one, _ = site.gates
    one.report = RecoveryReport(RecoveryResult.FAILED, "it exited with 3")
    one.roller._policy = replace(POLICY, undo=None)
    await one.order("start")
    await site.wait(1)
    await one.order("pause")
    while one.phases() != [Phase.FAILED]:
        await site.wait(1)
    for is_drained in (True, False):
        site.store.written = 0
        one.drain("a", is_drained)
        for _ in range(5):
            site.now += WRITE_AGAIN_MS / 1000
            await site.wait(2)
        assert site.store.written == (5 if is_drained else 0)
