"""Requests that say or ask where they go: unit, model, reasons, retries, and reports to the ingress."""

from __future__ import annotations

import asyncio
import base64
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from hashlib import sha256

import orjson
import pytest

from cellgate.proxy.config.settings import gates_token, secret_of
from cellgate.proxy.ingress.reports import encoded
from cellgate.proxy.observe.counters import FALLBACKS, NAMED, TALLIES
from cellgate.router.nouns import Evidence, Fleet, Load, Models, Refusal, Rules, Sign, Strength
from tests.unit.request.test_models import field, file, form, lines
from tests.wire.client import chat, get, post
from tests.wire.replies import Reply
from tests.wire.stage import Stage, stage
from tests.wire.stage import stage as any_stage
from tests.wire.unit import (
    LAST_CHUNK,
    SSE_HEAD,
    STREAM,
    TOKENS,
    Received,
    Script,
    chunk,
    in_turn,
    then_close,
    whole,
)

UNIT = "x-cellgate-unit"
EXPLAIN = "x-cellgate-explain"
ENDPOINT = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
TOKEN = "x-cellgate-token"
SECRET = "s3cret"
HASH = f"sha256:{sha256(SECRET.encode()).hexdigest()}"
guarded_stage = partial(any_stage, admin_token=SECRET)


def to(*units: str, field: str = UNIT) -> bytes:
    """A chat request with a place."""
    return chat(head=f"{field}: {','.join(units)}\r\n{TOKEN}: {SECRET}\r\n")


def at(here: Stage, number: int) -> str:
    """Where a unit is, as an endpoint picker knows it."""
    return f"127.0.0.1:{here.units[number].port}"


def down(here: Stage, name: str) -> None:
    here.plane.prober.observe(
        Evidence(name, Sign.BAD, Strength.FATAL, "test", "the test says so", here.gateway.now())
    )


def refused(reply: Reply) -> tuple[int, str | None, object]:
    """Status, reason and code; a refusal can be retried elsewhere, so it says when."""
    assert reply.get("retry-after") == "1"
    return reply.status, reply.get("x-cellgate-reason"), reply.error["code"]


async def test_a_request_goes_to_the_unit_it_names_and_does_not_show_it_the_name() -> None:
    async with guarded_stage(STREAM, STREAM, STREAM) as here, here.client() as client:
        for number in (2, 2, 0):
            reply = await client.ask(to(f"u{number}"))
            assert (reply.status, reply.get(UNIT)) == (200, f"u{number}")
        assert [len(unit.requests) for unit in here.units] == [1, 0, 2]
        assert here.units[2].requests[0].all(UNIT) == []


@pytest.mark.parametrize("field", [UNIT, ENDPOINT, SUBSET, EXPLAIN])
async def test_without_the_token_it_is_forged_from_whatever_address(field: str) -> None:
    async with guarded_stage(STREAM, trusted=("203.0.113.0/24",)) as here, here.client() as client:
        await client.ask(chat())
        (peer,) = here.gateway.clients
        for address in (peer.peer, "203.0.113.7", "198.51.100.1"):
            peer.peer = address
            reply = await client.ask(chat(head=f"{field}: {'1' if field == EXPLAIN else 'u0'}\r\n"))
            assert (reply.status, reply.error["code"]) == (403, "not_trusted")
        assert here.received == 1
        assert b"cellgate_forged_placements_total 3.0" in await here.plane.metrics.render()
        # The gate's own answers are for everyone, whoever sends what along.
        assert (await client.ask(get("/readyz", f"{field}: u0\r\n"))).status == 200
        # Who names a unit and asks why is refused for the unit.
        reply = await client.ask(chat(head=f"{EXPLAIN}: 1\r\n{UNIT}: u0\r\n"))
        assert "chooses its unit" in reply.error["message"]


