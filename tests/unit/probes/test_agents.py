"""What the gate makes of an agent: what it reports, when it cannot be heard, and any bytes at all."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.probes.agent_stream import (
    AGENT_PROBE_LINE_BYTES,
    BEATS_PER_S_MAX,
    CONFIRM_S,
    HEARTBEAT,
    AgentLostError,
    AgentStream,
    NotAnAgentError,
)
from cellgate.probes.agents import (
    AGENT_PROBE_NAMES_MAX,
    AGENT_PROBE_TEXT_MAX,
    SILENCE_S,
    AgentLink,
    AgentReport,
    is_connected,
)
from cellgate.probes.base import FetchError, Net, Trouble
from cellgate.probes.runner import Runner, Timers
from cellgate.proxy.http.fetch import Following, UnitNet
from cellgate.proxy.http.reply import HEAD_BYTES
from cellgate.proxy.http.unit import Pool, UnitConnection
from cellgate.router.nouns import Evidence, Node, NodeFacts, Role, Sign, Strength
from tests.patient import Answer, FakePatient, look, reply
from tests.sim.network import Server
from tests.sim.node import chunk
from tests.sim.world import World, run

PORT = 9911
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
BEAT = chunk(HEARTBEAT)
DETECTED_S = SILENCE_S + CONFIRM_S + 0.05
GOOD = (Sign.GOOD, Strength.WEAK)
WEAK = (Sign.BAD, Strength.WEAK)
STRONG = (Sign.BAD, Strength.STRONG)
FATAL = (Sign.BAD, Strength.FATAL)
NEUTRAL = (Sign.NEUTRAL, Strength.WEAK)


def says(state: str, reason: str = "so it is", epoch: str = "e1", open_files: Any = 0.1) -> bytes:
    """A line of the agent's, as it goes over the wire."""
    line = '{"cellgate_agent":1,"state":"%s","reason":"%s","epoch":"%s","processes":[],"open_files":%s}'
    return chunk((line % (state, reason, epoch, open_files)).encode())


class PlayedAgent(asyncio.Protocol):
    """One connection at the agent's end: greets, then beats each 250 ms for as long as it is alive."""

    transport: asyncio.Transport

    def __init__(self, place: Place) -> None:
        self.place = place
        self.request = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.place.connections.append(self)

    def data_received(self, data: bytes) -> None:
        self.request += data
        if self.request.endswith(b"\r\n\r\n"):
            self.transport.write(self.place.greeting)
            self._beat()

    def _beat(self) -> None:
        if self.place.beats and not self.transport.is_closing():
            self.transport.write(BEAT)
        self.place.world.loop.outside(0.25, self._beat)


@dataclass
class Place:
    """Where the link looks: a host with or without an agent, and what the link made of it."""

    world: World
    token: str = ""
    greeting: bytes = HEAD + says("ok")
    beats: bool = True
    connections: list[PlayedAgent] = field(default_factory=list)
    found: list[Evidence] = field(default_factory=list)
    server: Server | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def listen(self) -> None:
        """Start the agent."""
        self.server = self.world.net.listen(lambda: PlayedAgent(self), "node", PORT, is_outside=True)

    def send(self, data: bytes) -> None:
        """Let the agent say something on its last connection."""
        self.connections[-1].transport.write(data)

    def weights(self) -> list[tuple[Sign, Strength]]:
        """What was found, as the judge weighs it."""
        return [(evidence.sign, evidence.strength) for evidence in self.found]

    def take(self) -> list[tuple[Sign, Strength]]:
        """What was found since the last time."""
        weights = self.weights()
        self.found.clear()
        return weights


@dataclass
class LinkPatient(FakePatient):
    """A patient on the loop's time (or `at` one), with a network."""

    ways: Any = None
    at: float | None = None

    def now(self) -> float:
        return asyncio.get_running_loop().time() if self.at is None else self.at

    @property
    def net(self) -> Net:
        return cast("Net", self.ways)


NODE = Node("u-2", Role.FOLLOWER)


