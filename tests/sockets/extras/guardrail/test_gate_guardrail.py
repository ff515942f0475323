"""A guardrail before requests and on answers, over real sockets: what it decides, and when it does not."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.settings import GuardrailSettings
from cellgate.proxy.observe.counters import GUARDRAIL, TALLIES
from tests.sockets.test_gate_keys import BEARER, USAGE, keyed, line
from tests.wire.client import Client, chat, post
from tests.wire.stage import Stage, stage
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, STREAM, Received, ScriptedUnit, chunk, listening, whole

ALLOW = {"action": "allow"}
WORDS = ["Paris ", "is ", "a ", "secret ", "place"]


def word(text: str) -> bytes:
    """An event of a chat's stream."""
    return b"data: %b\n\n" % orjson.dumps({"choices": [{"delta": {"content": text}}]})


SPOKEN = SSE_HEAD + b"".join(chunk(word(text)) for text in WORDS) + chunk(b"data: [DONE]\n\n") + LAST_CHUNK
PLAIN = whole(orjson.dumps({"choices": [{"message": {"content": "a secret place"}}]}))


class Judge(ScriptedUnit):
    """A guardrail that answers as `judge` says, and notes what it was asked."""

    def __init__(self, judge: Callable[[dict[str, Any]], Any] = lambda _: ALLOW) -> None:
        super().__init__(self._play)
        self._judge = judge
        self.asked: list[dict[str, Any]] = []

    async def _play(self, request: Received) -> None:
        if not request.body:
            # A probe of another test, whose unit had this port before.
            request.write(whole(status="404 Not Found"))
            return
        self.asked.append(orjson.loads(request.body))
        told = self._judge(self.asked[-1])
        if inspect.isawaitable(told):
            told = await told
        if told is None:
            await asyncio.sleep(60.0)
        request.write(whole(told if isinstance(told, bytes) else orjson.dumps(told)))


@asynccontextmanager
async def judged(judge: Judge, **options: Any) -> AsyncIterator[GuardrailSettings]:
    """The settings of a gate that asks it."""
    async with listening(judge):
        yield GuardrailSettings(f"http://127.0.0.1:{judge.port}/check", **options)


@asynccontextmanager
async def gate(judge: Judge, script: Any = STREAM, **options: Any) -> AsyncIterator[tuple[Stage, Client]]:
    """A gate that asks it, before a unit, and a client of it."""
    async with (
        judged(judge, **options) as guardrail,
        stage(script, guardrail=guardrail) as here,
        here.client() as client,
    ):
        yield here, client


def results(phase: str) -> dict[str, int]:
    return {key[2]: count for key, count in TALLIES.items() if key[:2] == (GUARDRAIL, phase)}


def no_secrets(asked: dict[str, Any]) -> dict[str, str]:
    """Denies what has the word."""
    return {"action": "deny", "reason": "a secret"} if "secret" in str(asked) else ALLOW


async def test_an_allowed_request_goes_on_as_it_is() -> None:
    judge = Judge()
    async with gate(judge) as (here, client):
        for _ in range(3):
            assert (await client.ask(chat())).whole
        (first, *_) = judge.asked
        assert (first["phase"], first["route"], first["model"]) == ("request", "chat", "tiny")
        assert first["body"] == orjson.loads(here.unit.requests[0].body)
        assert len(judge.connections) == 1


@pytest.mark.parametrize("values", [1, LIMITS.json_nodes_on_loop])
async def test_a_request_of_which_an_engine_may_read_another_part_reaches_neither(values: int) -> None:
    """Also one with so many values that it is read elsewhere."""
    judge = Judge(no_secrets)
    async with gate(judge) as (here, client):
        message, more = b'{"role":"user","content":"a secret","content":"hello"}', b"1," * values + b"1"
        reply = await client.ask(post(b'{"model":"tiny","messages":[%b],"x":[%b]}' % (message, more)))
        assert (reply.status, reply.error["param"]) == (400, "content")
        assert (here.received, judge.asked) == (0, [])
        good = (
            b'{"model":"tiny","messages":[{"role":"user","content":"hello"}],"stream":true,"x":[%b]}' % more
        )
        assert (await client.ask(post(good))).whole
        assert (here.received, len(judge.asked)) == (1, 1)


async def test_a_denied_request_reaches_no_unit_and_says_why_and_a_changed_one_is_what_it_gets() -> None:
    fresh = {"model": "tiny", "messages": [{"role": "user", "content": "[removed]"}], "stream": True}

    def judge(asked: dict[str, Any]) -> dict[str, Any]:
        return {"action": "change", "body": fresh} if "name" in str(asked["body"]) else no_secrets(asked)

    async with gate(Judge(judge)) as (here, client):
        reply = await client.ask(chat(messages=[{"role": "user", "content": "a secret"}]))
        assert (reply.status, reply.error["code"]) == (400, "guardrail_denied")
        assert reply.error["message"].endswith("denied the request: a secret")
        assert here.received == 0
        assert (await client.ask(chat(user="a name"))).whole
        assert orjson.loads(here.unit.requests[0].body) == fresh


