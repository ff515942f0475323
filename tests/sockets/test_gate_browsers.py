"""What pages of other sites, and peers that are not trusted, get of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from cellgate.proxy.config.settings import Cors
from tests.wire.client import chat, get
from tests.wire.stage import live, stage
from tests.wire.unit import STREAM, whole

APP = "https://app.example"
PREFLIGHT = f"Origin: {APP}\r\nAccess-Control-Request-Method: POST\r\n"


@live
async def test_a_page_of_a_listed_origin_reads_answers_and_errors() -> None:
    async with stage(STREAM, cors=Cors((APP,))) as here, here.client() as client:
        for request in (chat(head=f"Origin: {APP}\r\n"), chat(model="none", head=f"Origin: {APP}\r\n")):
            assert (await client.ask(request)).get("access-control-allow-origin") == APP
        other = await client.ask(chat(head="Origin: https://evil.example\r\n"))
        assert (other.status, other.get("access-control-allow-origin")) == (200, None)
        assert all(received.get("origin") is None for received in here.unit.requests)


@live
async def test_a_preflight_reaches_no_unit() -> None:
    async with stage(STREAM, cors=Cors((APP,))) as here, here.client() as client:
        reply = await client.ask(get("/v1/chat/completions", PREFLIGHT, method="OPTIONS"))
        assert (reply.status, reply.get("access-control-allow-origin")) == (200, APP)
        assert (await client.ask(chat())).status == 200
        assert here.received == 1


ENGINES = (
    "Access-Control-Allow-Origin: *\r\nAccess-Control-Allow-Credentials: true\r\n"
    "Access-Control-Expose-Headers: x-a\r\nVary: Origin\r\nX-Kept: 1\r\n"
)


@pytest.mark.parametrize("origins", [(APP,), ("*",)])
@live
async def test_what_the_engine_says_of_pages_is_replaced(origins: tuple[str, ...]) -> None:
    """Browsers refuse an answer with two lines. llama.cpp and TGI send their own."""
    stream = STREAM.replace(b"Transfer", ENGINES.encode() + b"Transfer", 1)
    for script in (stream, whole(head=ENGINES)):
        async with stage(script, cors=Cors(origins)) as here, here.client() as client:
            reply = await client.ask(chat(head=f"Origin: {APP}\r\n"))
            assert reply.get("access-control-allow-origin") == origins[0]
            assert reply.get("access-control-allow-credentials") is None
            assert "x-request-id" in (reply.get("access-control-expose-headers") or "")
            assert reply.all("vary") == (["origin"] if origins == (APP,) else [])
            assert reply.get("x-kept") == "1"
            other = await client.ask(chat(head="Origin: https://evil.example\r\n"))
            assert other.get("access-control-allow-origin") == (None if origins == (APP,) else "*")
        async with stage(script) as here, here.client() as client:
            reply = await client.ask(chat(head=f"Origin: {APP}\r\n"))
            assert (reply.get("access-control-allow-origin"), reply.get("vary")) == ("*", "Origin")


FROM_APP = f"Origin: {APP}\r\n"
REFUSED_EARLY: dict[str, tuple[int, bytes]] = {
    "a body too large": (
        413,
        chat(head=f"{FROM_APP}X-A: b\r\n").replace(b"ength: ", b"ength: 99999999999", 1),
    ),
    "a head too large": (431, chat(head=f"{FROM_APP}X-A: {'a' * 200_000}\r\n")),
    "too many lines": (431, chat(head=FROM_APP + "X-A: b\r\n" * 2000)),
    "two hosts": (400, chat(head=f"{FROM_APP}Host: b\r\n")),
    "a coding that is not known": (400, chat(head=f"{FROM_APP}Transfer-Encoding: foo\r\n")),
}


@pytest.mark.parametrize("origins", [(APP, "https://b.example"), ("*",)])
@pytest.mark.parametrize("what", REFUSED_EARLY)
@live
async def test_a_page_reads_why_its_request_was_not_even_read(what: str, origins: tuple[str, ...]) -> None:
    status, request = REFUSED_EARLY[what]
    async with stage(STREAM, cors=Cors(origins)) as here, here.client() as client:
        reply = await client.ask(request)
        assert (reply.status, reply.get("access-control-allow-origin")) == (status, origins[0])
        assert "x-request-id" in (reply.get("access-control-expose-headers") or "")
        assert here.received == 0


@live
async def test_without_rules_nothing_is_said_and_units_see_the_origin() -> None:
    async with stage(STREAM) as here, here.client() as client:
        reply = await client.ask(chat(head=f"Origin: {APP}\r\n"))
        assert (reply.status, reply.get("access-control-allow-origin")) == (200, None)
        assert here.unit.requests[0].get("origin") == APP
        assert (await client.ask(get("/v1/models", PREFLIGHT, method="OPTIONS"))).status == 405


@pytest.mark.parametrize(("shown_to", "shown"), [("trusted", False), ("all", True)])
@live
async def test_strangers_are_not_told_of_units(
    shown_to: Any, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(STREAM, internal_headers=shown_to) as here:
        monkeypatch.setattr(here.gateway.peers, "trusts", lambda _peer: False)
        async with here.client() as client:
            reply = await client.ask(chat())
            told = [reply.get(name) is not None for name in ("x-cellgate-unit", "endpoint-load-metrics-bin")]
            assert told == [shown, shown]
            assert reply.get("x-request-id") is not None
    async with stage(STREAM) as here, here.client() as client:
        assert (await client.ask(chat())).get("x-cellgate-unit") == "u0"