@pytest.mark.parametrize(
    ("token", "shown", "status"),
    [
        (SECRET, SECRET, 200),
        (SECRET, "made for this gate", 200),
        (SECRET, "made for another gate", 403),
        (SECRET, "s3cre", 403),
        (SECRET, "", 403),
        (None, "", 403),
        (HASH, SECRET, 200),
        (HASH, "made for this gate", 200),
        (HASH, HASH, 403),
        (HASH, HASH.removeprefix("sha256:"), 403),
    ],
)
async def test_who_shows_the_admin_token_or_a_gates_is_trusted_and_units_do_not_see_it(
    token: str | None, shown: str, status: int
) -> None:
    async with guarded_stage(STREAM, admin_token=token) as here, here.client() as client:
        await client.ask(chat())
        (peer,) = here.gateway.clients
        peer.peer = "203.0.113.7"
        secret, url = secret_of(here.plane.settings), f"http://127.0.0.1:{here.gateway.port}"
        made = {"made for this gate": url, "made for another gate": f"{url}1"}
        shown = gates_token(secret, made[shown]) if shown in made else shown
        for head in (f"{UNIT}: u0\r\n", f"{EXPLAIN}: 1\r\n"):
            reply = await client.ask(chat(head=f"{head}{TOKEN}: {shown}\r\n"))
            assert reply.status == status
        assert all(request.all(TOKEN) == [] for request in here.units[0].requests)


async def test_a_unit_that_cannot_take_it_is_refused_for_with_the_reason_and_not_waited_for() -> None:
    async with guarded_stage(STREAM, STREAM) as here, here.client() as client:
        assert refused(await client.ask(to("nobody"))) == (503, "no_unit", "not_here")
        here.plane.set_drain("u0", True)
        assert refused(await client.ask(to("u0"))) == (503, "drained", "not_here")
        here.plane.set_drain("u0", False)
        here.plane.board.units["u0"].full_until = here.gateway.now() + 60.0
        assert refused(await client.ask(to("u0"))) == (503, "full", "not_here")
        assert not len(here.plane.router.queue)
        down(here, "u0")
        assert refused(await client.ask(to("u0"))) == (503, "down", "not_here")
        assert here.received == 0


async def test_a_unit_that_dies_under_it_is_told_of_and_no_other_is_tried() -> None:
    async def cut(request: Received) -> None:
        request.connection.reset()

    async with guarded_stage(cut, STREAM) as here, here.client() as client:
        status, reason, code = refused(await client.ask(to("u0")))
        assert (status, code) == (503, "not_here")
        assert reason in ("closed_early", "stale_connection")
        assert len(here.units[1].requests) == 0


async def test_the_units_own_words_go_on_as_they_are() -> None:
    busy = whole(b'{"error":{"message":"queue is full"}}', "503 Service Unavailable")
    async with guarded_stage(busy, STREAM) as here, here.client() as client:
        reply = await client.ask(to("u0"))
        assert (reply.status, reply.get("x-cellgate-reason")) == (503, None)
        assert reply.json == {"error": {"message": "queue is full"}}


async def test_an_endpoint_picker_names_addresses_the_best_first() -> None:
    async with guarded_stage(STREAM, STREAM, STREAM) as here, here.client() as client:
        both = (at(here, 2), at(here, 1))
        here.units[2].script = whole(status="500 Internal Server Error")
        assert (await client.ask(to(*both, field=ENDPOINT))).get(UNIT) == "u1", "after a failure the next"
        here.units[2].script = STREAM
        assert (await client.ask(to(*both, field=ENDPOINT))).get(UNIT) == "u2"
        here.plane.set_drain("u2", True)
        assert (await client.ask(to(*both, field=ENDPOINT))).get(UNIT) == "u1"
        here.plane.set_drain("u1", True)
        assert refused(await client.ask(to(*both, field=ENDPOINT))) == (503, "drained", "not_here")
        assert refused(await client.ask(to("192.0.2.1:80", field=ENDPOINT))) == (503, "no_unit", "not_here")


async def test_a_subset_bounds_the_choice() -> None:
    async with guarded_stage(STREAM, STREAM, STREAM) as here, here.client() as client:
        inside = (at(here, 0), at(here, 2))
        # A choice outside of the subset is none.
        head = f"{ENDPOINT}: {at(here, 1)}, {at(here, 0)}\r\n{SUBSET}: {at(here, 0)}\r\n{TOKEN}: {SECRET}\r\n"
        assert (await client.ask(chat(head=head))).get(UNIT) == "u0"
        units = [(await client.ask(to(*inside, field=SUBSET))).get(UNIT) for _ in range(4)]
        assert sorted(units, key=str) == ["u0", "u0", "u2", "u2"]
        down(here, "u0")
        down(here, "u2")
        assert refused(await client.ask(to(*inside, field=SUBSET))) == (503, "no_unit", "not_here")
        assert len(here.units[1].requests) == 0