async def test_a_changed_request_has_the_payer_that_it_had() -> None:
    fresh = {"model": "tiny", "messages": [{"role": "user", "content": "[removed]"}], "stream": True}
    async with gate(Judge(lambda _: {"action": "change", "body": fresh})) as (here, client):
        payers: list[str] = []
        acquire = here.gateway.services.dispatcher.acquire
        here.gateway.services.dispatcher.acquire = lambda request, waiter: (  # type: ignore[method-assign]
            payers.append(request.ask.payer) or acquire(request, waiter)  # type: ignore[func-returns-value]
        )
        assert (await client.ask(chat())).whole
        assert payers == ["address 127.0.0.1"]


REPEATED = whole(orjson.dumps({"choices": [{"message": {"content": "secret " * 80}}]}))
BROKEN = whole(orjson.dumps({"error": "secret: device-side assert"}))


@pytest.mark.parametrize("answer", [REPEATED, BROKEN, PLAIN], ids=["repeats", "an error under 200", "good"])
@pytest.mark.parametrize("units", [1, 2])
async def test_a_denied_answer_is_an_error_and_the_connection_goes_on(answer: bytes, units: int) -> None:
    async with (
        judged(Judge(no_secrets), request=False, answer="whole") as guardrail,
        stage(*[answer] * units, guardrail=guardrail) as here,
        here.client() as client,
    ):
        for _ in range(2):
            reply = await client.ask(chat(stream=False))
            assert (reply.status, reply.error["code"]) == (400, "guardrail_denied")
            assert not re.search(b"secret secret|device-side|place", reply.body)


@pytest.mark.parametrize(
    ("told", "how"),
    [
        (None, "timeout"),
        (b"no JSON", "nonsense"),
        ({"action": "maybe"}, "nonsense"),
        ({"action": "change", "body": 7}, "nonsense"),
        (b"x" * (2 * LIMITS.guardrail_reply_bytes + LIMITS.json_bytes_on_loop), "nonsense"),
    ],
)
@pytest.mark.parametrize(("fail", "status"), [("open", 200), ("closed", 503)])
async def test_without_a_verdict_the_rule_decides(told: Any, how: str, fail: Any, status: int) -> None:
    # Only the one that never answers may be too late, however busy the machine is.
    timeout_s = 0.2 if told is None else 30.0
    judge, before = Judge(lambda _: told), results("request")
    async with gate(judge, STREAM, fail=fail, timeout_s=timeout_s) as (_here, client):
        reply = await client.ask(chat())
        assert reply.status == status
        assert status == 200 or reply.error["code"] == "guardrail_failed"
        after = results("request")
        assert {key for key in after if after[key] != before[key]} == {how}