def play(scenario: Callable[[Place], Coroutine[Any, Any, None]], **options: Any) -> Place:
    """Run a link through the product's own runner and network while a scenario happens."""
    world = World(3)
    world.net.add_host("node")
    place = Place(world, **options)

    async def main() -> None:
        context = LinkPatient(lambda _: reply(200), node=NODE, notes=place.notes)
        context.ways = UnitNet(world.loop, context.received, connect_timeout_s=3.0, tls=None)
        link = AgentLink(f"node:{PORT}", place.token)
        agenda = Timers(world.loop)
        runner = Runner(link, context, cast("Any", place.found.append), random.Random(1), agenda)
        runner.start()
        await scenario(place)
        runner.stop()

    run(world, main())
    assert {e.source for e in place.found} <= {"agent"}
    assert {e.node for e in place.found} <= {"u-2"}
    return place


@pytest.mark.parametrize("token", ["", "s3cret"])
def test_an_agent_that_is_well_is_one_piece_of_good_news(token: str) -> None:
    """However long it beats, and under whatever names its processes run. A token is shown."""

    async def scenario(place: Place) -> None:
        place.listen()
        await asyncio.sleep(60.0)
        place.send(says("ok", "a process has a title now"))
        await asyncio.sleep(1.0)
        (connection,) = place.connections
        shown = b"\r\nauthorization: Bearer s3cret\r\n" in connection.request
        assert shown is (b"authorization" in connection.request) is bool(token)

    place = play(scenario, token=token)
    assert place.weights() == [GOOD]
    assert (place.found[0].epoch, place.found[0].reason) == ("e1", "so it is")
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


def test_another_process_gone_is_news_but_not_what_was_told_already_after_a_reconnect() -> None:
    """Canaries may have proven meanwhile that the unit does well without that process."""

    async def scenario(place: Place) -> None:
        place.greeting = HEAD + says("gone", "process 7")
        place.listen()
        await asyncio.sleep(1.0)
        place.connections[-1].transport.abort()
        await asyncio.sleep(3.0)
        assert len(place.connections) == 2
        assert place.take() == [FATAL, STRONG]
        place.send(says("gone", "process 7 and 8"))
        await asyncio.sleep(1.0)

    assert play(scenario).weights() == [FATAL]


def test_how_it_stands_with_an_agent_is_known() -> None:
    """The gate's own exhaustion is held against nobody."""

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

    async def exhausted(place: Place) -> None:
        place.listen()
        place.world.net.exhaust_files("gate")
        await asyncio.sleep(5.0)
        assert not is_connected(place.notes)
        assert set(place.take()) == {NEUTRAL}
        place.world.net.heal()
        await asyncio.sleep(3.0)

    play(scenario)
    assert play(exhausted).weights() == [GOOD]


def test_full_file_tables_are_weak_news_once_a_second_and_words_of_a_newer_agent_are_neutral() -> None:
    async def scenario(place: Place) -> None:
        place.greeting = HEAD + says("dreaming", "x" * 5000)
        place.listen()
        await asyncio.sleep(1.0)
        assert len(place.found[0].reason) <= 300
        assert place.take() == [NEUTRAL]
        place.send(says("ok"))
        await asyncio.sleep(1.0)
        place.take()
        for _ in range(50):
            place.send(says("ok", open_files=0.95))
            await asyncio.sleep(0.1)

    place = play(scenario)
    assert place.weights() == [WEAK] * 5
    assert place.found[0].reason == "a process has 95% of its file descriptors in use"


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


def test_reconnects_back_off_to_two_seconds() -> None:
    async def scenario(place: Place) -> None:
        await asyncio.sleep(60.0)
        place.world.trace.note("end")

    trace = play(scenario).world.trace.last
    connects = [float(line.split()[0]) for line in trace if " connect " in line]
    gaps = [later - earlier for earlier, later in pairwise(connects)]
    assert gaps[0] < 0.4
    assert 1.7 < min(gaps[5:]) <= max(gaps) < 2.1


