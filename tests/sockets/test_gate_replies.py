"""Replies through the gate over real sockets: statuses, heads, framing, and the commit."""

from __future__ import annotations

import asyncio

import pytest

from cellgate.proxy.config.settings import Timeouts
from cellgate.proxy.control.prober import Prober
from cellgate.proxy.http.unit import ONE_OFFS
from cellgate.router.board import Board
from tests.wire.client import chat, get
from tests.wire.stage import stage
from tests.wire.unit import (
    PAUSE_S,
    STREAM,
    TOKENS,
    Received,
    then_close,
    whole,
)

EVENTS = b"".join(TOKENS)
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.mark.parametrize("status", [204, 206, 304, 418, 299, 599])
async def test_a_units_status_is_the_clients(status: int) -> None:
    body = b"" if status in (204, 304) else b'{"a": 1}'
    async with stage(whole(body, f"{status} Whatever")) as here, here.client() as client:
        for _ in range(2):
            reply = await client.ask(chat(stream=False))
            assert (reply.status, reply.body, reply.whole) == (status, body, True)
        assert len(here.unit.connections) == 1


async def test_an_engine_that_closes_after_each_stream_is_not_suspected_of_a_restart() -> None:
    """llama.cpp's head says keep-alive, and it keeps what carried a plain reply."""
    async with stage(then_close(STREAM)) as here, here.client() as client:
        state = here.plane.board.units["u0"]
        state.engine = "llamacpp"
        for _ in range(3):
            assert (await client.ask(chat())).whole
        assert not state.is_restart_suspected()
        here.unit.script = whole(b"{}")
        for _ in range(2):
            assert (await client.ask(chat(stream=False))).whole
        assert len(here.unit.connections) == 4


async def test_an_engine_without_the_path_is_told_as_such_in_openais_shape() -> None:
    """FastAPI's engines answer {"detail":"Not Found"}, which the OpenAI SDK turns into a wordless error."""
    async with stage(whole(b'{"detail":"Not Found"}', "404 Not Found")) as here, here.client() as client:
        for _ in range(2):
            reply = await client.ask(chat())
            assert (reply.status, reply.error["code"]) == (404, "not_served")
            assert reply.error["message"] == "the engine of unit u0 does not serve /v1/chat/completions"
        assert here.plane.board.in_flight == 0


async def test_the_head_of_a_reply_crosses_but_for_the_connections_own() -> None:
    lines = (
        "Server: uvicorn\r\nOpenAI-Model: 1\r\nETag: a\r\nETag: b\r\nX-Request-Id: the-units\r\n"
        "Connection: keep-alive, X-Hop\r\nKeep-Alive: timeout=5\r\nX-Hop: 1\r\n"
        "Trailer: X-T\r\nUpgrade: h2\r\nProxy-Authenticate: Basic\r\n"
        # What another gate tells its client and its ingress.
        "X-Cellgate-Unit: u7\r\nX-Cellgate-Explain: unit=evil\r\nX-Envoy-Immediate-Health-Check-Fail: 1\r\n"
    )
    ours = ("x-cellgate-explain", "x-envoy-immediate-health-check-fail")
    async with stage(whole(b"{}", head=lines)) as here, here.client() as client:
        reply = await client.ask(chat(stream=False, head="X-Request-Id: mine\r\n"))
        assert (reply.get("server"), reply.get("openai-model")) == ("uvicorn", "1")
        assert reply.all("etag") == ["a", "b"]
        assert (reply.get("x-request-id"), reply.all("x-cellgate-unit")) == ("mine", ["u0"])
        assert reply.get("x-cellgate-unit-request-id") == "the-units"
        assert (reply.get("content-type"), reply.get("content-length")) == ("application/json", "2")
        for name in (*ours, "connection", "keep-alive", "x-hop", "trailer", "upgrade", "proxy-authenticate"):
            assert reply.get(name) is None
        # An engine that repeats the id of the request adds no line.
        here.unit.script = whole(b"{}", head="x-request-id: mine\r\n")
        reply = await client.ask(chat(stream=False, head="X-Request-Id: mine\r\n"))
        assert (reply.get("x-request-id"), reply.get("x-cellgate-unit-request-id")) == ("mine", None)


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("http://127.0.0.1:PORT/v1/models/?a=b", "/v1/models/?a=b"),
        ("HTTP://127.0.0.1:PORT", "/"),
        ("http://127.0.0.1:PORT?a", "/?a"),
        ("/v1/models/", "/v1/models/"),
        ("models/?a=b", "models/?a=b"),
        # It would get the prompt of whoever follows, and his key.
        ("http://127.0.0.1:PORT5/x", None),
        ("https://elsewhere/x", None),
        ("//elsewhere/x", None),
        ("/\\elsewhere/x", None),
        ("http:/elsewhere", None),
        ("javascript:alert(1)", None),
    ],
)
async def test_an_address_of_a_unit_that_is_its_own_leads_to_the_gate_and_any_other_nowhere(
    place: str, shown: str | None
) -> None:
    async with stage(b"") as here, here.client() as client:
        port = str(here.unit.port)
        for status in ("307 Temporary Redirect", "201 Created", "202 Accepted"):
            for name in ("Location", "Content-Location"):
                here.unit.script = whole(b"", status, f"{name}: {place.replace('PORT', port)}\r\n")
                reply = await client.ask(chat(stream=False))
                assert reply.status == int(status[:3])
                assert reply.get(name.lower()) == shown


