"""The load tools' client on real sockets: what it keeps, and how it says that a reply did not come."""

from __future__ import annotations

import asyncio

import pytest

from loadtests.wire.blocking import BlockingConnection, answers, fetch
from loadtests.wire.client import Connection, Connections
from loadtests.wire.messages import get, post, whole
from loadtests.wire.reply import IncompleteReadError, Reply
from tests.wire.stage import live
from tests.wire.unit import STREAM, TOKENS, Received, Script, ScriptedUnit, listening, then_close, then_reset

SILENCE_S = 0.2
LARGE = 4 << 20


async def silent(request: Received) -> None:
    """A head and a token, and nothing more."""
    request.write(STREAM[:-40])
    await request.connection.until_gone()


async def asked(script: Script, *, keep: bool = True, times: int = 1) -> tuple[list[Reply], ScriptedUnit]:
    """Replies to so many requests, one after the other."""
    replies = []
    async with listening(ScriptedUnit(script)) as unit:
        unit_connections = Connections(f"http://127.0.0.1:{unit.port}", keep=keep)
        for _ in range(times):
            replies.append(Reply())
            await unit_connections.exchange(post(b"{}"), replies[-1], silence_s=SILENCE_S)
        unit_connections.close()
    return replies, unit


@live
async def test_a_connection_is_kept_for_the_next_exchange() -> None:
    replies, unit = await asked(STREAM, times=3)
    assert [reply.body for reply in replies] == [b"".join(TOKENS)] * 3
    assert len(unit.connections) == 1


@live
async def test_a_connection_is_not_kept_where_it_should_not() -> None:
    assert len((await asked(STREAM, keep=False, times=2))[1].connections) == 2
    assert len((await asked(whole(b"{}", lines=b"Connection: close\r\n"), times=2))[1].connections) == 2


@live
async def test_a_kept_connection_that_was_closed_is_not_used_again() -> None:
    async with listening(ScriptedUnit(then_close(whole(b"{}")))) as unit:
        connections = Connections(f"http://127.0.0.1:{unit.port}")
        for _ in range(2):
            await connections.exchange(get("/"), Reply())
            await unit.connections[-1].until_gone()
            await asyncio.sleep(0.01)
    assert len(unit.connections) == 2


@live
async def test_a_reply_that_is_cut_is_an_error_and_shows_its_status() -> None:
    reply = Reply()
    async with listening(ScriptedUnit(then_close(STREAM[:-40]))) as unit:
        with pytest.raises(IncompleteReadError):
            await (await Connection.open(unit.port)).exchange(get("/"), reply)
    assert reply.status == 200


@live
async def test_a_reset_is_told_from_a_close() -> None:
    async with listening(ScriptedUnit(then_reset(b""))) as unit:
        with pytest.raises(ConnectionResetError):
            await (await Connection.open(unit.port)).exchange(get("/"), Reply())


@live
async def test_silence_ends_an_exchange() -> None:
    with pytest.raises(TimeoutError):
        await asked(silent)


@live
async def test_a_reply_that_came_before_it_was_awaited_is_not_lost() -> None:
    async with listening(ScriptedUnit(then_close(whole(b"{}")))) as unit:
        connection, reply = await Connection.open(unit.port), Reply()
        await connection.send(get("/"))
        await (await unit.received()).connection.until_gone()
        await connection.read(reply)
    assert reply.is_whole


@live
async def test_a_large_body_is_sent_as_fast_as_it_is_taken() -> None:
    async with listening(ScriptedUnit(whole(b"{}"))) as unit:
        connection, reply = await Connection.open(unit.port), Reply()
        await connection.send(post(bytes(LARGE)))
        await connection.read(reply)
    assert (reply.status, len(unit.requests[0].body)) == (200, LARGE)


@live
async def test_the_blocking_client_keeps_and_forgets_connections_alike() -> None:
    def ask(url: str) -> list[bytes]:
        replies = [Reply() for _ in range(3)]
        with BlockingConnection(url, SILENCE_S) as connection:
            for reply in replies:
                connection.exchange(get("/"), reply)
        return [reply.body for reply in replies]

    async with listening(ScriptedUnit(STREAM)) as unit:
        assert await asyncio.to_thread(ask, f"http://127.0.0.1:{unit.port}") == [b"".join(TOKENS)] * 3
    assert len(unit.connections) == 1


@live
async def test_one_question_is_a_get_or_a_post() -> None:
    async with listening(ScriptedUnit(whole(b"{}"))) as unit:
        url = f"http://127.0.0.1:{unit.port}"
        await asyncio.to_thread(fetch, f"{url}/a?b=c")
        await asyncio.to_thread(fetch, url, b"{}", lines="x: y\r\n")
    first, second = unit.requests
    assert (first.method, first.target, first.body) == ("GET", "/a?b=c", b"")
    assert (second.method, second.target, second.body, second.get("x")) == ("POST", "/", b"{}", "y")


@live
@pytest.mark.parametrize("script", [silent, then_close(b"")], ids=["silent", "closed"])
async def test_one_question_that_is_not_answered_is_an_error(script: Script) -> None:
    async with listening(ScriptedUnit(script)) as unit:
        url = f"http://127.0.0.1:{unit.port}"
        with pytest.raises(OSError, match=r"timed out|closed"):
            await asyncio.to_thread(fetch, url, silence_s=SILENCE_S)
        assert not await asyncio.to_thread(answers, url, silence_s=SILENCE_S)
    assert not await asyncio.to_thread(answers, url, silence_s=SILENCE_S)