def test_a_gate_that_stood_still_does_not_blame_the_agent() -> None:
    """Once and again. The network may need a moment too: it sends a paused machine again what it missed."""

    async def scenario(place: Place) -> None:
        place.listen()
        await asyncio.sleep(1.0)
        for blocked_s in (0.7, 0.8, 1.0, 5.0) * 2:
            place.world.loop.block(blocked_s)
            await asyncio.sleep(2.0)
        place.world.net.partition("gate", "node")
        place.world.loop.block(1.0)
        await asyncio.sleep(0.4)
        place.world.net.heal()
        await asyncio.sleep(2.0)

    assert play(scenario).weights() == [GOOD]


@pytest.mark.parametrize("trouble", Trouble)
def test_no_trouble_of_the_connection_is_good_news(trouble: Trouble) -> None:
    """As the laws of probes want it."""

    def follow(*_: Any, **__: Any) -> None:
        raise FetchError(trouble, "so it was said")

    patient = LinkPatient(lambda _: reply(200), ways=SimpleNamespace(follow=follow), at=100.0)
    (found,) = look(AgentLink("node:1"), patient)
    assert isinstance(found, Evidence)
    assert (found.source, found.unit, found.at) == ("agent", "u", 100.0)
    assert found.sign is (Sign.NEUTRAL if trouble is Trouble.OWN else Sign.BAD)
    assert found.strength < Strength.FATAL


# The report of an agent, as the gate takes it.

PROBE = AgentReport("node:9911", "s3cret")
REPORTED = Node("u-1", Role.FOLLOWER)


def said(**told: Any) -> Answer:
    return reply(200, orjson.dumps({"cellgate_agent": 1, **told}))


def test_a_report_is_asked_for_with_the_token_and_is_bounded_text() -> None:
    """An older agent is asked rarely."""
    patient = FakePatient(lambda _: said(stack={"image": "sha256:1"}), node=REPORTED)
    assert look(PROBE, patient) == [NodeFacts("u", "u-1", 100.0, {"image": "sha256:1"})]
    assert (patient.asked[0].target, patient.tokens) == ("http://node:9911/report", ["s3cret"])
    assert PROBE.due_at(patient, 100.0) == 130.0
    patient = FakePatient(lambda _: reply(404), node=REPORTED)
    assert look(PROBE, patient) == []
    assert PROBE.due_at(patient, 100.0) == 700.0
    stack: dict[str, Any] = {f"flag --{n}": "x" * 200 for n in range(600)}
    facts = facts_of(said(stack={"image": 7, "driver\n": "1\x1b[0m", **stack}))
    assert facts is not None
    assert facts["driver?"] == "1?[0m"
    assert "image" not in facts
    assert len(facts) <= AGENT_PROBE_NAMES_MAX
    assert max(map(len, facts.values())) == AGENT_PROBE_TEXT_MAX
    assert facts_of(said(stack=["no", "mapping"])) == {}


def facts_of(answer: Answer) -> dict[str, str] | None:
    found = look(PROBE, FakePatient(lambda _: answer, node=REPORTED))
    facts = [finding for finding in found if isinstance(finding, NodeFacts)]
    assert len(facts) == len(found)
    return dict(facts[0].stack) if facts else None


@pytest.mark.parametrize(
    "answer", [*Trouble, reply(503), reply(401), reply(200, b"<html>"), reply(200, b"[]"), reply(200, b"{}")]
)
def test_an_agent_that_does_not_report_is_no_finding(answer: Answer) -> None:
    assert facts_of(answer) is None


NO_AGENT = "not a cellgate agent: it "


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno", NO_AGENT + "answered GET /watch with"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "not a cellgate agent: its reply to GET"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not a cellgate agent: its reply does not parse: Expected HTTP/"),
        (HEAD + chunk(b"<html>"), NO_AGENT + "sent '<html>'"),
        (HEAD + chunk(b'{"state":"ok"}'), NO_AGENT + 'sent \'{"state":"ok"}\''),
        (HEAD + chunk(b'{"cellgate_agent":2}'), "not a cellgate agent"),
        (HEAD + b"zz\r\n", "not a cellgate agent"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * HEAD_BYTES, "not a cellgate agent: the head of its reply"),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", "requires a token: set CELLGATE_AGENT_TOKEN for this gate"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "accepts no more connections"),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", "does not accept the token of this gate"),
    ],
)
def test_another_program_is_told_from_an_agent(answer: bytes, said: str) -> None:
    """Neutral, in plain words, and not asked again for half a minute. A wrong token is told from none."""

    async def scenario(place: Place) -> None:
        place.greeting, place.beats = answer, False
        place.listen()
        await asyncio.sleep(29.0)

    place = play(scenario, token="old" if "of this gate" in said else "")
    assert place.weights() == [NEUTRAL]
    assert said in place.found[0].reason
    assert f"node:{PORT}" in place.found[0].reason
    assert place.found[0].reason.isprintable()