LIES = (
    *(
        "x-accel-redirect: /etc/passwd",
        "x-accel-buffering: no",
        "x-sendfile: /etc/passwd",
        "x-reproxy-url: /a",
    ),
    *("set-cookie: session=theirs", "strict-transport-security: max-age=1", 'clear-site-data: "*"'),
    *('alt-svc: h2="elsewhere:443"', "refresh: 0; url=https://elsewhere", "link: </x>; rel=preload"),
    *("content-security-policy: sandbox", 'report-to: {"a": 1}', "service-worker-allowed: /"),
    *("x-envoy-upstream-service-time: 1", "x-envoy-degraded: 1", "x-haproxy-server-state: UP"),
    *(
        "x-cellgate-unit: u9",
        "x-cellgate-reason: down",
        "x-cellgate-fallback-from: a",
        "x-should-retry: true",
    ),
    *("x-ratelimit-remaining-requests: 0", "endpoint-load-metrics: JSON {}", "x-cellgate-explain: a"),
)


@pytest.mark.parametrize("name", ["", "x-request-id: another\r\n"])
async def test_a_unit_says_nothing_to_browsers_to_an_ingress_or_in_the_gates_name(name: str) -> None:
    """In a plain answer, in a stream, in an error, before its answer and behind it."""
    lines = "".join(f"{lie}\r\n" for lie in LIES)
    early = b"HTTP/1.1 103 Early Hints\r\n" + lines.encode() + b"\r\n"
    stream = STREAM.replace(b"Transfer", (lines + name).encode() + b"Transfer", 1)
    trailed = stream.replace(b"0\r\n\r\n", b"0\r\n" + lines.encode() + b"\r\n")
    honest = {"content-type", "content-length", "transfer-encoding", "x-request-id", "x-cellgate-unit"}
    honest |= {"x-cellgate-unit-request-id", "endpoint-load-metrics", "endpoint-load-metrics-bin"}
    told = {lie.partition(": ")[2] for lie in LIES}
    for script in (whole(head=lines + name), whole(b"{}", "400 Bad Request", lines), early + stream, trailed):
        async with stage(script) as here, here.client() as client:
            reply = await client.ask(chat())
            assert {field for field, _ in reply.fields} <= honest, reply.fields
            assert told.isdisjoint(value for _, value in reply.fields)
            assert reply.trailers == []
            assert all("Link" not in str(hint) and "link" not in str(hint) for hint in reply.interim)


async def test_the_only_unit_says_when_to_come_again_and_is_asked_once() -> None:
    busy = whole(b'{"error": {}}', "429 Too Many Requests", "Retry-After: 7\r\n")
    async with stage(busy) as here, here.client() as client:
        reply = await client.ask(chat(stream=False))
        assert (reply.status, reply.get("retry-after"), here.received) == (429, "7", 1)


async def test_head_is_answered_by_a_head() -> None:
    async def play(request: Received) -> None:
        assert request.method == "HEAD"
        request.write(whole(b"x" * 99)[:-99])

    async with stage(play) as here, here.client() as client:
        for _ in range(2):
            reply = await client.ask(get("/version", method="HEAD"), "HEAD")
            assert (reply.status, reply.get("content-length"), reply.body) == (200, "99", b"")
        for path, status in {"/v1/models": 200, "/nowhere": 404, "/readyz": 200}.items():
            reply = await client.ask(get(path, method="HEAD"), "HEAD")
            assert reply.status == status
            assert int(reply.get("content-length") or 0) > 0
        assert [connection.requests for connection in here.unit.connections] == [2]