async def test_one_that_is_away_decides_nothing_and_it_may_listen_on_a_unix_socket(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("guard") / "sock"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(whole(b'{"action": "deny", "reason": "by socket"}'))
        writer.close()

    guardrail = GuardrailSettings("http://127.0.0.1:9/check", fail="open")
    async with stage(STREAM, guardrail=guardrail) as here, here.client() as client:
        assert (await client.ask(chat())).whole
    server = await asyncio.start_unix_server(serve, path)
    guardrail = GuardrailSettings(f"unix://{path}")
    async with stage(STREAM, guardrail=guardrail) as here, here.client() as client:
        assert "by socket" in (await client.ask(chat())).error["message"]
    server.close()


async def test_a_client_that_leaves_stops_its_question() -> None:
    judge = Judge(lambda _: None)
    async with gate(judge) as (here, client):
        client.send(chat())
        await judge.received()
        client.abort()
        await judge.connections[0].until_gone()
        await here.until(lambda: here.outcomes == ["client_left"])
        assert here.received == 0


@pytest.mark.parametrize("mode", ["whole", "windows"])
async def test_an_allowed_answer_is_what_the_unit_wrote(mode: Any) -> None:
    judge = Judge()
    for script, stream in ((SPOKEN, True), (PLAIN, False)):
        async with stage(script) as bare, bare.client() as other:
            usual = await other.ask(chat(stream=stream))
        async with gate(judge, script, request=False, answer=mode) as (_, client):
            reply = await client.ask(chat(stream=stream))
            assert (reply.status, reply.body, reply.whole) == (200, usual.body, True)
            assert (await client.ask(chat(stream=stream))).whole
    texts = [asked["text"] for asked in judge.asked if "text" in asked]
    assert "".join(texts) == "".join(WORDS) * 2
    assert any("body" in asked for asked in judge.asked)


async def test_of_a_stream_nothing_is_sent_that_was_denied() -> None:
    judge = Judge(no_secrets)
    async with judged(judge, request=False, answer="windows", window_bytes=8) as guardrail:

        async def play(request: Received) -> None:
            request.write(SSE_HEAD)
            for text in WORDS * 20:
                request.write(chunk(word(text)))
                await asyncio.sleep(0.01)

        async with stage(play, guardrail=guardrail) as here, here.client() as client:
            reply = await client.ask(chat())
            assert b"Paris" in reply.body
            assert b"secret" not in reply.body.partition(b"guardrail_denied")[0].rpartition(b"data:")[0]
            assert (reply.whole, b"guardrail_denied" in reply.body) == (False, True)
            await here.until(lambda: here.outcomes == ["client_error"])


@pytest.mark.parametrize(
    ("mode", "end", "size"),
    [("whole", b"\n", 20_000), ("whole", b"\r", 1), ("windows", b"\r\n", 20_000), ("windows", b"\r", 1)],
)
async def test_a_tool_call_is_seen_however_its_event_ends_and_comes(mode: Any, end: bytes, size: int) -> None:
    arguments = {"function": {"arguments": "x" * size + "a secret" + "x" * size}}
    call = orjson.dumps({"choices": [{"delta": {"tool_calls": [arguments]}}]})
    event = b"data: " + call + 2 * end
    first, done, half = word("first").replace(b"\n", end), b"data: [DONE]" + 2 * end, len(event) // 4

    async def play(request: Received) -> None:
        for part in (SSE_HEAD + chunk(first), chunk(event[:half]), chunk(event[half:])):
            request.write(part)
            await asyncio.sleep(0.05)
        request.write(chunk(done) + LAST_CHUNK)

    judge = Judge(no_secrets)
    async with gate(judge, play, request=False, answer=mode, window_s=0.01) as (_here, client):
        reply = await client.ask(chat())
        assert b"guardrail_denied" in reply.body
        assert b"x" not in reply.body.partition(b"guardrail_denied")[0].replace(b"text/", b"")
        assert "".join(asked["text"] for asked in judge.asked) == "first" + arguments["function"]["arguments"]


async def test_what_is_held_for_a_client_that_does_not_read_is_bounded() -> None:
    event, wrote = word("x" * 60_000), 0

    async def play(request: Received) -> None:
        nonlocal wrote
        request.write(SSE_HEAD)
        while not request.connection.writer.is_closing():
            request.write(chunk(event))
            wrote += 1
            await request.connection.writer.drain()

    async def slowly(asked: dict[str, Any]) -> dict[str, str]:
        await asyncio.sleep(0.05)
        return ALLOW

    async with gate(Judge(slowly), play, request=False, answer="windows") as (here, client):
        client.send(chat())
        await client.event()
        client.stop_reading()
        before = -1
        while before < wrote and here.buffered() < 16 * LIMITS.guardrail_held_bytes:
            before = wrote
            await asyncio.sleep(0.5)
        assert here.buffered() <= 2 * LIMITS.guardrail_held_bytes
        # Nothing of it is lost: it reads on.
        client.read_on()
        for _ in range(before):
            assert (await client.event()).endswith(event[-20:])


async def test_a_window_waits_no_longer_than_it_may() -> None:
    async def play(request: Received) -> None:
        request.write(SSE_HEAD + chunk(word("one")))
        await asyncio.sleep(60.0)

    async with gate(Judge(), play, request=False, answer="windows", window_s=0.05) as (_here, client):
        client.send(chat())
        assert b"one" in await client.event()


@pytest.mark.parametrize("fail", ["open", "closed"])
async def test_what_is_too_large_to_be_shown_or_held_has_no_verdict(fail: Any) -> None:
    judge = Judge()
    async with gate(judge, STREAM, fail=fail) as (here, client):
        reply = await client.ask(chat(user="x" * LIMITS.guardrail_body_bytes))
        assert (reply.status, here.received, judge.asked) == (
            (200, 1, []) if fail == "open" else (413, 0, [])
        )
        # To try it again is no use.
        assert fail == "open" or reply.error["code"] == "guardrail_too_large"
    text = "x" * (LIMITS.guardrail_held_bytes + 1)
    script = whole(orjson.dumps({"choices": [{"message": {"content": text}}]}))
    async with gate(judge, script, request=False, answer="whole", fail=fail) as (_here, client):
        reply = await client.ask(chat(stream=False))
        assert reply.status == (200 if fail == "open" else 503)
        assert fail == "open" or reply.error["code"] == "guardrail_failed"


def test_settings_say_what_is_asked(tmp_path: Path) -> None:
    assert GuardrailSettings("http://h:1/a/b").target == "/a/b"
    assert GuardrailSettings(f"unix://{tmp_path}/s").target == "/"


async def test_what_a_guardrail_denied_gives_nothing_back(tmp_path: Path) -> None:
    limited = line(limits={"tokens_per_minute": 110})
    judge = Judge(no_secrets)
    async with (
        judged(judge) as guardrail,
        keyed(tmp_path, whole(USAGE), limited, guardrail=guardrail) as here,
        here.client() as client,
    ):
        asks = chat(stream=False, max_tokens=12, head=BEARER)
        denied = chat(stream=False, head=BEARER, user="secret")
        assert [(await client.ask(asks)).status for _ in range(3)] == [200, 200, 200]
        assert [(await client.ask(denied)).status for _ in range(3)] == [400, 400, 400]
        assert (await client.ask(asks)).status == 429
