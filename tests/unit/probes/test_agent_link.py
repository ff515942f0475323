"""The gate's side of the agent, in virtual time against an agent that is played by hand."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.probes.agent import HEARTBEAT, chunk
from cellgate.probes.agent_link import SILENCE_S, AgentLink, agent_state
from cellgate.probes.agent_stream import CONFIRM_S, LINE_BYTES, AgentLostError, AgentStream, NotAnAgentError
from cellgate.probes.base import FetchError, Net, Trouble
from cellgate.probes.runner import Runner
from cellgate.proxy.wire.follow import Following
from cellgate.proxy.wire.net import UnitNet
from cellgate.proxy.wire.pool import Pool
from cellgate.proxy.wire.reply_reader import HEAD_BYTES
from cellgate.proxy.wire.upstream import UnitConnection
from cellgate.router.nouns import Evidence, Node, Role, Sign, Strength
from tests.patient import FakePatient, look, reply
from tests.sim.network import Server
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

    def __init__(self, place: Place) -> None:
        self.place = place
        self.transport: asyncio.Transport
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
    """A patient on the loop's time, with a network."""

    ways: Any = None

    def now(self) -> float:
        return asyncio.get_running_loop().time()

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
        context.ways = UnitNet(world.loop, context.heard, connect_timeout_s=3.0, tls=None)
        link = AgentLink(f"node:{PORT}", place.token)
        runner = Runner(link, context, cast("Any", place.found.append), random.Random(1))
        task = asyncio.create_task(runner.run())
        await scenario(place)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])

    run(world, main())
    assert {e.source for e in place.found} <= {"agent"}
    assert {e.node for e in place.found} <= {"u-2"}
    return place


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
        assert "unreachable: not heard for 0.8" in place.found[0].reason

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


def test_how_it_stands_with_an_agent_is_known() -> None:
    async def scenario(place: Place) -> None:
        assert agent_state(place.notes) == (False, 0)
        place.listen()
        await asyncio.sleep(1.0)
        assert agent_state(place.notes) == (True, 0)
        place.connections[-1].transport.abort()
        await asyncio.sleep(0.01)
        assert agent_state(place.notes) == (False, 1)
        await asyncio.sleep(1.0)
        assert agent_state(place.notes) == (True, 1)
        place.world.net.kill("node")
        await asyncio.sleep(5.0)
        connected, losses = agent_state(place.notes)
        assert not connected
        assert 4 <= losses <= 6
        place.greeting = b"HTTP/1.1 401 Unauthorized\r\n\r\n"
        place.listen()
        await asyncio.sleep(5.0)
        assert agent_state(place.notes) == (False, losses + 1)

    play(scenario)


def test_the_gates_own_exhaustion_is_no_loss_of_the_agents() -> None:
    async def scenario(place: Place) -> None:
        place.listen()
        place.world.net.exhaust_files("gate")
        await asyncio.sleep(5.0)
        assert agent_state(place.notes) == (False, 0)

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
    assert place.found[0].reason == "a process has 95% of the files open that it may have"


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


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno",
            "not a cellgate agent: to GET /watch it said",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "not a cellgate agent: its reply to GET"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not a cellgate agent: its reply does not parse: Expected HTTP/"),
        (HEAD + chunk(b"<html>"), "not a cellgate agent: it said '<html>'"),
        (HEAD + chunk(b'{"state":"ok"}'), 'not a cellgate agent: it said \'{"state":"ok"}\''),
        (HEAD + chunk(b'{"cellgate_agent":2}'), "not a cellgate agent"),
        (HEAD + b"zz\r\n", "not a cellgate agent"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * HEAD_BYTES, "not a cellgate agent: the head of its reply"),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", "wants a token: give this gate the agent's"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "takes no more watchers"),
    ],
)
def test_another_program_is_told_from_an_agent(answer: bytes, said: str) -> None:
    """Neutral, in plain words, and not asked again for half a minute."""

    async def scenario(place: Place) -> None:
        place.greeting, place.beats = answer, False
        place.listen()
        await asyncio.sleep(29.0)

    place = play(scenario)
    assert place.weights() == [NEUTRAL]
    assert said in place.found[0].reason
    assert f"node:{PORT}" in place.found[0].reason
    assert place.found[0].reason.isprintable()


def test_a_wrong_token_is_told_from_none() -> None:
    async def scenario(place: Place) -> None:
        place.greeting = b"HTTP/1.1 401 Unauthorized\r\n\r\n"
        place.listen()
        await asyncio.sleep(1.0)

    assert "does not accept the token of this gate" in play(scenario, token="old").found[0].reason


@pytest.mark.parametrize(
    "garbage",
    [
        b"5\r\nhello\r\n",
        b"6\r\nhello\n\r\n",
        b"2\r\n{}XX",
        b"-1\r\n",
        b"0\r\n\r\n",
        b"1;ext=1\r\n\n\r\n",
        b"%x\r\n" % (LINE_BYTES + 1),
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


def test_words_of_a_newer_agent_are_neutral() -> None:
    async def scenario(place: Place) -> None:
        place.greeting = HEAD + says("dreaming", "x" * 5000)
        place.listen()
        await asyncio.sleep(1.0)

    place = play(scenario)
    assert place.weights() == [NEUTRAL]
    assert len(place.found[0].reason) <= 300


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


def test_the_first_look_waits_for_nothing() -> None:
    link, context = AgentLink("node:1"), FakePatient(lambda _: reply(200))
    assert link.due_at(context, -math.inf) == -math.inf
    assert context.now_s < link.due_at(context, context.now_s) < math.inf
    assert link.limit_s(context) == math.inf


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


@settings(derandomize=True, deadline=None, max_examples=200)
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

    asyncio.run(main())


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


def test_heard_is_called_for_each_line() -> None:
    heard: list[int] = []

    async def main() -> None:
        stream = AgentStream(lambda: heard.append(1), SILENCE_S)
        with heard_by(stream) as conn:
            conn.data_received(HEAD + says("ok"))
            for data in (BEAT, BEAT + BEAT, BEAT[:7], BEAT[7:]):
                conn.data_received(data)
        stream.close()

    asyncio.run(main())
    assert len(heard) == 5