# Connections to units that grow stale


def without_suspicion(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nobody takes a closed connection for a restart: no canary would prove the contrary here. Who was. Nor
    does a busy machine keep evidence from being counted.
    """
    names: list[str] = []
    monkeypatch.setattr(Prober, "trust_from", lambda *_: None)

    def noted(_: Board, name: str, _now: float) -> bool:
        names.append(name)
        return False

    monkeypatch.setattr(Board, "suspect_restart", noted)
    return names


async def test_a_kept_connection_that_took_the_request_and_ended_is_no_failure_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its unit may close connections out of turn, or have died of the request: the second try tells."""
    suspicions = without_suspicion(monkeypatch)
    ends = {2}

    async def play(request: Received) -> None:
        if request.connection.requests in ends:
            request.connection.abort()
        else:
            request.write(STREAM)

    async with stage(play) as here, here.client() as client:
        for _ in range(3):
            assert (await client.ask(chat())).status == 200
        assert (here.outcomes, len(here.unit.connections)) == (["ok"] * 3, 3)
        (state,) = here.plane.board
        assert state.case.verdict.value == "up"
        ends |= {1}
        reply = await client.ask(chat())
        assert (reply.status, reply.json["error"]["code"]) == (502, "closed_early")
        # A canary decides; but not for long, if all else fails.
        assert (len(here.unit.connections), state.case.verdict.value) == (4, "up")
        assert state.unit.name in suspicions
        reply = await client.ask(chat())
        assert (reply.status, state.case.verdict.value) == (502, "suspect")


async def test_a_unit_that_has_died_of_a_request_is_blamed_for_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_suspicion(monkeypatch)

    async def play(request: Received) -> None:
        if len(here.unit.requests) == 2:
            await here.unit.stop_listening()
            request.connection.abort()
        else:
            request.write(STREAM)

    async with stage(play) as here, here.client() as client:
        assert (await client.ask(chat())).status == 200
        reply = await client.ask(chat())
        assert (reply.status, reply.json["error"]["code"]) == (502, "closed_early")
        assert here.plane.containment.counts["deaths"] == 1


async def test_a_unit_that_closes_after_each_answer_without_saying_so_answers_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    suspicions = without_suspicion(monkeypatch)
    async with stage(then_close(whole())) as here, here.client() as client:
        for number in range(150):
            assert (await client.ask(chat(stream=False))).status == 200, number
        assert here.plane.board.units["u0"].case.verdict.value == "up"
        assert here.received == 150
        assert len(suspicions) <= ONE_OFFS


async def test_an_answer_that_broke_off_gets_no_free_try_and_is_never_taken_for_one_behind_which_units_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    suspicions = without_suspicion(monkeypatch)

    async def play(request: Received) -> None:
        request.write(STREAM if request.connection.requests == 1 else b"HTTP/1.1 200")
        if request.connection.requests == 2:
            request.connection.close()

    async with stage(play) as here, here.client() as client:
        for _ in range(ONE_OFFS + 1):
            assert (await client.ask(chat())).status == 200
            assert (await client.ask(chat())).status == 502
        assert len(suspicions) == ONE_OFFS + 1


# Patience


async def test_a_whole_answer_that_takes_too_long_is_not_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cellgate.proxy.process.signals.TICK_S", 0.01)

    async def silent(request: Received) -> None:
        await asyncio.sleep(60.0)

    limits = Timeouts(answer_s=PAUSE_S)
    async with stage(silent, STREAM, timeouts=limits) as here, here.client() as client:
        assert (await client.ask(chat())).body == EVENTS, "a stream is"
        await here.units[0].connections[0].until_gone()
    async with stage(silent, STREAM, timeouts=limits) as here, here.client() as client:
        reply = await client.ask(chat(stream=False))
        assert (reply.status, reply.error["code"]) == (504, "answer_timeout")
        assert (reply.get("x-should-retry"), reply.get("retry-after")) == ("false", None)
        await here.units[0].connections[0].until_gone()
        assert [len(unit.requests) for unit in here.units] == [1, 0]
        assert {state.case.verdict.value for state in here.plane.board} == {"up"}
