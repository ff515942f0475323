"""Spans as a collector gets them, and what units are told of theirs: real sockets, real OTLP."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest

from cellgate.extras.otlp import Tracing
from cellgate.proxy.config.settings import TracingSettings
from loadtests.kit.collector import Collector, Seen, collecting
from tests.wire.client import chat, get, post
from tests.wire.stage import Stage, stage
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, STREAM, Play, Received, Script, chunk, then_close, whole

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TOKEN = "x-cellgate-token: s3cret\r\n"
SAMPLED = f"traceparent: 00-{TRACE}-{PARENT}-01\r\n"
NOT_SAMPLED = f"traceparent: 00-{TRACE}-{PARENT}-00\r\n"
FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-0([0-3])")
AT_ONCE = {"drain_delay_s": 0}
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
BUSY = whole(b"{}", "429 Too Many Requests")
BROKEN = whole(b"{}", "500 Internal Server Error")


def event(finish: str | None = None, **delta: str) -> bytes:
    """One event of a chat's stream, in a chunk."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    head = {"id": "t-0", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    return chunk(b"data: %b\n\n" % orjson.dumps({**head, "choices": [choice]}))


BEGUN = SSE_HEAD + event(role="assistant", content="") + event(content="Hi")
SAID = SSE_HEAD + event(content=" there") + event("stop") + chunk(b"data: [DONE]\n\n") + LAST_CHUNK


async def goes_on(request: Received) -> None:
    """A unit whose tokens are bytes, and that proves so that it continues where a text ends."""
    asked = orjson.loads(request.body)
    if request.target == "/tokenize":
        text = "".join(message["content"] for message in asked["messages"])
        request.write(whole(orjson.dumps({"tokens": list(text.encode())})))
    elif request.target == "/detokenize":
        request.write(whole(orjson.dumps({"prompt": bytes(asked["tokens"]).decode()})))
    else:
        request.write(SAID)


@asynccontextmanager
async def traced(*scripts: Script, sample_ratio: float = 1.0) -> AsyncIterator[tuple[Stage, Collector]]:
    """A stage whose gate traces. When it is left, all spans are at the collector."""
    async with collecting() as collector:
        tracing = Tracing(TracingSettings(collector.endpoint, sample_ratio))
        async with stage(*scripts, admin_token="s3cret") as here:
            tracing.watch(here.gateway)
            yield here, collector
        await asyncio.to_thread(tracing.close)


def told(request: Received) -> tuple[str, str, bool]:
    """The trace and the span that a unit was told, and whether it is to be sampled."""
    found = FORM.fullmatch(request.get("traceparent") or "")
    assert found is not None, request.fields
    return found[1], found[2], bool(int(found[3]) & 1)


def first_then(first: bytes, then: bytes) -> Play:
    """Answer the first request otherwise than all others."""
    answers = [first]

    async def play(request: Received) -> None:
        request.write(answers.pop() if answers else then)

    return play


def is_within(inner: Seen, outer: Seen) -> bool:
    return outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


async def test_a_request_and_its_attempt_are_spans_below_the_clients() -> None:
    before_ns = time.time_ns()
    async with traced(STREAM) as (here, collector), here.client() as client:
        head = SAMPLED + "tracestate: a=1,b=2\r\nx-request-id: mine\r\n"
        reply = await client.ask(chat(head=head, messages=[{"role": "user", "content": "a secret"}]))
        assert reply.status == 200
    [request] = collector.named("POST /v1/chat/completions")
    [attempt] = collector.named("attempt")
    assert len(collector.spans) == 2
    assert (request.kind, request.trace_id, request.parent_id, request.state) == (
        "SERVER",
        TRACE,
        PARENT,
        "a=1,b=2",
    )
    assert (attempt.kind, attempt.trace_id, attempt.parent_id) == ("CLIENT", TRACE, request.span_id)
    assert told(here.unit.requests[0]) == (TRACE, attempt.span_id, True)
    assert here.unit.requests[0].get("tracestate") == "a=1,b=2"
    assert before_ns - 1e9 < request.start_ns <= attempt.start_ns <= attempt.events["first token"]
    assert attempt.events["first token"] <= attempt.end_ns <= request.end_ns < time.time_ns() + 1e9
    assert [request.is_error, attempt.is_error] == [False, False]
    assert float(request.about.pop("gen_ai.response.time_to_first_chunk")) >= 0.0  # In whole milliseconds.
    assert request.about == {
        "http.request.method": "POST",
        "http.request.body.size": len(here.unit.requests[0].body),
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "network.peer.address": "127.0.0.1",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.stream": True,
        "cellgate.route": "chat",
        "cellgate.unit": "u0",
        "cellgate.outcome": "ok",
        "cellgate.attempts": 1,
        "cellgate.continued": 0,
        "cellgate.request_id": "mine",
    }
    assert attempt.about == {
        "server.address": "127.0.0.1",
        "server.port": here.unit.port,
        "http.response.status_code": 200,
        "cellgate.unit": "u0",
        "cellgate.cell": "c",
        "cellgate.outcome": "ok",
    }
    assert collector.resource["service.name"] == "cellgate"
    assert b"secret" not in collector.raw


