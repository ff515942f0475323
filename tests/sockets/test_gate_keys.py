"""Keys of clients: who comes in, as whom, and what happens when one is spent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import pytest

from cellgate.proxy.config.settings import KeySettings
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.request.large_bodies import WhyNot
from cellgate.router.nouns import Fleet
from tests.unit.request.test_models import field, form, lines
from tests.wire.client import chat, get, post
from tests.wire.stage import Stage, stage
from tests.wire.unit import SSE_HEAD, STREAM, TOKENS, Received, Script, chunk, whole

KEY = "sk-alice"


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


BEARER = bearer(KEY)
USAGE = b'{"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 12}}'


def line(name: str = "alice", key: str = KEY, **fields: Any) -> str:
    return orjson.dumps({"key": name, "sha256": sha256(key.encode()).hexdigest(), **fields}).decode()


def mounted(tmp_path: Path, name: str, *lines: str) -> None:
    """Put lines into a folder of this name, and the link to it into the place of the last one."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "keys.jsonl").write_text("\n".join(lines))
    (tmp_path / "next").symlink_to(name)
    (tmp_path / "next").rename(tmp_path / "data")


@asynccontextmanager
async def keyed(tmp_path: Path, script: Script, *lines: str, **options: Any) -> AsyncIterator[Stage]:
    """A stage with a file of keys, in a folder that a link leads to, as of a mounted secret."""
    mounted(tmp_path, "one", *lines)
    file = tmp_path / "data" / "keys.jsonl"
    on_revoke = options.pop("on_revoke", "finish")
    keys = KeySettings(str(file), on_revoke=on_revoke)
    async with stage(script, keys=keys, **options) as here:
        yield here


async def test_a_key_comes_in_by_either_header_and_its_unit_gets_its_own_or_none(tmp_path: Path) -> None:
    async with keyed(tmp_path, STREAM, line()) as here, here.client() as client:
        for head in (BEARER, f"x-api-key: {KEY}\r\n"):
            assert (await client.ask(chat(head=head))).status == 200
        for request in here.unit.requests:
            assert (request.get("authorization"), request.get("x-api-key")) == (None, None)
        state = next(iter(here.plane.board))
        here.plane.configure(Fleet(units=(replace(state.unit, api_key="unit-key"),)))
        assert (await client.ask(chat(head=BEARER))).status == 200
        assert here.unit.requests[2].get("authorization") == "Bearer unit-key"


async def test_a_key_that_a_client_has_put_elsewhere_does_not_count_and_does_not_reach_a_unit(
    tmp_path: Path,
) -> None:
    misplaced = f"x_api_key: {KEY}\r\nCookie: key={KEY}\r\nSec-WebSocket-Protocol: realtime, key.{KEY}\r\n"
    async with keyed(tmp_path, STREAM, line()) as here, here.client() as client:
        for query in ("?api_key=", "?a=1&KEY=", "?access%5Ftoken="):
            for head, status in ((BEARER + misplaced, 200), (misplaced, 401)):
                target = f"completions{query}{KEY} HTTP".encode()
                asked = chat(head=head).replace(b"completions HTTP", target)
                assert (await client.ask(asked)).status == status
        assert len(here.unit.requests) == 3
        for request in here.unit.requests:
            assert KEY not in request.target + str(request.fields)
            assert request.get("sec-websocket-protocol") == "realtime"
        assert here.unit.requests[1].target.endswith("completions?a=1")


async def test_without_a_key_that_counts_nothing_is_served_but_health(tmp_path: Path) -> None:
    old = line("old", "sk-old", expires="2020-01-01")
    async with keyed(tmp_path, STREAM, line(), old) as here, here.client() as client:
        for head, expected in (
            ("", "invalid_api_key"),
            (bearer("sk-alic"), "invalid_api_key"),
            ("Authorization: Basic sk-alice\r\n", "invalid_api_key"),
            (bearer("sk-old"), "key_expired"),
        ):
            for request in (chat(head=head), get("/v1/models", head), get("/nowhere", head)):
                reply = await client.ask(request)
                assert (reply.status, reply.error["code"]) == (401, expected)
                assert reply.get("www-authenticate") == "Bearer"
        assert (await client.ask(get("/health"))).status == 200
        assert (await client.ask(get("/v1/models", BEARER))).status == 200
        assert here.received == 0


