"""What arrives from an agent's address as bytes: other programs, broken agents, anything at all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.probes.agent import HEARTBEAT, chunk
from cellgate.probes.agents import (
    BEATS_PER_S_MAX,
    LINE_BYTES,
    SILENCE_S,
    AgentLostError,
    AgentStream,
    NotAnAgentError,
)
from cellgate.proxy.http.fetch import Following
from cellgate.proxy.http.reply import HEAD_BYTES
from cellgate.proxy.http.unit import Pool, UnitConnection
from tests.unit.probes.played_agent import BEAT, HEAD, NEUTRAL, PORT, STRONG, Place, play, says


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno",
            "not a cellgate agent: it answered GET /watch with",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "not a cellgate agent: its reply to GET"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not a cellgate agent: its reply does not parse: Expected HTTP/"),
        (HEAD + chunk(b"<html>"), "not a cellgate agent: it sent '<html>'"),
        (HEAD + chunk(b'{"state":"ok"}'), 'not a cellgate agent: it sent \'{"state":"ok"}\''),
        (HEAD + chunk(b'{"cellgate_agent":2}'), "not a cellgate agent"),
        (HEAD + b"zz\r\n", "not a cellgate agent"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * HEAD_BYTES, "not a cellgate agent: the head of its reply"),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", "requires a token: set CELLGATE_AGENT_TOKEN for this gate"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "accepts no more connections"),
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
def test_an_agent_that_floods_with_heartbeats_is_lost(at_once: int) -> None:
    async def scenario() -> tuple[int, str]:
        heard: list[None] = []
        stream = AgentStream(lambda: heard.append(None), SILENCE_S)
        stream.on_body(b'{"cellgate_agent":1,"state":"ok"}\n')
        beats = 0
        while stream._ending is None:
            stream.on_body((HEARTBEAT + b"\n") * at_once)
            beats += at_once
        stream.close()
        return beats, str(stream._ending)

    beats, why = asyncio.run(scenario())
    assert BEATS_PER_S_MAX < beats <= BEATS_PER_S_MAX + at_once
    assert "heartbeats" in why