async def test_who_names_the_unit_knows_which_one_made_a_response() -> None:
    async with (
        guarded_stage(whole(b'{"id":"resp_1"}'), whole(b'{"id":"resp_2"}')) as here,
        here.client() as client,
    ):
        reply = await client.ask(get("/v1/responses/resp_9", f"{UNIT}: u1\r\n{TOKEN}: {SECRET}\r\n"))
        assert (reply.status, reply.get(UNIT)) == (200, "u1")
        follows = post(
            b'{"previous_response_id":"resp_9"}', f"{UNIT}: u0\r\n{TOKEN}: {SECRET}\r\n", "/v1/responses"
        )
        assert (await client.ask(follows)).get(UNIT) == "u0"


@pytest.mark.parametrize(("reason", "verdict"), [("down", "suspect"), ("full", "up")])
async def test_a_gate_that_refuses_for_its_unit_is_no_answer(reason: str, verdict: str) -> None:
    """The other side: the unit's address is a gate's, and that one has just lost the unit, or it is full."""
    gone = whole(status="503 Service Unavailable", head=f"x-cellgate-reason: {reason}\r\n")
    async with guarded_stage(gone, STREAM) as here, here.client() as client:
        for _ in range(2):
            reply = await client.ask(chat())
            assert (reply.status, reply.get(UNIT)) == (200, "u1")
        verdicts = {state.unit.name: state.case.verdict.value for state in here.plane.board}
        assert verdicts == {"u0": verdict, "u1": "up"}


# Requests that ask why they go where they go: from whom, and what the answer's head tells.

TOKEN_LINE = "x-cellgate-token: s3cret\r\n"


def asking(value: str = "1") -> bytes:
    return chat(head=f"{EXPLAIN}: {value}\r\n{TOKEN_LINE}")


def told(reply: Reply) -> dict[str, str]:
    """The words of the line."""
    line = reply.get(EXPLAIN)
    assert line is not None
    return dict(word.split("=", 1) for word in line.split(" "))


async def test_the_answer_tells_what_its_unit_was_taken_to_cost() -> None:
    async def fail(request: Received) -> None:
        request.connection.reset()

    async with guarded_stage(fail, STREAM) as here, here.client() as client:
        reply = await client.ask(asking())
        words = told(reply)
        assert (reply.status, words["unit"]) == (200, "u1"), "that which answers"
        terms = [float(value) for name, value in words.items() if name.endswith("_s")]
        total_s, *parts = terms[:-1]
        assert total_s > 0.0
        assert abs(total_s - sum(parts)) < 0.001
        assert 0.0 <= float(words["waited_s"]) < 5.0
        assert words["cached_tokens"] == "0"
        # Neither the question nor, from a unit, an answer to it crosses.
        assert [request.all(EXPLAIN) for unit in here.units for request in unit.requests] == [[], []]
        reply = await client.ask(chat(head=f"{EXPLAIN}: 1\r\n{UNIT}: u1\r\n{TOKEN_LINE}"))
        assert (reply.status, reply.get(UNIT), told(reply)["unit"]) == (200, "u1", "u1")
        for request in (chat(), asking("0")):
            assert (await client.ask(request)).get(EXPLAIN) is None


# Names of the gate's own for models, from the client's body to the unit's, and back in a header line.

ALIAS = {"gpt": (("tiny", 1.0),)}


def models_of(here: Stage) -> list[str]:
    """What units were asked for."""
    return [orjson.loads(request.body)["model"] for unit in here.units for request in unit.requests]


async def test_an_alias_reaches_the_unit_as_its_model() -> None:
    async with stage(STREAM, models=ALIAS) as here, here.client() as client:
        before = TALLIES[NAMED, "gpt", "tiny"]
        reply = await client.ask(chat(model="gpt"))
        assert (reply.status, reply.get("x-cellgate-model")) == (200, "tiny")
        plain = await client.ask(chat(model="tiny"))
        assert (plain.status, plain.get("x-cellgate-model")) == (200, None)
        assert models_of(here) == ["tiny", "tiny"]
        assert TALLIES[NAMED, "gpt", "tiny"] == before + 1
        assert [record.model for record in here.records.kept] == ["tiny", "tiny"]
        # Names are listed and shown, and new weights count from the next request on.
        listed = (await client.ask(get("/v1/models"))).json["data"]
        assert [card["id"] for card in listed] == ["tiny", "gpt"]
        shown = await client.ask(get("/v1/models/gpt"))
        assert (shown.status, shown.json["id"]) == (200, "gpt")
        here.gateway.take_settings(replace(here.gateway.services.settings, models={}))
        assert (await client.ask(chat(model="gpt"))).status == 404
        assert here.received == 2