async def test_a_key_is_for_its_models_and_its_priorities(tmp_path: Path) -> None:
    others = line("other", "sk-other", models=["large"]), line("last", "sk-last", priority=[10, 100])
    lines = [line(models=["tiny"], priority=[0, 5]), *others]
    async with keyed(tmp_path, STREAM, *lines) as here, here.client() as client:
        reply = await client.ask(chat(head=bearer("sk-other")))
        assert (reply.status, reply.error["code"]) == (403, "model_not_allowed")
        # Anthropic's clients get Anthropic's errors.
        for key, status, kind in (("no", 401, "authentication_error"), ("other", 403, "permission_error")):
            body = b'{"model": "tiny", "messages": []}'
            reply = await client.ask(post(body, f"x-api-key: sk-{key}\r\n", "/v1/messages"))
            assert (reply.status, reply.json["error"]["type"]) == (status, kind)
        for request in (
            chat(head=BEARER, priority=-1),
            chat(head=f"{BEARER}x-priority: 6\r\n"),
            # The gate would go by the header, and the engine by the body, which reads all of these.
            chat(head=f"{BEARER}x-priority: 5\r\n", priority=-100),
            chat(head=BEARER, priority="-100"),
            chat(head=BEARER, priority=-100.0),
        ):
            reply = await client.ask(request)
            assert (reply.status, reply.error["code"]) == (403, "priority_not_allowed")
        assert (await client.ask(chat(head=BEARER, priority=5))).status == 200
        assert here.received == 1
        # A key that goes last needs no priority but a header's.
        last = bearer("sk-last")
        assert (await client.ask(chat(head=f"{last}x-priority: 20\r\n"))).status == 200
        assert (await client.ask(chat(head=f"{last}x-priority: 20\r\n", priority=9))).status == 403
        assert (await client.ask(chat(head=last))).status == 403


async def test_a_key_for_some_models_is_for_no_request_without_one(tmp_path: Path) -> None:
    """Its engine would take its only model, or one that stands where the gate does not look."""
    lines = [line(models=["tiny"]), line("any", "sk-any")]
    async with keyed(tmp_path, STREAM, *lines, pass_unlisted=True) as here, here.client() as client:
        for path in ("/v1/chat/completions", "/v1/audio/transcriptions", "/v1/batches", "/tokenize"):
            reply = await client.ask(post(b'{"messages": []}', BEARER, path))
            assert (reply.status, reply.error["code"]) == (403, "model_not_allowed")
        assert here.received == 0
        assert (await client.ask(get("/v1/models", BEARER))).status == 200
        reply = await client.ask(post(b'{"messages": []}', bearer("sk-any")))
        assert reply.status == 200


async def test_a_key_for_some_models_is_for_these_in_paths_and_in_forms(tmp_path: Path) -> None:
    """Triton goes by its path, whatever a body says."""
    body = b'{"model": "tiny", "text_input": "hi"}'
    async with keyed(tmp_path, whole(), line(models=["tiny"])) as here, here.client() as client:
        for name in ("large", "tin%79s"):
            reply = await client.ask(post(body, BEARER, f"/v2/models/{name}/generate"))
            assert (reply.status, reply.error["code"]) == (403, "model_not_allowed")
        for given, status in ((body, 200), (b'{"text_input": "hi"}', 200), (b'{"model": "large"}', 403)):
            reply = await client.ask(post(given, BEARER, "/v2/models/tiny/generate"))
            assert reply.status == status
        for model, status in (("tiny", 200), ("large", 403)):
            sent = form([field("x", b"\0" * 1000), field("model", model.encode())])
            kind = post(sent, f"{BEARER}X: y\r\n", "/v1/audio/translations").replace(
                b"Content-Type: application/json\r\n", lines()[0]
            )
            assert (await client.ask(kind)).status == status
            for path in (f"/v1/models/{model}", f"/v2/models/{model}/ready"):
                assert (await client.ask(get(path, BEARER))).status == status
        assert here.received == 5


