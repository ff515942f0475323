"""What the gate makes of an agent that it cannot hear: the agent, the network or the gate may be at fault."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import pytest

from cellgate.probes.agents import SILENCE_S, AgentLink, is_connected
from cellgate.probes.base import FetchError, Net, Trouble
from cellgate.router.nouns import Evidence, Sign, Strength
from tests.patient import FakePatient, look, reply
from tests.unit.probes.played_agent import DETECTED_S, FATAL, GOOD, HEAD, NEUTRAL, STRONG, Place, play, says


def test_silence_is_a_suspicion_after_three_beats() -> None:
    """And the connection is given up."""

    async def scenario(place: Place) -> None:
        place.listen()
        await asyncio.sleep(2.0)
        place.take()
        place.beats = False
        place.greeting = b""
        began = place.world.loop.time()
        await asyncio.sleep(DETECTED_S)
        assert SILENCE_S - 0.3 < place.found[0].at - began < DETECTED_S
        assert "unreachable: it has sent nothing for 0.8" in place.found[0].reason

    assert play(scenario).weights() == [STRONG]


def test_an_agent_that_is_gone_is_told_once_and_found_again() -> None:
    """While it is gone that is said now and then, but held against nobody; once back it is good news."""

    async def scenario(place: Place) -> None:
        place.listen()
        await asyncio.sleep(1.0)
        place.take()
        place.world.net.kill("node")
        await asyncio.sleep(31.0)
        assert place.take() == [STRONG, NEUTRAL, NEUTRAL]
        place.listen()
        await asyncio.sleep(2.5)
        assert place.take() == [GOOD]
        place.world.net.kill("node")
        await asyncio.sleep(0.5)

    assert play(scenario).weights() == [STRONG]


def test_the_gates_own_exhaustion_is_no_loss_of_the_agents() -> None:
    async def scenario(place: Place) -> None:
        place.listen()
        place.world.net.exhaust_files("gate")
        await asyncio.sleep(5.0)
        assert not is_connected(place.notes)

    play(scenario)


def test_bad_news_told_already_is_no_news_after_a_reconnect() -> None:
    """Canaries may have proven meanwhile that the unit does well without that process."""

    async def scenario(place: Place) -> None:
        place.greeting = HEAD + says("gone")
        place.listen()
        await asyncio.sleep(1.0)
        place.connections[-1].transport.abort()
        await asyncio.sleep(3.0)
        assert len(place.connections) == 2

    assert play(scenario).weights() == [FATAL, STRONG]


def test_reconnects_back_off_to_two_seconds() -> None:
    async def scenario(place: Place) -> None:
        await asyncio.sleep(60.0)
        place.world.trace.note("end")

    place = play(scenario)
    connects = [float(line.split()[0]) for line in place.world.trace.last if " connect " in line]
    gaps = [later - earlier for earlier, later in pairwise(connects)]
    assert gaps[0] < 0.4
    assert 1.7 < min(gaps[5:]) <= max(gaps) < 2.1


def test_the_gates_own_exhaustion_is_held_against_nobody() -> None:
    async def scenario(place: Place) -> None:
        place.listen()
        place.world.net.exhaust_files("gate")
        await asyncio.sleep(5.0)
        assert set(place.take()) == {NEUTRAL}
        place.world.net.heal()
        await asyncio.sleep(3.0)

    assert play(scenario).weights() == [GOOD]


@pytest.mark.parametrize("blocked_s", [0.7, 0.8, 1.0, 5.0])
def test_a_gate_that_stood_still_does_not_blame_the_agent(blocked_s: float) -> None:
    """Once and again."""

    async def scenario(place: Place) -> None:
        place.listen()
        await asyncio.sleep(1.0)
        for _ in range(3):
            place.world.loop.block(blocked_s)
            await asyncio.sleep(2.0)

    assert play(scenario).weights() == [GOOD]


def test_after_a_standstill_the_network_may_need_a_moment_too() -> None:
    """A machine that was paused gets what was sent meanwhile by retransmission."""

    async def scenario(place: Place) -> None:
        place.listen()
        await asyncio.sleep(1.0)
        place.world.net.partition("gate", "node")
        place.world.loop.block(1.0)
        await asyncio.sleep(0.4)
        place.world.net.heal()
        await asyncio.sleep(2.0)

    assert play(scenario).weights() == [GOOD]


@pytest.mark.parametrize("trouble", Trouble)
def test_no_trouble_of_the_connection_is_good_news(trouble: Trouble) -> None:
    """As the laws of probes want it."""

    class Refusing:
        def follow(self, *_: Any, **__: Any) -> AbstractAsyncContextManager[None]:
            raise FetchError(trouble, "so it was said")

    @dataclass
    class Refused(FakePatient):
        @property
        def net(self) -> Net:
            return cast("Net", Refusing())

    patient = Refused(lambda _: reply(200))
    (found,) = look(AgentLink("node:1"), patient)
    assert isinstance(found, Evidence)
    assert (found.source, found.unit, found.at) == ("agent", "u", patient.now_s)
    assert found.sign is (Sign.NEUTRAL if trouble is Trouble.OWN else Sign.BAD)
    assert found.strength < Strength.FATAL
