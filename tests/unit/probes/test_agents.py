"""What the gate makes of an agent: what it reports, and when it cannot be heard."""

from __future__ import annotations

import asyncio
import math
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import orjson
import pytest

from cellgate.probes.agents import NAMES_MAX, SILENCE_S, TEXT_MAX, AgentLink, AgentReport, is_connected
from cellgate.probes.base import FetchError, Net, Trouble
from cellgate.router.nouns import Evidence, Node, NodeFacts, Role, Sign, Strength
from tests.patient import Answer, FakePatient, look, reply
from tests.unit.probes.played_agent import (
    DETECTED_S,
    FATAL,
    GOOD,
    HEAD,
    NEUTRAL,
    STRONG,
    WEAK,
    Place,
    play,
    says,
)


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


# What the gate makes of an agent that it cannot hear: the agent, the network or the gate may be at fault.


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


# The report of an agent, as the gate takes it.

PROBE = AgentReport("node:9911", "s3cret")
NODE = Node("u-1", Role.FOLLOWER)


def said(**told: Any) -> Answer:
    return reply(200, orjson.dumps({"cellgate_agent": 1, **told}))


def facts_of(answer: Answer) -> NodeFacts | None:
    found = look(PROBE, FakePatient(lambda _: answer, node=NODE))
    assert all(isinstance(finding, NodeFacts) for finding in found)
    return found[0] if found else None  # type: ignore[return-value]


def test_a_report_is_asked_for_with_the_token() -> None:
    patient = FakePatient(lambda _: said(stack={"image": "sha256:1"}), node=NODE)
    found = look(PROBE, patient)
    assert found == [NodeFacts("u", "u-1", 100.0, {"image": "sha256:1"})]
    assert (patient.asked[0].target, patient.tokens) == ("http://node:9911/report", ["s3cret"])
    assert PROBE.due_at(patient, 100.0) == 130.0


@pytest.mark.parametrize(
    "answer", [*Trouble, reply(503), reply(401), reply(200, b"<html>"), reply(200, b"[]"), reply(200, b"{}")]
)
def test_an_agent_that_does_not_report_is_no_finding(answer: Answer) -> None:
    assert facts_of(answer) is None


def test_an_older_agent_is_asked_rarely() -> None:
    patient = FakePatient(lambda _: reply(404), node=NODE)
    assert look(PROBE, patient) == []
    assert PROBE.due_at(patient, 100.0) == 700.0


def test_a_report_of_any_kind_is_bounded_text() -> None:
    stack: dict[str, Any] = {f"flag --{n}": "x" * 200 for n in range(600)}
    facts = facts_of(said(stack={"image": 7, "driver\n": "1\x1b[0m", **stack}))
    assert facts is not None
    assert facts.stack["driver?"] == "1?[0m"
    assert "image" not in facts.stack
    assert len(facts.stack) <= NAMES_MAX
    assert max(len(value) for value in facts.stack.values()) == TEXT_MAX
    odd = facts_of(said(stack=["no", "mapping"]))
    assert odd is not None
    assert odd.stack == {}