async def test_a_key_for_some_models_reaches_no_other_that_its_request_names_elsewhere(
    tmp_path: Path,
) -> None:
    async with keyed(tmp_path, STREAM, line(models=["tiny", "small"])) as here, here.client() as client:
        for more in ({"lora_path": "large"}, {"fallbacks": ["large"]}, {"extra_body": {"model": "large"}}):
            reply = await client.ask(chat(head=BEARER, **more))
            assert (reply.status, reply.error["code"]) == (403, "model_not_allowed")
        body = b'{"model": "tiny", "messages": []}'
        reply = await client.ask(post(body, BEARER, "/v1/chat/completions?model=large"))
        assert (reply.status, reply.error["code"]) == (403, "model_not_allowed")
        reply = await client.ask(post(b'{"model": "tiny", "model": "large", "messages": []}', BEARER))
        assert (reply.status, reply.error["param"]) == (400, "model")
        assert here.received == 0
        assert (await client.ask(chat(head=BEARER, lora_path="small"))).status == 200
        assert (await client.ask(post(body, BEARER, "/v1/chat/completions?model=tiny"))).status == 200


async def test_a_key_falls_back_to_none_but_its_models_and_has_its_tenant(tmp_path: Path) -> None:
    lines = [line(models=["large", "tiny"], tenant="team"), line("one", "sk-one", models=["large"])]
    fallbacks = {"large": ("other", "tiny")}
    async with keyed(tmp_path, STREAM, *lines, fallback=fallbacks) as here, here.client() as client:
        asked: list[str] = []
        acquire = here.gateway.services.dispatcher.acquire
        here.gateway.services.dispatcher.acquire = lambda request, waiter: (  # type: ignore[method-assign]
            asked.append(request.ask.tenant) or acquire(request, waiter)  # type: ignore[func-returns-value]
        )
        reply = await client.ask(
            chat(model="large", head=f"{BEARER}x-gateway-inference-fairness-id: rich\r\n")
        )
        assert set(asked) == {"team"}, "that of the key, whatever the client says"
        assert (reply.status, reply.get("x-cellgate-model")) == (200, "tiny")
        assert (await client.ask(chat(model="large", head=bearer("sk-one")))).status == 404


def endless(release: asyncio.Event) -> Script:
    """Streams a token, and the rest when it may."""

    async def play(request: Received) -> None:
        request.write(SSE_HEAD + chunk(TOKENS[0]))
        await release.wait()
        request.write(chunk(TOKENS[1]) + b"0\r\n\r\n")

    return play


@pytest.mark.parametrize("on_revoke", ["finish", "end"])
async def test_a_revoked_key_is_refused_within_a_second_and_its_streams_end_by_policy(
    on_revoke: str, tmp_path: Path
) -> None:
    release = asyncio.Event()
    lines = line(), line("bob", "sk-bob")
    async with (
        keyed(tmp_path, endless(release), *lines, on_revoke=on_revoke) as here,
        here.client() as client,
        here.client() as other,
    ):
        client.send(chat(head=BEARER))
        await client.event()
        mounted(tmp_path, "two", lines[1])
        while (await other.ask(get("/v1/models", BEARER))).status != 401:  # noqa: ASYNC110 - nobody tells the test.
            await asyncio.sleep(0.01)
        if on_revoke == "end":
            rest = await client.rest()
            assert b'"key_revoked"' in rest
            assert not rest.endswith(b"0\r\n\r\n")
            await here.unit.connections[0].until_gone()
        release.set()
        if on_revoke == "finish":
            assert TOKENS[1] in await client.event()