async def test_another_model_serves_when_none_can() -> None:
    fallback = {"gone": ("tiny",), "lost": ("also gone",)}
    async with stage(STREAM, fallback=fallback) as here, here.client() as client:
        before = TALLIES[FALLBACKS, "gone", "tiny"]
        reply = await client.ask(chat(model="gone"))
        assert (reply.status, reply.whole) == (200, True)
        assert reply.get("x-cellgate-model") == "tiny"
        assert reply.get("x-cellgate-fallback-from") == "gone"
        assert models_of(here) == ["tiny"]
        assert TALLIES[FALLBACKS, "gone", "tiny"] == before + 1
        reply = await client.ask(chat(model="lost"))
        assert (reply.status, reply.error["code"], here.received) == (404, "unknown_model", 1)
        assert "also gone" in reply.error["message"]


def reports(here: Stage, *models: str) -> None:
    """Each unit lists its model; the configuration names none."""
    units = [replace(state.unit, models=()) for state in here.plane.board]
    here.plane.configure(Fleet(units=tuple(units)))
    for unit, model in zip(units, models, strict=True):
        here.plane.board.set_models(Models(unit.name, (model,), here.plane.board.units[unit.name].case.since))


async def test_a_name_that_no_unit_lists_goes_to_any_of_like_units_and_without_a_tag_is_the_latest() -> None:
    """llama.cpp, for one, serves any name; and what no name stands for, the engine says."""
    async with stage(STREAM, STREAM) as here, here.client() as client:
        reports(here, "tiny", "tiny")
        for name in ("gpt-4o", ""):
            assert (await client.ask(chat(model=name))).status == 200
        assert models_of(here) == ["gpt-4o", ""]
        reports(here, "llama3:latest", "qwen:7b")
        for _ in range(4):
            reply = await client.ask(chat(model="llama3"))
            assert (reply.status, reply.get(UNIT)) == (200, "u0")
        reply = await client.ask(chat(model="qwen"))
        assert (reply.status, reply.error["code"]) == (404, "unknown_model")


def kinds(here: Stage) -> None:
    """The first unit serves text, the second one audio."""
    units = [state.unit for state in here.plane.board]
    served = [replace(unit, models=models) for unit, models in zip(units, ROLES, strict=True)]
    here.plane.configure(Fleet(units=tuple(served)))


ROLES = (("org/llama", "chat"), ("whisper", "ensemble"))