async def test_each_attempt_has_a_span_of_its_own_which_its_unit_is_told() -> None:
    async with traced(BROKEN, STREAM) as (here, collector), here.client() as client:
        assert (await client.ask(chat(head=SAMPLED))).status == 200
    first, second = collector.named("attempt")
    [request] = collector.named("POST /v1/chat/completions")
    assert [told(unit.requests[0])[1] for unit in here.units] == [first.span_id, second.span_id]
    assert first.parent_id == second.parent_id == request.span_id
    assert (first.is_error, second.is_error, request.is_error) == (True, False, False)
    assert (first.about["error.type"], first.about["cellgate.outcome"]) == ("unit_error", "unit_error")
    assert (first.about["http.response.status_code"], first.about.get("http.request.resend_count")) == (
        500,
        None,
    )
    assert (second.about["cellgate.unit"], second.about["http.request.resend_count"]) == ("u1", 1)
    assert request.about["cellgate.attempts"] == 2
    assert first.end_ns <= second.start_ns


async def test_a_stream_that_another_unit_goes_on_with_has_a_continuation() -> None:
    async with traced(then_close(BEGUN), goes_on) as (here, collector), here.client() as client:
        reply = await client.ask(chat(head=SAMPLED, messages=[{"role": "user", "content": "Hello"}]))
        assert reply.body.endswith(b"data: [DONE]\n\n")
    [request] = collector.named("POST /v1/chat/completions")
    [continuation] = collector.named("continuation")
    broken, going_on = collector.named("attempt")
    assert continuation.about == {"cellgate.unit": "u0", "cellgate.outcome": "continued"}
    assert (broken.about["cellgate.outcome"], going_on.about["cellgate.outcome"]) == ("truncated", "ok")
    assert request.about["cellgate.continued"] == 1
    assert broken.end_ns <= continuation.start_ns <= going_on.start_ns
    assert continuation.end_ns == going_on.events["first token"]
    assert [told(unit.requests[-1])[1] for unit in here.units] == [broken.span_id, going_on.span_id]


async def test_a_place_in_the_queue_is_a_span() -> None:
    async with traced(first_then(BUSY, STREAM)) as (here, collector), here.client() as client:
        assert (await client.ask(chat(head=SAMPLED))).status == 200
    [request] = collector.named("POST /v1/chat/completions")
    [queue] = collector.named("queue")
    turned_away, taken = collector.named("attempt")
    assert (queue.kind, queue.parent_id) == ("INTERNAL", request.span_id)
    assert turned_away.about["error.type"] == "busy"
    assert turned_away.start_ns <= queue.start_ns < queue.end_ns <= taken.start_ns
    assert is_within(queue, request)


@pytest.mark.parametrize("failing", [BROKEN, BUSY], ids=["broken", "busy"])
async def test_attempts_do_not_overlap_however_the_clock_moves_between_them(failing: bytes) -> None:
    """The next unit is acquired before the lease of the failed attempt is released."""
    loop, reads = asyncio.get_running_loop(), itertools.count()
    real = loop.time
    loop.time = lambda: real() + 0.001 * next(reads)  # type: ignore[method-assign]
    async with traced(failing, STREAM) as (here, collector), here.client() as client:
        assert (await client.ask(chat(head=SAMPLED))).status == 200
    first, second = collector.named("attempt")
    assert first.end_ns <= second.start_ns


async def test_a_client_that_leaves_ends_its_spans() -> None:
    async def never(request: Received) -> None:
        await request.connection.until_gone()

    async with traced(never) as (here, collector):
        async with here.client() as client:
            client.send(chat(head=SAMPLED))
            await here.unit.received()
        await here.until(lambda: here.records.kept)
    [request] = collector.named("POST /v1/chat/completions")
    [attempt] = collector.named("attempt")
    assert [span.about["cellgate.outcome"] for span in (request, attempt)] == ["client_left"] * 2
    assert request.about["http.response.status_code"] == 499
    assert (request.is_error, attempt.is_error) == (False, False)