async def test_a_file_with_a_mistake_changes_nothing_but_is_told(tmp_path: Path) -> None:
    async with keyed(tmp_path, STREAM, line()) as here, here.client() as client:
        (tmp_path / "data" / "keys.jsonl").write_text(line() + '\n{"key": "b"}\n')
        await here.until(lambda: "keys_refused" in [each["kind"] for each in here.plane.events.last()])
        assert (await client.ask(chat(head=BEARER))).status == 200
        assert [event["line"] for event in here.plane.events.last() if event["kind"] == "keys_refused"] == [
            "the file of keys has a mistake, and the keys stay as they were: "
            f"{tmp_path}/data/keys.jsonl:2: sha256: required field is missing"
        ]
        page = (await here.plane.metrics.render()).decode()
        assert "cellgate_key_file_refused 1.0" in page


# Limits.


async def test_a_limit_of_requests_is_told_and_kept(tmp_path: Path) -> None:
    limited = line(limits={"requests_per_minute": 2})
    async with keyed(tmp_path, whole(USAGE), limited) as here, here.client() as client:
        replies = [await client.ask(chat(stream=False, head=BEARER)) for _ in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 429]
        assert [reply.get("x-ratelimit-remaining-requests") for reply in replies] == ["1", "0", "0"]
        assert replies[2].get("x-ratelimit-limit-requests") == "2"
        assert 1 <= int(replies[2].get("retry-after") or 0) <= 60
        assert replies[2].error["code"] == "rate_limit_exceeded"
        assert here.received == 2


async def test_tokens_are_charged_by_estimate_and_settled_by_usage(tmp_path: Path) -> None:
    lines = line(tenant="team"), '{"tenant": "team", "limits": {"tokens_per_minute": 110}}'
    async with keyed(tmp_path, whole(USAGE), *lines) as here, here.client() as client:
        replies = [await client.ask(chat(stream=False, max_tokens=12, head=BEARER)) for _ in range(4)]
        assert [reply.status for reply in replies] == [200, 200, 200, 429]
        page = (await here.plane.metrics.render()).decode()
        assert 'cellgate_tenant_tokens_total{kind="prompt",model="tiny",tenant="team"} 90.0' in page
        assert 'cellgate_tenant_tokens_total{kind="completion",model="tiny",tenant="team"} 36.0' in page
        assert 'cellgate_limited_requests_total{limit="tokens_per_minute",tenant="team"} 1.0' in page


@pytest.mark.parametrize(
    ("limits", "asks", "statuses", "code"),
    [
        ({"tokens_per_minute": 100}, {"max_tokens": 101, "prompt": "x" * 4000}, [429], "tokens"),
        ({"cost_per_month": 0.05}, {"max_tokens": 12}, [200, 429], "insufficient_quota"),
    ],
    ids=["more than a minute has", "a budget of money"],
)
async def test_what_waiting_does_not_help_is_told_so(
    tmp_path: Path, limits: dict[str, float], asks: dict[str, Any], statuses: list[int], code: str
) -> None:
    lines = line(limits=limits), '{"model": "tiny", "prompt": 1000, "completion": 2000}'
    async with keyed(tmp_path, whole(USAGE), *lines) as here, here.client() as client:
        replies = [await client.ask(chat(stream=False, head=BEARER, **asks)) for _ in statuses]
        assert [reply.status for reply in replies] == statuses
        assert replies[-1].get("x-should-retry") == "false"
        if code == "tokens":
            assert "more than key alice may use in a minute" in replies[-1].error["message"]
        else:
            assert replies[-1].error["code"] == code


async def test_the_usage_log_has_a_line_for_each_request_that_was_charged(tmp_path: Path) -> None:
    log = tmp_path / "usage.jsonl"
    log.write_bytes(b'{"cut": ')
    lines = line(tenant="team"), '{"model": "tiny", "prompt": 10, "completion": 20}'
    async with keyed(tmp_path, whole(USAGE), *lines, usage_log=str(log)) as here, here.client() as client:
        await client.ask(chat(stream=False, head=f"{BEARER}x-request-id: r-1\r\n"))
        await client.ask(chat(stream=False, model="none", head=BEARER))
        await here.until(lambda: len(log.read_bytes().splitlines()) == 3)
        cut, one, other = log.read_bytes().splitlines()
        assert cut == b'{"cut": '
        row = orjson.loads(one)
        del row["time"]
        assert row == {
            "request_id": "r-1",
            "key": "alice",
            "tenant": "team",
            "model": "tiny",
            "route": "chat",
            "status": 200,
            "prompt_tokens": 30,
            "completion_tokens": 12,
            "is_estimated": False,
            "cost": 0.00054,
        }
        row = orjson.loads(other)
        assert (row["status"], row["prompt_tokens"], row["completion_tokens"]) == (404, 0, 0)


