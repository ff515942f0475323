"""What the admin port shows and does: status, signals and operations."""

from __future__ import annotations

import asyncio
import http.client
import time
from urllib.parse import urlsplit

import aiohttp
import pytest

from cellgate.proxy.admin import pages
from cellgate.proxy.observe.events import Action
from cellgate.router.nouns import Ask, Evidence, Load, Sign, Strength
from cellgate.router.poison import Ban
from tests.sockets.admin_stage import RELAYED, admin_port
from tests.wire.stage import until


async def test_some_pages_are_for_everyone_and_what_the_status_page_shows_is_not() -> None:
    async with admin_port(token="t0ken") as port:
        async with port.client.get(port.url + "/livez") as reply:
            assert (reply.status, await reply.text()) == (200, "ok\n")
        async with port.client.get(port.url + "/metrics") as reply:
            assert reply.headers["Content-Type"].startswith("text/plain; version=")
            assert 'cellgate_in_flight{unit="a1"} 0.0\n' in await reply.text()
        async with port.client.get(port.url + "/", headers=RELAYED) as reply:
            assert (reply.status, reply.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
            assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
        assert (await port.get("/status", RELAYED))[0] == 401
        assert (await port.get("/status", RELAYED | {"Authorization": "Bearer t0ken"}))[0] == 200


async def test_status_has_each_unit_in_a_word_and_each_node_as_it_was_last_said_to_be() -> None:
    async with admin_port() as port:
        port.observe("a1", Sign.GOOD, Strength.STRONG, "canary", "one token in 40 ms")
        port.board.observe(
            Evidence("a1", Sign.BAD, Strength.FATAL, "agent", "gone: process 7", port.now, node="a1-1")
        )
        port.board.open("a1", Ask(prompt_bytes=16_000), port.now, retry=False)
        _, glance = await port.get("/status")
        assert (glance["ready"], glance["panic"], glance["waiting"], glance["in_flight"]) == (
            False,
            False,
            0,
            1,
        )
        unit = glance["units"][0]
        assert (unit["standing"], unit["reason"]) == ("down", "gone: process 7 (source agent, node a1-1)")
        # A unit of which nothing is known yet is taken to prefill 4,000 tokens, of 4 bytes each, a second.
        assert unit["load_s"] == pytest.approx(1.0)
        assert unit["nodes"] == [
            {"name": "a1-0", "role": "leader", "state": "unseen", "reason": ""},
            {"name": "a1-1", "role": "follower", "state": "bad", "reason": "gone: process 7"},
        ]


def ready(is_ready: bool, *, panic: bool = False) -> dict[str, bool]:
    """The first lines of /readyz."""
    return {"ready": is_ready, "stopping": False, "full": False, "panic": panic}


async def test_readyz_needs_one_usable_unit_and_says_why_others_are_not() -> None:
    async with admin_port() as port:
        starting = {"usable": False, "verdict": "starting", "reason": "no probe has answered yet"}
        assert await port.get("/readyz") == (
            503,
            {**ready(False), "usable_units": 0, "units": {"a1": starting, "a2": starting}},
        )
        port.observe("a2", Sign.GOOD, Strength.STRONG, "canary", "one token in 40 ms")
        assert await port.get("/healthz/unit/a2") == (
            200,
            {"unit": "a2", "reason": "one token in 40 ms (source canary)"},
        )
        up = {"usable": True, "verdict": "up", "reason": "one token in 40 ms (source canary)"}
        assert await port.get("/readyz") == (
            200,
            {**ready(True), "usable_units": 1, "units": {"a1": starting, "a2": up}},
        )
        # Health of one unit is 200, 503 or 404.
        assert (await port.get("/healthz/unit/a1"))[0] == 503
        await port.post("/units/a1/drain")
        for name, why in (("a1", "drained by an operator"), ("b7", "no unit is named 'b7'")):
            assert await port.get(f"/healthz/unit/{name}") == (404, {"unit": name, "reason": why})
        # A stopping gate is not ready, but alive.
        port.stopping = True
        status, body = await port.get("/readyz")
        assert (status, body["ready"], body["stopping"], body["usable_units"]) == (503, False, True, 1)
        async with port.client.get(port.url + "/livez") as reply:
            assert reply.status == 200


SHOWN = {
    "name": "a1",
    "cell": "a",
    "url": "http://127.0.0.1:8101",
    "role": "both",
    "links": [],
    "verdict": "down",
    "usable": False,
    "drained": False,
    "draining": False,
    "hold": None,
    "restart_suspected": False,
    "degraded": 0.0,
    "odd_answers": False,
    "build": {"fingerprint": "", "version": "", "other_builds": []},
    "since_s": 2.0,
    "standing_s": 2.0,
    "reason": "connection refused (source request)",
    "evidence": [
        {
            "sign": "bad",
            "strength": "fatal",
            "source": "request",
            "node": None,
            "reason": "connection refused",
            "age_s": 2.0,
        }
    ],
    "in_flight": 0,
    "max_in_flight": 256,
    "weight": 2.0,
    "load": {"running": 3, "waiting": 1, "kv_use": 0.5, "age_s": 1.0},
    "routing": {
        "prefill_tokens_s": 4000.0,
        "latency_s": 0.0,
        "prefill_samples": 0,
        "step_s": 0.02,
        "bytes_per_token": 4.0,
        "seats": None,
        "kv_tokens": 0,
        "queued_tokens": 0,
        "backlog_s": 0.0,
        "prefix_blocks": 0,
        "prefix_blocks_max": 3906,
        "prefix_trust": 1.0,
        "error_share": 0.0,
    },
    "models": ["tiny"],
    "nodes": [{"name": "a1-0", "role": "leader"}, {"name": "a1-1", "role": "follower"}],
}
"""A unit that has refused a connection 2 s ago, as /units shows it."""


async def test_a_unit_is_shown_with_the_evidence_behind_its_verdict() -> None:
    async with admin_port() as port:
        port.observe("a1", Sign.BAD, Strength.FATAL, "request", "connection refused")
        port.board.report(Load("a1", 101.0, running=3, waiting=1, kv_use=0.5))
        port.now = 102.0
        unit = (await port.get("/units"))[1][0]
        assert unit == SHOWN
        status, page = await port.get("/units/a1")
        assert status == 200
        assert page.keys() > unit.keys()
        assert page["why"][0] == "a1 is down, for 2.0 s: connection refused (requests of clients, 2.0 s ago)."
        assert page["next_canary_s"] == 0.8
        assert "within 0.8 s" in page["why"][-2]
        status, units = await port.get("/units")
        assert (status, [u["name"] for u in units], units[0], units[1]["load"]) == (
            200,
            ["a1", "a2"],
            unit,
            None,
        )


async def test_the_deciding_evidence_stays_in_sight_when_newer_pieces_come() -> None:
    async with admin_port() as port:
        port.observe("a1", Sign.BAD, Strength.FATAL, "request", "connection refused")
        for i in range(9):
            port.observe("a1", Sign.BAD, Strength.WEAK, "ready", f"no answer {i}")
        _, unit = await port.get("/units/a1")
        reasons = [piece["reason"] for piece in unit["evidence"]]
        assert reasons == ["no answer 8", "no answer 7", "no answer 6", "no answer 5", "connection refused"]


# What an operator does through the admin port, and how mistakes are answered, over real sockets.


async def test_drain_and_undrain_change_rotation_and_are_events_only_when_they_change_something() -> None:
    async with admin_port() as port:
        port.observe("a1", Sign.GOOD, Strength.STRONG, "canary", "token")
        for _ in range(2):
            status, unit = await port.post("/units/a1/drain")
            assert (status, unit["drained"], unit["usable"]) == (200, True, False)
            assert unit["reason"] == "drained by an operator"
        status, unit = await port.post("/units/a1/undrain")
        assert (status, unit["drained"], unit["usable"]) == (200, False, True)
        _, events = await port.get("/events")
        assert [(e["kind"], e["unit"]) for e in events] == [
            ("flip", "a1"),
            ("drain", "a1"),
            ("undrain", "a1"),
        ]


async def test_a_change_is_published_before_its_answer_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[str] = []

    def publish(unit: str) -> None:
        # Long enough for who has an answer already to look here before the end of it.
        time.sleep(0.05)
        published.append(unit)

    async with admin_port() as port:
        drain, loop = port.board.drain, asyncio.get_running_loop()

        def drain_and_publish_soon(unit: str, *, drained: bool) -> bool:
            loop.call_soon(publish, unit)
            return drain(unit, drained=drained)

        def ask() -> list[str]:
            connection = http.client.HTTPConnection(urlsplit(port.url).netloc, timeout=5)
            connection.request("POST", "/units/a1/drain")
            assert connection.getresponse().status == 200
            seen = list(published)
            connection.close()
            return seen

        monkeypatch.setattr(port.board, "drain", drain_and_publish_soon)
        assert await asyncio.to_thread(ask) == ["a1"]


async def test_a_whole_cell_is_drained_in_one_go_and_is_one_event() -> None:
    async with admin_port() as port:
        await port.post("/units/a2/drain")
        for _ in range(2):
            status, cell = await port.post("/cells/a/drain")
            assert (status, cell["cell"]) == (200, "a")
            assert [(unit["name"], unit["drained"]) for unit in cell["units"]] == [("a1", True), ("a2", True)]
        await port.post("/cells/a/undrain")
        assert not any(state.drained for state in port.board)
        events = (await port.get("/events"))[1][1:]
        assert [(e["kind"], e["unit"], e["cell"]) for e in events] == [
            ("drain", None, "a"),
            ("undrain", None, "a"),
        ]
        assert [e["line"] for e in events] == [
            "cell a drained by 127.0.0.1: no new requests, running ones finish: a1",
            "cell a undrained by 127.0.0.1: a1, a2",
        ]
        status, body = await port.post("/cells/aa/drain")
        assert (status, body["error"]["message"]) == (404, "no cell is named 'aa'; did you mean 'a'?")
        assert (await port.get("/cells/a/drain"))[0] == 405
        assert (await port.post("/cells/a/drain", RELAYED))[0] == 403


async def test_explain_is_asked_by_parameters_or_with_a_body() -> None:
    async with admin_port() as port:
        status, found = await port.get("/explain?model=tiny&prompt_tokens=1000&priority=2")
        assert (status, found["decision"], found["ask"]["priority"]) == (200, "refused", 2)
        assert found["units"][0]["why_not"].startswith("starting: ")
        port.observe("a1", Sign.GOOD, Strength.STRONG, "canary", "token")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        async with port.client.post(port.url + "/explain?tenant=t", json=body) as reply:
            found = await reply.json()
        assert (found["decision"], found["unit"], found["ask"]["tenant"]) == ("sent", "a1", "t")
        status, answer = await port.get("/explain?tokens=1")
        assert (status, answer["error"]["code"]) == (400, "bad_request")
        assert answer["error"]["message"].startswith(
            "'tokens' is not a parameter; the parameters are: model, "
        )
        async with port.client.post(port.url + "/explain", data=b"{") as reply:
            assert reply.status == 400
            assert "not valid JSON" in (await reply.json())["error"]["message"]
        assert (await port.get("/explain", RELAYED))[0] == 403


async def test_mistakes_get_one_line_that_says_what_there_is() -> None:
    async with admin_port() as port:
        status, body = await port.get("/unit")
        assert (status, body["error"]["code"]) == (404, "not_found")
        assert body["error"]["message"].startswith(
            "unknown path /unit; the paths are: /, /livez, /readyz, /metrics, "
        )
        status, body = await port.post("/units/a11/drain")
        assert (status, body["error"]["message"]) == (404, "no unit is named 'a11'; did you mean 'a1'?")
        status, body = await port.get("/units/zebra")
        assert (status, body["error"]["message"]) == (404, "no unit is named 'zebra'; there are: a1, a2")
        status, body = await port.get("/units/a1/drain")
        assert (status, body["error"]["code"]) == (405, "method_not_allowed")
        assert body["error"]["message"] == "/units/a1/drain takes POST, not GET"


async def test_a_handler_that_fails_is_logged_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    async with admin_port() as port:
        port.board.units["a1"].weight = object()  # type: ignore[assignment]
        status, body = await port.get("/units")
        assert (status, body["error"]["code"]) == (500, "internal_server_error")
    assert "admin port: GET /units failed: TypeError" in caplog.text


async def test_refused_prompts_are_listed_and_an_operator_lets_them_be_asked_again() -> None:
    async with admin_port() as port:
        assert port.poison is not None
        for number in (1, 2, 0xABC):
            ban = Ban(number, "m", port.now, port.now + 600.0, ("a1", "a2"))
            assert port.poison.bans.add(ban)
        status, found = await port.get("/poison")
        assert (status, found["ban_s"], found["suspects"]) == (200, 600.0, 0)
        assert found["bans"][-1] == {
            "fingerprint": "0000000000000abc",
            "model": "m",
            "units": ["a1", "a2"],
            "age_s": 0.0,
            "left_s": 600.0,
            "gate": "",
        }
        assert (await port.post("/poison/0000000000000abc/clear")) == (200, {"cleared": ["0000000000000abc"]})
        assert (await port.post("/poison/0000000000000abc/clear"))[0] == 404
        assert len((await port.post("/poison/clear"))[1]["cleared"]) == 2
        assert (await port.get("/poison"))[1]["bans"] == []
        assert port.events.last()[-1]["kind"] == "poison_lifted"


# The live stream of events.


async def test_followers_get_events_as_they_happen_and_the_end_when_the_gate_goes() -> None:
    live = {"Accept": "text/event-stream"}
    async with admin_port() as port, port.client.get(port.url + "/events", headers=live) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream"
        assert (await reply.content.readuntil(b"\n\n")).startswith(b": ")
        port.observe("a1", Sign.BAD, Strength.FATAL, "request", "refused")
        event = await reply.content.readuntil(b"\n\n")
        assert event.startswith(b'id: 1\nevent: flip\ndata: {"id":1,"time":"2023-11-14T22:13:20.000Z",')
        port.events.close()
        assert await reply.content.read() == b""


async def test_stopping_does_not_wait_for_followers() -> None:
    replies: list[aiohttp.ClientResponse] = []

    async with admin_port() as port:
        replies.append(await port.client.get(port.url + "/events?follow=1"))
    assert replies[0].status == 200


async def test_a_quiet_stream_carries_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGES_HEARTBEAT_S", 0.005)

    async with admin_port() as port, port.client.get(port.url + "/events?follow=1") as reply:
        await reply.content.readuntil(b"\n\n")
        for _ in range(3):
            assert await reply.content.readuntil(b"\n\n") == b": heartbeat\n\n"
        port.events.add(Action("reload", "SIGHUP"))
        assert b"event: reload\n" in await reply.content.readuntil(b"}\n\n")


async def test_a_follower_that_leaves_is_forgotten_at_once() -> None:
    async with admin_port() as port:
        async with port.client.get(port.url + "/events?follow=1") as reply:
            await reply.content.readuntil(b"\n\n")
            assert port.events.followers == 1
        await until(lambda: port.events.followers == 0)


async def test_a_follower_that_never_reads_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellgate.proxy.admin.http.SEND_TIMEOUT_S", 0.02)

    async with admin_port() as port:
        host, number = port.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(number), limit=1024)
        writer.write(b"GET /events?follow=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b": ")
        for _ in range(40):
            port.events.add(Action("reload", "SIGHUP", detail="x" * 1_000_000))
        await until(lambda: port.events.followers == 0)
        # So that what arrived cannot be taken for all there was.
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        with pytest.raises(ConnectionResetError):
            await writer.wait_closed()
