"""What a roll keeps out of rotation, and what operators have drained or undrain meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from cellgate.proxy.recovery.nouns import RecoveryReport, RecoveryResult
from cellgate.proxy.rolling.nouns import Phase
from cellgate.router.nouns import Fleet
from tests.unit.rolling.site import POLICY, Site


def test_a_unit_that_comes_back_at_another_address_stays_out_until_it_has_proven_itself() -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_a_unit_that_has_failed_stays_out_at_another_address_until_an_operator_undrains_it() -> None:
    async def scenario() -> None:
        site = Site("a")
        one, other = site.gates
        one.report = RecoveryReport(RecoveryResult.FAILED, "it exited with 3")
        one.roller._policy = replace(POLICY, undo=None)
        await one.order("start")
        while one.phases() != [Phase.FAILED]:
            await site.wait(1)
        site.move("a")
        await site.wait(1)
        assert one.drained == other.drained == {"a"}
        one.drain("a", False)
        await site.wait(5)
        assert (one.drained, other.drained) == (set(), {"a"})
        await one.order("undo")
        await site.wait(1)
        assert one.drained == other.drained == {"a"}

    asyncio.run(scenario())


def test_a_unit_that_was_found_while_it_is_rolled_is_out_too() -> None:
    async def scenario() -> None:
        site = Site("a")
        one, other = site.gates
        other.board.configure(Fleet(), site.now)
        await one.order("start")
        await site.wait(2)
        site.move("a")
        await site.wait(1)
        assert other.drained == {"a"}

    asyncio.run(scenario())


def test_what_an_operator_has_drained_stays_drained_after_it_was_rolled() -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_a_gate_that_begins_during_a_roll_with_the_drains_of_its_predecessor_undrains_the_unit() -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_a_gate_that_has_missed_how_the_next_roll_began_drains_the_unit_for_it() -> None:
    async def scenario() -> None:
        site = Site("a")
        one, other = site.gates
        one.report = RecoveryReport(RecoveryResult.FAILED, "it exited with 3")
        one.roller._policy = replace(POLICY, undo=None)
        await one.order("start")
        while one.phases() != [Phase.FAILED]:
            await site.wait(1)
        await site.wait(1)
        other.drain("a", False)
        await one.order("start")
        await site.wait(2)
        assert one.phases() == other.phases() == [Phase.DRAINING]
        assert one.drained == other.drained == {"a"}

    asyncio.run(scenario())