async def test_refusals_and_failures_are_spans_and_what_the_gate_answers_of_its_own_is_none() -> None:
    async with traced(BROKEN) as (here, collector), here.client() as client:
        assert (await client.ask(get("/health", SAMPLED))).status == 200
        assert (await client.ask(chat(model="nobody", head=SAMPLED))).status == 404
        assert (await client.ask(get("/pause?why=secret", SAMPLED))).status == 403
        assert (await client.ask(post(b"{}", SAMPLED, "/v1/" + "x" * 5000))).status == 404
        assert (await client.ask(chat(head=SAMPLED))).status == 500
    unknown, denied, long = sorted(collector.spans, key=lambda span: span.start_ns)[:3]
    assert (unknown.name, unknown.about["http.response.status_code"]) == ("POST /v1/chat/completions", 404)
    assert (denied.name, denied.about["url.path"]) == ("GET", "/pause")
    assert len(str(long.about["url.path"])) == 256, "texts that clients choose are cut"
    assert not unknown.is_error
    assert b"secret" not in collector.raw
    [failed] = [each for each in collector.named("POST /v1/chat/completions") if each.is_error]
    assert failed.about["error.type"] == "500"


async def test_requests_that_name_their_unit_or_ask_why_are_traced_as_well() -> None:
    async with traced(STREAM, STREAM) as (here, collector), here.client() as client:
        assert (await client.ask(chat(head=SAMPLED + "x-cellgate-unit: u1\r\n" + TOKEN))).status == 200
        reply = await client.ask(chat(head=SAMPLED + "x-cellgate-explain: 1\r\n" + TOKEN))
        assert reply.get("x-cellgate-explain")
    assert collector.named("attempt")[0].about["cellgate.unit"] == "u1"
    assert len(collector.named("POST /v1/chat/completions")) == 2


@pytest.mark.parametrize("head", ["", "traceparent: 00-xyz-01\r\n", SAMPLED + SAMPLED.replace("b7", "b8")])
async def test_a_request_without_a_parent_that_makes_sense_begins_a_trace(head: str) -> None:
    async with traced(STREAM) as (here, collector), here.client() as client:
        assert (await client.ask(chat(head=head + "tracestate: a=1\r\n"))).status == 200
    [request] = collector.named("POST /v1/chat/completions")
    trace, _, sampled = told(here.unit.requests[0])
    assert (request.parent_id, trace, sampled) == ("", request.trace_id, True)
    assert trace != TRACE
    assert here.unit.requests[0].get("tracestate") is None


async def test_of_requests_without_a_parent_a_share_is_traced_and_of_others_what_clients_trace() -> None:
    async with traced(STREAM, sample_ratio=0.0) as (here, collector), here.client() as client:
        for head in ("", SAMPLED, NOT_SAMPLED):
            assert (await client.ask(chat(head=head))).status == 200
    alone, followed, not_sampled = here.unit.requests
    assert not told(alone)[2]
    assert (told(followed)[0], told(followed)[2]) == (TRACE, True)
    assert told(not_sampled) == (TRACE, PARENT, False)
    assert {span.trace_id for span in collector.spans} == {TRACE}


async def test_a_tracestate_that_makes_no_sense_harms_nothing() -> None:
    async with traced(STREAM) as (here, collector), here.client() as client:
        for state in (",=,bad key=1", "a=1,a=2", "x" * 3000, "\xff=\xfe", "a=" + "v" * 300):
            head = f"{SAMPLED}tracestate: {state}\r\ntracestate: b=2\r\n"
            assert (await client.ask(chat(head=head))).status == 200
    assert {span.trace_id for span in collector.spans} == {TRACE}
    assert {told(request)[0] for request in here.unit.requests} == {TRACE}


async def test_the_tokens_that_a_unit_tells_are_attributes_of_the_request() -> None:
    usage = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 32}}
    message = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
    answer = whole(orjson.dumps({"object": "chat.completion", "choices": [message], "usage": usage}))
    async with traced(answer) as (here, collector), here.client() as client:
        await client.ask(chat(stream=False))
        metrics = here.plane.metrics
        exemplars = await metrics.render(metrics.encoding_for(OPENMETRICS))
    [request] = collector.named("POST /v1/chat/completions")
    assert request.about["gen_ai.request.stream"] is False
    assert request.about["gen_ai.usage.input_tokens"] == 40
    assert request.about["gen_ai.usage.output_tokens"] == 3
    assert request.about["gen_ai.usage.cache_read.input_tokens"] == 32
    assert f'# {{trace_id="{request.trace_id}"}}'.encode() in exemplars