@pytest.mark.parametrize(
    "garbage",
    [
        b"5\r\nhello\r\n",
        b"6\r\nhello\n\r\n",
        b"2\r\n{}XX",
        b"-1\r\n",
        b"0\r\n\r\n",
        b"1;ext=1\r\n\n\r\n",
        b"%x\r\n" % (AGENT_PROBE_LINE_BYTES + 1),
        (b"1000\r\n" + b"x" * 4096 + b"\r\n") * 17,
        b"x" * 10,
        b"3\r\n\xff\xfe\n\r\n",
        says("ok") * 101,
    ],
)
def test_an_agent_that_breaks_is_lost_and_tried_again(garbage: bytes) -> None:
    async def scenario(place: Place) -> None:
        place.listen()
        await asyncio.sleep(1.0)
        place.take()
        place.send(garbage)
        place.beats = garbage != b"5\r\nhello\r\n"
        await asyncio.sleep(2.5)
        assert len(place.connections) > 1

    assert play(scenario).weights()[0] == STRONG


class Wire(asyncio.Transport):
    """A transport that only notes its end."""

    aborted = False

    def write(self, data: object) -> None:
        pass

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


pieces = st.sampled_from(
    [HEAD, BEAT, says("ok"), says("gone"), b"\r\n", b"0\r\n\r\n", HEAD[:20]]
) | st.binary(max_size=40)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(pieces, max_size=8), st.integers(1, 64))
def test_any_bytes_end_in_messages_or_a_plain_ending(parts: list[bytes], size: int) -> None:
    """However they are cut."""

    async def main() -> None:
        stream = AgentStream(lambda: None, SILENCE_S)
        with heard_by(stream) as conn:
            data = b"".join(parts)
            for start in range(0, len(data), size):
                if conn.usable:
                    conn.data_received(data[start : start + size])
            conn.connection_lost(None)
        assert str(await ending(stream)).isprintable()
        stream.close()

    run(World(1), main())


@contextmanager
def heard_by(stream: AgentStream) -> Iterator[UnitConnection]:
    """A connection to an agent that has been asked, and is followed by `stream`."""
    pool = Pool("http://node:1", asyncio.get_running_loop(), connect_timeout_s=1.0, tls=None)
    following = Following(asyncio.get_running_loop(), pool, b"", stream)
    conn = UnitConnection(pool)
    conn.connection_made(Wire())
    following.on_connected(conn)
    yield conn
    following.close()


async def ending(stream: AgentStream) -> Exception:
    try:
        async for message in stream:
            assert message.state in ("ok", "gone")
    except (AgentLostError, NotAnAgentError) as error:
        return error
    raise AssertionError("it ended without saying why")


async def test_heard_is_called_for_each_line() -> None:
    heard: list[int] = []
    stream = AgentStream(lambda: heard.append(1), SILENCE_S)
    with heard_by(stream) as conn:
        conn.data_received(HEAD + says("ok"))
        for data in (BEAT, BEAT + BEAT, BEAT[:7], BEAT[7:]):
            conn.data_received(data)
    stream.close()
    assert len(heard) == 5


@pytest.mark.parametrize("at_once", [1, 100])
async def test_an_agent_that_floods_with_heartbeats_is_lost(at_once: int) -> None:
    stream, beats = AgentStream(lambda: None, SILENCE_S), 0
    stream.on_body(b'{"cellgate_agent":1,"state":"ok"}\n')
    while stream._ending is None:
        stream.on_body((HEARTBEAT + b"\n") * at_once)
        beats += at_once
    stream.close()
    assert BEATS_PER_S_MAX < beats <= BEATS_PER_S_MAX + at_once
    assert "heartbeats" in str(stream._ending)
