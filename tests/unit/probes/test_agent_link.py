"""What the gate makes of what an agent reports."""

from __future__ import annotations

import asyncio
import math

import pytest

from cellgate.probes.agents import AgentLink, is_connected
from cellgate.router.nouns import Sign, Strength
from tests.patient import FakePatient, reply
from tests.unit.probes.played_agent import FATAL, GOOD, HEAD, NEUTRAL, STRONG, WEAK, Place, play, says


def test_an_agent_that_is_well_is_one_piece_of_good_news() -> None:
    """However long it beats, and under whatever names its processes run."""

    async def scenario(place: Place) -> None:
        place.listen()
        await asyncio.sleep(60.0)
        place.send(says("ok", "a process has a title now"))
        await asyncio.sleep(1.0)
        assert len(place.connections) == 1
        assert b"authorization" not in place.connections[0].request

    place = play(scenario)
    assert place.weights() == [GOOD]
    assert (place.found[0].epoch, place.found[0].reason) == ("e1", "so it is")


def test_the_token_is_shown() -> None:
    async def scenario(place: Place) -> None:
        place.listen()
        await asyncio.sleep(1.0)
        assert b"\r\nauthorization: Bearer s3cret\r\n" in place.connections[0].request

    play(scenario, token="s3cret")
    assert "s3cret" not in repr(AgentLink("node:1", "s3cret"))


@pytest.mark.parametrize(
    ("state", "weight"),
    [("gone", FATAL), ("zombie", FATAL), ("stopped", FATAL), ("blocked", STRONG), ("absent", NEUTRAL)],
)
def test_what_happens_to_a_process_is_told_at_once(state: str, weight: tuple[Sign, Strength]) -> None:
    """Once; without an epoch, which would count before the news does; and the way back is told as well."""

    async def scenario(place: Place) -> None:
        place.listen()
        await asyncio.sleep(1.0)
        place.take()
        place.send(says(state))
        await asyncio.sleep(0.1)
        assert [e.epoch for e in place.found] == [None]
        place.send(says(state))
        await asyncio.sleep(2.0)
        assert place.take() == [weight]
        place.send(says("ok", epoch="e2"))
        await asyncio.sleep(0.1)
        assert [e.epoch for e in place.found] == ["e2"]

    assert play(scenario).weights() == [GOOD]


def test_another_process_gone_is_news() -> None:
    async def scenario(place: Place) -> None:
        place.listen()
        place.greeting = HEAD + says("gone", "process 7")
        await asyncio.sleep(1.0)
        place.send(says("gone", "process 7 and 8"))
        await asyncio.sleep(1.0)

    assert play(scenario).weights() == [FATAL, FATAL]


def test_how_it_stands_with_an_agent_is_known() -> None:
    async def scenario(place: Place) -> None:
        assert not is_connected(place.notes)
        place.listen()
        await asyncio.sleep(1.0)
        assert is_connected(place.notes)
        place.connections[-1].transport.abort()
        await asyncio.sleep(0.01)
        assert not is_connected(place.notes)
        await asyncio.sleep(1.0)
        assert is_connected(place.notes)
        place.world.net.kill("node")
        await asyncio.sleep(5.0)
        assert not is_connected(place.notes)
        place.greeting = b"HTTP/1.1 401 Unauthorized\r\n\r\n"
        place.listen()
        await asyncio.sleep(5.0)
        assert not is_connected(place.notes)

    play(scenario)


def test_full_file_tables_are_weak_news_once_a_second() -> None:
    async def scenario(place: Place) -> None:
        place.listen()
        await asyncio.sleep(1.0)
        place.take()
        for _ in range(50):
            place.send(says("ok", open_files=0.95))
            await asyncio.sleep(0.1)

    place = play(scenario)
    assert place.weights() == [WEAK] * 5
    assert place.found[0].reason == "a process has 95% of its file descriptors in use"


def test_words_of_a_newer_agent_are_neutral() -> None:
    async def scenario(place: Place) -> None:
        place.greeting = HEAD + says("dreaming", "x" * 5000)
        place.listen()
        await asyncio.sleep(1.0)

    place = play(scenario)
    assert place.weights() == [NEUTRAL]
    assert len(place.found[0].reason) <= 300


def test_the_first_look_waits_for_nothing() -> None:
    link, context = AgentLink("node:1"), FakePatient(lambda _: reply(200))
    assert link.due_at(context, -math.inf) == -math.inf
    assert context.now_s < link.due_at(context, context.now_s) < math.inf
    assert link.limit_s(context) == math.inf