LARGE = b'{"model": "tiny", "prompt": "%b"}' % (b"x" * (1 << 20))


async def test_a_key_without_a_request_left_is_refused_before_its_body_is_read(tmp_path: Path) -> None:
    release = asyncio.Event()
    lines = line(limits={"requests_per_minute": 1}), line("busy", "sk-busy", limits={"in_flight": 1})
    async with keyed(tmp_path, endless(release), *lines) as here, here.client() as first:
        asking = asyncio.create_task(first.ask(chat(head=bearer("sk-busy"))))
        await here.until(lambda: here.plane.board.in_flight == 1)
        async with here.client() as client, here.client() as late:
            # As many in flight as it may.
            assert (await client.ask(chat(head=bearer("sk-busy")))).status == 429
            reply = await late.ask(head_of(post(LARGE, bearer("sk-busy"))))
            assert (reply.status, reply.get("retry-after")) == (429, "1")
        release.set()
        await asking
        here.unit.script = whole(USAGE)
        async with here.client() as client, here.client() as late:
            assert (await client.ask(chat(head=bearer("sk-busy")))).status == 200
            assert (await client.ask(post(LARGE, BEARER))).status == 200
            assert (await client.ask(chat(head=BEARER))).status == 429
            reply = await late.ask(head_of(post(LARGE, BEARER)))
            assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
            assert 1 <= int(reply.get("retry-after") or 0) <= 60
        assert here.plane.accounting is not None
        counts = here.plane.accounting.counts._refused
        assert counts["alice", "requests_per_minute"] == 2


async def test_bodies_that_wait_to_be_read_when_their_key_is_used_up_are_not_read(tmp_path: Path) -> None:
    limited = line(limits={"requests_per_minute": 1})
    async with keyed(tmp_path, whole(USAGE), limited) as here:
        read, go_on = here.gateway.services.large_reads._read, asyncio.Event()
        why_nots: list[Failure | None] = []

        async def held(body: bytes, payer: str, why_not: WhyNot, route: str) -> Any:
            await go_on.wait()
            why_nots.append(why_not())
            return why_nots[-1] or await read(body, payer, why_not, route)

        here.gateway.services.large_reads._read = held
        async with here.client() as client, here.client() as late:
            asking = asyncio.create_task(late.ask(post(LARGE, BEARER)))
            await here.until(lambda: len(here.gateway.services.large_reads) == 1)
            assert (await client.ask(chat(stream=False, head=BEARER))).status == 200
            assert (await client.ask(chat(stream=False, head=BEARER))).status == 429
            go_on.set()
            assert (await asking).status == 429
        assert [failure is not None for failure in why_nots] == [True]


def head_of(request: bytes) -> bytes:
    """Its head alone: the body never comes."""
    return request.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


async def test_a_large_body_of_nobody_whose_key_counts_is_not_read(tmp_path: Path) -> None:
    expired = line("old", "sk-old", expires="2020-01-01T00:00:00Z")
    async with keyed(tmp_path, STREAM, line(), expired) as here:
        wanted = (
            ("", "invalid_api_key"),
            (bearer("sk-nobody"), "invalid_api_key"),
            ("x-api-key: sk-old\r\n", "key_expired"),
        )
        for shown, why in wanted:
            for head in (head_of(post(LARGE, shown)), _chunked(shown)):
                async with here.client() as client:
                    reply = await client.ask(head)
                assert (reply.status, reply.error["code"]) == (401, why)
                assert reply.get("www-authenticate") is not None or why == "key_expired"


def _chunked(shown: str) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: gate\r\n{shown}Transfer-Encoding: chunked\r\n\r\n"
    return head.encode()
