"""Units that answer badly, over real sockets: before the commit another unit answers, or the gate does with a
502; after it the client gets a cut that it can detect, never a clean end.
"""

from __future__ import annotations

import pytest

from cellgate.proxy.config.limits import LIMITS
from tests.wire.client import chat, get
from tests.wire.replies import Reply
from tests.wire.stage import live, stage
from tests.wire.unit import (
    LAST_CHUNK,
    SSE_HEAD,
    STREAM,
    TOKENS,
    Script,
    chunk,
    in_turn,
    then_close,
    then_reset,
    whole,
)

BODY = b"".join(TOKENS)
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
PLAIN_CHUNKED = PLAIN + b"Transfer-Encoding: chunked\r\n\r\n"
ERROR = b'data: {"error": {"message": "EngineDeadError", "code": 500}}\n\n'


def headed(*lines: str, body: bytes = b"{}") -> bytes:
    """A reply of two bytes with whatever header lines."""
    return PLAIN + "".join(line + "\r\n" for line in lines).encode("latin-1") + b"\r\n" + body


BEFORE_COMMIT: dict[str, Script] = {
    # Garbage
    "not HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "status zero": whole(status="000 OK"),
    "status beyond all": whole(status="600 OK"),
    "two lengths": headed("Content-Length: 2", "Content-Length: 3"),
    "the same length twice": headed("Content-Length: 2", "Content-Length: 2"),
    "lengths in a list": headed("Content-Length: 2, 2"),
    "length with a sign": headed("Content-Length: +2"),
    "length in hex": headed("Content-Length: 0x2"),
    "length below zero": headed("Content-Length: -2"),
    "length beyond 64 bits": headed("Content-Length: 18446744073709551618"),
    "length and coding": headed("Content-Length: 2", "Transfer-Encoding: chunked"),
    "coding before chunked": headed("Transfer-Encoding: gzip, chunked", body=chunk(b"{}") + LAST_CHUNK),
    "coding in a field before": headed(
        "Transfer-Encoding: gzip", "Transfer-Encoding: chunked", body=chunk(b"{}") + LAST_CHUNK
    ),
    "coding not chunked": then_close(headed("Transfer-Encoding: gzip")),
    "folded line": headed("X-A: b", " c", "Content-Length: 2"),
    "NUL in a value": headed("X-A: b\0c", "Content-Length: 2"),
    "bare CR in a value": headed("X-A: b\rSet-Cookie: c", "Content-Length: 2"),
    "bare LF ends a line": headed("X-A: b\nX-B: c", "Content-Length: 2"),
    "no colon": headed("Content-Length 2"),
    "space before the colon": headed("Content-Length : 2"),
    "huge head": headed(f"X-A: {'b' * 400_000}", "Content-Length: 2"),
    "large head": headed(f"X-A: {'b' * 66_000}", "Content-Length: 2"),
    "endless head": headed(f"X-A: {'b' * 400_000}")[:-6],
    "endless interim heads": b"HTTP/1.1 103 Early Hints\r\nX-A: b\r\n\r\n" * 3000,
    "switches protocols": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "two replies": STREAM + STREAM,
    "more than its length": whole(b"{}") + b"{}",
    "bad chunk": SSE_HEAD + b"zz\r\ndata",
    "chunk longer than its size": SSE_HEAD + b"3\r\ndata: x\n\n\r\n",
    # Gone before the commit
    "closes at once": then_close(b""),
    "closes in its head": then_close(PLAIN),
    "closes after an interim head": then_close(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "resets at once": then_reset(b""),
    "resets after the head of a stream": then_reset(SSE_HEAD),
    "closes after the head of a stream": then_close(SSE_HEAD),
    "closes after the head of a stream with a length": then_close(SSE + b"Content-Length: 80\r\n\r\n"),
    "closes after the head of a stream until close": then_close(SSE + b"\r\n"),
    "closes in its first event": then_close(SSE_HEAD + chunk(b"data: {")),
    "closes after comments": then_close(SSE_HEAD + chunk(b": working\n\n")),
    "ends without an event": SSE_HEAD + LAST_CHUNK,
    "ends after comments": SSE_HEAD + chunk(b": working\n\n") * 3 + LAST_CHUNK,
    # Says itself that it has failed
    "begins with an error": SSE_HEAD + chunk(ERROR) + LAST_CHUNK,
    "begins with an error after comments": SSE_HEAD + chunk(b": working\n\n" + ERROR) + LAST_CHUNK,
    "begins with an error in pieces": SSE_HEAD + chunk(ERROR[:20]) + chunk(ERROR[20:]) + LAST_CHUNK,
    "closes in a large first event": then_close(
        SSE_HEAD + chunk(b"data: " + b"x" * (LIMITS.event_bytes + 1))
    ),
}


@pytest.mark.parametrize("script", BEFORE_COMMIT.values(), ids=BEFORE_COMMIT)
@live
async def test_before_the_commit_another_unit_answers(script: Script) -> None:
    async with stage(script, STREAM) as here, here.client() as client:
        reply = await client.ask(chat())
        assert (reply.status, reply.body, reply.whole) == (200, BODY, True)
        assert reply.get("x-cellgate-unit") == "u1"
        assert [len(unit.requests) for unit in here.units] == [1, 1]
        bad, good = (unit.requests[0] for unit in here.units)
        assert (bad.body, bad.get("x-request-id")) == (good.body, good.get("x-request-id"))


@pytest.mark.parametrize("script", BEFORE_COMMIT.values(), ids=BEFORE_COMMIT)
@live
async def test_before_the_commit_the_gate_answers_502_when_there_is_no_other_unit(script: Script) -> None:
    async with stage(script) as here, here.client() as client:
        reply = await client.ask(chat())
        assert (reply.status, reply.whole, reply.error["type"]) == (502, True, "service_unavailable_error")
        assert len(here.unit.requests) == 1
        await here.unit.connections[0].until_gone()


@live
async def test_nobody_is_asked_twice_when_all_units_are_bad() -> None:
    scripts = [BEFORE_COMMIT[name] for name in ("not HTTP", "closes at once", "begins with an error")]
    async with stage(*scripts) as here, here.client() as client:
        assert (await client.ask(chat())).status == 502
        assert [len(unit.requests) for unit in here.units] == [1, 1, 1]


@live
async def test_a_unit_that_refuses_connections_costs_nobody_anything() -> None:
    async with stage(STREAM, STREAM) as here, here.client() as client:
        here.gateway.pool(here.plane.board.units["u0"]).port = 1  # Nobody listens there.
        reply = await client.ask(chat())
        assert (reply.status, reply.body, reply.whole) == (200, BODY, True)


@pytest.mark.parametrize("status", [500, 502, 503, 429])
@live
async def test_statuses_that_another_unit_may_better_are_tried_there(status: int) -> None:
    async with stage(whole(b'{"error": {}}', f"{status} Sorry"), STREAM) as here, here.client() as client:
        reply = await client.ask(chat())
        assert (reply.status, reply.body, reply.whole) == (200, BODY, True)


@pytest.mark.parametrize("status", [500, 502, 503, 429, 400, 404, 422])
@live
async def test_without_another_unit_the_unit_has_its_say(status: int) -> None:
    async with stage(whole(b'{"error": {"x": 1}}', f"{status} Sorry")) as here, here.client() as client:
        reply = await client.ask(chat())
        assert (reply.status, reply.body, reply.whole) == (status, b'{"error": {"x": 1}}', True)


FIRST = b"".join(TOKENS[:2])
BEGUN = SSE_HEAD + b"".join(map(chunk, TOKENS[:2]))
STREAM_CUT: dict[str, Script] = {
    "closes between chunks": then_close(BEGUN),
    "closes in a chunk": then_close(BEGUN + chunk(TOKENS[2])[:9]),
    "closes in a chunk size": then_close(BEGUN + b"1"),
    "closes in its last chunk": then_close(BEGUN + b"0\r\n"),
    "closes in its trailers": then_close(BEGUN + b"0\r\nX-A: b\r\n"),
    "closes in an event": then_close(BEGUN + chunk(b"data: {")),
    "closes before its length": then_close(SSE + b"Content-Length: 99\r\n\r\n" + FIRST),
    "resets": then_reset(BEGUN),
    "resets a stream until close": then_reset(SSE + b"\r\n" + FIRST),
}


@pytest.mark.parametrize("script", STREAM_CUT.values(), ids=STREAM_CUT)
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@live
async def test_a_begun_stream_ends_in_an_error_event_and_a_cut(script: Script, version: bytes) -> None:
    async with stage(script, STREAM) as here, here.client() as client:
        reply = await client.ask(chat().replace(b"HTTP/1.1", b"HTTP/" + version))
        assert reply.status == 200
        assert reply.body.startswith(FIRST)
        assert is_error_event(reply.body[len(FIRST) :])
        # HTTP/1.0 has no frame that could be left open, so there the event alone must do.
        assert reply.whole is (version == b"1.0")
        assert len(here.units[1].requests) == 0
        assert here.outcomes == ["truncated"]


def is_error_event(event: bytes) -> bool:
    """Whether this is exactly one event, an error in OpenAI's shape."""
    if not event.startswith(b"data: ") or not event.endswith(b"\n\n") or event.count(b"\n") != 2:
        return False
    return bool(Reply(body=event.removeprefix(b"data: ")).error["code"] == "truncated")


# JSON is held until it is whole, if it is small.
WORDS = PLAIN_CHUNKED.replace(b"application/json", b"text/plain")
WORDS_BY_CLOSE = PLAIN.replace(b"application/json", b"text/plain")
PLAIN_CUT: dict[str, Script] = {
    "shorter than its length": then_close(PLAIN + b"Content-Length: 99999\r\n\r\n{"),
    "shorter than its length, reset": then_reset(PLAIN + b"Content-Length: 99999\r\n\r\n{"),
    "closes between chunks": then_close(WORDS + chunk(b"{")),
    "closes in a chunk": then_close(WORDS + b"9\r\n{"),
    "closes in its last chunk": then_close(WORDS + chunk(b"{") + b"0\r\n"),
    "bad chunk": in_turn(WORDS + chunk(b"{"), b"zz\r\n"),
    "reset before its close": then_reset(WORDS_BY_CLOSE + b"\r\n{"),
}


@pytest.mark.parametrize("script", PLAIN_CUT.values(), ids=PLAIN_CUT)
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@live
async def test_a_begun_plain_body_is_cut_so_that_the_client_can_tell(script: Script, version: bytes) -> None:
    async with stage(script) as here, here.client() as client:
        reply = await client.ask(chat(stream=False).replace(b"HTTP/1.1", b"HTTP/" + version))
        assert (reply.status, reply.whole) == (200, False)
        assert b"{".startswith(reply.body)
        assert here.outcomes == ["truncated"]


@pytest.mark.parametrize("garbage", [b"zz\r\n", chunk(b"data: x\n\n") + b"zz\r\n", LAST_CHUNK + STREAM])
@live
async def test_of_a_read_that_does_not_parse_nothing_goes_on(garbage: bytes) -> None:
    async with stage(in_turn(BEGUN, garbage)) as here, here.client() as client:
        reply = await client.ask(chat())
        assert not reply.whole
        assert reply.body.startswith(FIRST)
        assert is_error_event(reply.body[len(FIRST) :])
        await here.unit.connections[0].until_gone()


@live
async def test_bytes_that_nobody_asked_for_cost_the_connection_only() -> None:
    script = in_turn(whole(), whole(b'{"of": "somebody else"}'))
    async with stage(script) as here, here.client() as client:
        assert (await client.ask(chat(stream=False))).body == b"{}"
        await here.unit.requests[0].connection.until_gone()
        assert (await client.ask(chat(stream=False))).body == b"{}"
        first, second = here.unit.requests
        assert first.connection is not second.connection


@live
async def test_an_error_in_the_middle_of_a_stream_is_told_once_and_held_against_the_unit() -> None:
    end = chunk(ERROR) + chunk(b"data: [DONE]\n\n") + LAST_CHUNK
    async with stage(in_turn(BEGUN, end)) as here, here.client() as client:
        reply = await client.ask(chat())
        shown, _, told = reply.body.partition(b'data: {"error":')
        assert (shown, reply.whole) == (FIRST, False)
        assert told.endswith(b'"code":"stream_error"}}\n\n')
        assert here.outcomes == ["stream_error"]


@live
async def test_a_path_that_is_not_known_to_be_safe_is_asked_once() -> None:
    async with stage(then_close(b""), whole(), pass_unlisted=True) as here, here.client() as client:
        assert (await client.ask(get("/v1/batches"))).status == 502
        assert [len(unit.requests) for unit in here.units] == [1, 0]


@live
async def test_a_unit_that_stops_in_the_middle_of_a_refusal_is_not_waited_for() -> None:
    stuck = b"HTTP/1.1 503 Sorry\r\nContent-Length: 10\r\n\r\n{"
    async with stage(stuck, STREAM) as here, here.client() as client:
        assert (await client.ask(chat())).body == BODY
        await here.units[0].connections[0].until_gone()