def a_form(model: str, *, first: bool) -> bytes:
    """A request for a transcription."""
    parts = [field("model", model.encode()), file(b"\xff\r\n" * 50_000)]
    body = form(parts if first else parts[::-1])
    kind = lines()[0].decode().replace("content-type", "Content-Type")
    head = (
        f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: gate\r\n{kind}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def test_a_form_goes_to_the_unit_that_serves_its_model() -> None:
    async with stage(whole(), whole(), models={"gpt-audio": (("whisper", 1.0),)}) as here:
        kinds(here)
        async with here.client() as client:
            for number in range(4):
                asked = a_form("whisper", first=number % 2 == 0)
                assert (await client.ask(asked)).status == 200
                assert asked.endswith(here.units[1].requests[-1].body)
            reply = await client.ask(a_form("gpt-audio", first=False))
            assert (reply.status, reply.get("x-cellgate-model")) == (200, "whisper")
            assert a_form("whisper", first=False).endswith(here.units[1].requests[-1].body)
            reply = await client.ask(a_form("none", first=True))
            assert (reply.status, reply.error["code"]) == (404, "unknown_model")
            # JSON goes by its model as well where most send a form.
            for path in ("/v1/images/edits", "/v1/audio/transcriptions") * 4:
                assert (await client.ask(post(b'{"model": "whisper"}', path=path))).status == 200
        assert [len(unit.requests) for unit in here.units] == [0, 13]
        assert [record.model for record in here.records.kept] == ["whisper"] * 5 + ["none"] + ["whisper"] * 8


async def test_a_path_that_names_a_model_goes_to_a_unit_that_serves_it() -> None:
    async with stage(whole(), whole(), models={"gpt": (("ensemble", 1.0),)}) as here:
        kinds(here)
        async with here.client() as client:
            for _ in range(5):
                for path in (
                    "/v1/models/org/llama",
                    "/v1/models/org%2Fllama",
                    "/v2/models/org%2fllama/ready",
                ):
                    assert (await client.ask(get(path))).status == 200
                for path in ("/v1/models/whisper?x=1", "/v2/models/ensemble/versions/1/config"):
                    assert (await client.ask(get(path))).status == 200
                assert (await client.ask(post(b"{}", path="/v2/models/ensemble/infer"))).status == 200
            assert {request.target for request in here.units[0].requests} == {
                *("/v1/models/org/llama", "/v1/models/org%2Fllama", "/v2/models/org%2fllama/ready")
            }
            assert [len(unit.requests) for unit in here.units] == [15, 15]
            reply = await client.ask(post(b'{"model": "org/llama"}', path="/v2/models/gpt/generate?a=b"))
            assert reply.get("x-cellgate-model") == "ensemble"
            assert here.units[1].requests[-1].target == "/v2/models/ensemble/generate?a=b"
            # One that nobody lists is for any unit.
            here.units[0].script = here.units[1].script = whole(status="404 Not Found")
            assert (await client.ask(get("/v1/models/none"))).status == 404
            assert here.received == 32


# The budget of retries: what draws on it, and for how long.

RETRIES = 3


async def begin(request: Received) -> None:
    """Show the first token of a stream that goes on for ever."""
    request.write(SSE_HEAD + chunk(TOKENS[0]))


async def test_a_retry_that_has_shown_a_token_leaves_its_place_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = whole(status="500 Internal Server Error")
    rules = Rules(retry_min=RETRIES, retry_budget=0.0)
    async with stage(failing, begin, rules=rules) as here, AsyncExitStack() as stack:
        # As of a gate that lags, and does not trust its eyes: the failing unit stays in rotation.
        monkeypatch.setattr(here.plane.prober, "observe", lambda _evidence: None)
        monkeypatch.setattr("cellgate.proxy.control.dispatcher.COOL_S", 0.0)
        for _ in range(4 * RETRIES):
            client = await stack.enter_async_context(here.client())
            client.send(chat())
            async with asyncio.timeout(5.0):
                head = await client.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert here.plane.board.retries_in_flight == 0
        refused, answered = here.units
        assert len(refused.requests) > RETRIES
        assert len(answered.requests) == 4 * RETRIES


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
async def test_without_a_budget_a_busy_unit_is_not_left_for_another(
    status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where another one has room: many that are turned down together must not all ask elsewhere."""
    rules = Rules(retry_min=0, retry_budget=0.0)
    async with stage(whole(status=status), whole(), rules=rules) as here, here.client() as client:
        monkeypatch.setattr(
            "cellgate.proxy.request.exchange.Selection.acquire_second", lambda *_: Refusal.FULL
        )
        client.send(chat())
        assert str((await client.reply()).status) == status[:3]
        assert here.received == 1


async def test_a_model_that_one_unit_has_unloaded_is_asked_of_another() -> None:
    gone = whole(b'{"error":{"message":"The model `poet` does not exist."}}', "404 Not Found")
    async with stage(gone, whole()) as here, here.client() as client:
        asked: list[str] = []
        here.plane.prober.look_now = lambda unit, *_: asked.append(unit)  # type: ignore[method-assign]
        for _ in range(3):
            client.send(chat())
            assert (await client.reply()).status == 200
        first, second = here.plane.board.units.values()
        assert (first.cool_until, first.case.window) == (0.0, ())
        # All units are asked what they serve, once for all of these requests.
        assert asked == [first.unit.name, second.unit.name]


WRITTEN = b'{"choices":[{"message":{"content":"Once upon"},"finish_reason":"stop"}]}'
ABORTED = b'{"choices":[{"message":{"content":"Once"},"finish_reason":"abort"}]}'
USED = b'{"choices":[{"message":{"content":"Yes"}}],"usage":{"prompt_tokens":7,"completion_tokens":3}}'
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    "script",
    [
        in_turn(PLAIN % len(ABORTED) + ABORTED),
        in_turn(PLAIN % len(ABORTED), ABORTED),
        then_close(PLAIN % 9 + b"{"),
    ],
    ids=["aborted", "aborted, in two reads", "broken off"],
)
async def test_a_plain_answer_that_was_aborted_or_broke_off_is_asked_of_another_unit(script: Script) -> None:
    async with stage(script, whole(WRITTEN)) as here, here.client() as client:
        reply = await client.ask(chat(stream=False))
        assert (reply.status, reply.body) == (200, WRITTEN)
        assert [len(unit.requests) for unit in here.units] == [1, 1]


@pytest.mark.parametrize("units", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_all_units_abort_is_shown_as_the_engine_says_it(
    stream: bool, units: int
) -> None:
    event = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\ndata: [DONE]\n\n'
    answer = SSE_HEAD + chunk(event) + LAST_CHUNK if stream else whole(ABORTED)
    async with stage(*[answer] * units) as here, here.client() as client:
        reply = await client.ask(chat(stream=stream))
        assert (reply.status, reply.body) == (200, event if stream else ABORTED)
        assert {bool(unit.requests) for unit in here.units} == {True}


async def test_the_usage_of_a_plain_answer_that_comes_behind_its_head_is_read() -> None:
    """Engines write both apart."""
    async with stage(in_turn(PLAIN % len(USED), USED)) as here, here.client() as client:
        learnt = here.plane.board.answer_lengths
        before = learnt.expected("tiny")
        assert (await client.ask(chat(stream=False))).body == USED
        assert learnt.expected("tiny") < before


async def test_who_got_an_error_waits_for_another_unit_that_is_full() -> None:
    failing = whole(status="500 Internal Server Error")
    ending = asyncio.Event()

    async def one_at_a_time(request: Received) -> None:
        request.write(SSE_HEAD + chunk(TOKENS[0]))
        await ending.wait()
        request.write(chunk(TOKENS[1]) + LAST_CHUNK)

    async with stage(failing, one_at_a_time) as here, here.client() as first, here.client() as second:
        refusing, serving = here.plane.board.units.values()
        refusing.drained = True
        first.send(chat())
        await here.until(lambda: len(serving.leases))
        serving.limit = serving.learnt_limit = 1.0
        refusing.drained = False
        second.send(chat())
        await here.until(lambda: here.units[0].requests and not refusing.leases)
        assert len(here.plane.router.queue) == 1
        ending.set()
        assert [(await client.reply()).status for client in (first, second)] == [200, 200]


# What the gate tells the ingress with its answers, over real sockets.

ENGINES = (
    "Endpoint-Load-Metrics: TEXT named_metrics.kv_cache_usage_perc=0.4\r\nendpoint-load-metrics-bin: AAAA\r\n"
)


@pytest.mark.parametrize("script", [STREAM, whole(head=ENGINES)])
async def test_every_proxied_answer_carries_the_gates_report_and_no_other(script: bytes) -> None:
    async with stage(script) as here, here.client() as client:
        here.plane.orca.refresh(here.gateway.now())
        reply = await client.ask(chat())
        assert reply.all("endpoint-load-metrics") == []
        (value,) = reply.all("endpoint-load-metrics-bin")
        assert base64.b64decode(value) == encoded(here.plane.orca.report)
        assert here.plane.orca.report.named_metrics["units_ready"] == 1.0


async def test_the_report_comes_as_it_is_asked_for_and_units_are_not_asked() -> None:
    async with stage(STREAM) as here, here.client() as client:
        for asked, begins in (("TEXT", "TEXT application_u"), ("json", 'JSON {"application_u')):
            reply = await client.ask(chat(head=f"Endpoint-Load-Metrics-Format: {asked}\r\n"))
            (value,) = reply.all("endpoint-load-metrics")
            assert value.startswith(begins)
            assert reply.all("endpoint-load-metrics-bin") == []
            assert here.unit.requests[-1].get("endpoint-load-metrics-format") is None
        # What no unit has answered carries none.
        here.plane.set_drain("u0", True)
        for request in (chat(), get("/readyz")):
            reply = await client.ask(request)
            assert (reply.status, reply.get("endpoint-load-metrics-bin")) == (503, None)
            assert reply.get("x-envoy-immediate-health-check-fail") is None


async def test_a_stopping_gate_says_so_on_every_answer() -> None:
    async with stage(STREAM) as here, here.client() as client, here.client() as other:
        stopping = asyncio.create_task(here.gate.stop(delay_s=1.0, drain_s=1.0))
        await asyncio.sleep(0)
        for reply in (await client.ask(chat()), await other.ask(get("/readyz"))):
            assert reply.get("x-envoy-immediate-health-check-fail") == "1"
        await stopping


async def test_a_unit_takes_at_most_forty_series_of_a_page() -> None:
    async with stage(STREAM) as here, here.client() as client:
        here.plane.board.report(Load("u0", here.gateway.now(), running=1))
        for _ in range(2):
            assert (await client.ask(chat())).status == 200
        page = (await here.plane.metrics.render()).decode()
        series = [line for line in page.splitlines() if 'unit="u0"' in line]
        assert 20 < len(series) <= 46
