"""The admin port over real sockets: what each path says, who may ask, and the live stream of events."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import aiohttp
import pytest
import uvloop

from cellgate.policies.prefix_affinity import PrefixAffinity
from cellgate.proxy.admin import connection, event_stream
from cellgate.proxy.admin.admin_view import AdminView
from cellgate.proxy.admin.application import admin_server
from cellgate.proxy.admin.auth import refusal
from cellgate.proxy.config.settings import HeaderNames
from cellgate.proxy.config.trusted_peers import Peers
from cellgate.proxy.control.containment import Containment
from cellgate.proxy.control.routing_explain import RoutingExplain
from cellgate.proxy.control.stored_responses import StoredResponses
from cellgate.proxy.logs.events import Action, EventLog
from cellgate.proxy.metrics.exposition import Exposition
from cellgate.proxy.metrics.metrics import Metrics
from cellgate.router.bans import Ban
from cellgate.router.board import Board
from cellgate.router.fair_queue import FairRules
from cellgate.router.nouns import Ask, Cell, Evidence, Fleet, Load, Node, Role, Rules, Sign, Strength, Unit
from cellgate.router.queue import Queue
from cellgate.router.router import Router

NODES = (Node("a1-0", Role.LEADER), Node("a1-1", Role.FOLLOWER))
FLEET = Fleet(
    (Cell("a", 2.0),),
    (
        Unit("a1", "a", "http://127.0.0.1:8101", models=("tiny",), nodes=NODES),
        Unit("a2", "a", "http://127.0.0.1:8102"),
    ),
)
RELAYED = {"X-Forwarded-For": "192.0.2.9"}
NOBODY = Peers()


@dataclass
class Port:
    """An admin port on a free port, its Board, and a client."""

    board: Board
    events: EventLog
    client: aiohttp.ClientSession
    url: str
    stopping: bool = False
    now: float = 100.0
    poison: Containment | None = None

    async def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and JSON of a GET."""
        async with self.client.get(self.url + path, headers=headers) as reply:
            return reply.status, await reply.json()

    async def post(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and JSON of a POST."""
        async with self.client.post(self.url + path, headers=headers) as reply:
            return reply.status, await reply.json()

    def observe(self, unit: str, sign: Sign, strength: Strength, source: str, reason: str) -> None:
        """Let the Board and the log of events know something."""
        consequence = self.board.observe(Evidence(unit, sign, strength, source, reason, self.now))
        if consequence.flip is not None:
            self.events.add(consequence.flip, consequence.evicted)


def run(test: Callable[[Port], Awaitable[None]], token: str | None = None) -> None:
    """Run a test against a port of its own, on the loop the gate uses."""

    async def main() -> None:
        board = Board(Rules())
        board.configure(FLEET, 90.0)
        events = EventLog(lambda: 1_700_000_000.0, 2, lambda *_: None)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as client:
            port = Port(board, events, client, "")
            none = cast("Any", None)
            port.poison = Containment(board, none, events, lambda: port.now, none, answered=len, ban_s=600.0)
            metrics = Metrics(board)
            metrics.include(Exposition(metrics, lambda: port.now, waiting=lambda: 0, connections=dict))
            router = Router(board, PrefixAffinity(), random.Random(1), Queue(FairRules()))
            choice = RoutingExplain(
                router,
                StoredResponses(board),
                HeaderNames(),
                "prefix_affinity",
                lambda: port.now,
                random.Random(1),
            )
            view = AdminView(
                board=board,
                events=events,
                metrics=metrics,
                now=lambda: port.now,
                stopping=lambda: port.stopping,
                set_drain=lambda name, drained: board.drain(name, drained=drained),
                token=token,
                peers=NOBODY,
                due_s=lambda unit, probe: {("a1", "canary"): 0.8}.get((unit, probe), math.inf),
                explain=choice.explain,
                poison=port.poison,
            )
            server = admin_server(view)
            listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
            port.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            try:
                await test(port)
            finally:
                listening.close()
                events.close()
                await server.close()

    uvloop.run(main())


def test_livez_says_ok_and_metrics_are_in_prometheus_format() -> None:
    async def check(port: Port) -> None:
        async with port.client.get(port.url + "/livez") as reply:
            assert (reply.status, await reply.text()) == (200, "ok\n")
        async with port.client.get(port.url + "/metrics") as reply:
            assert reply.headers["Content-Type"].startswith("text/plain; version=")
            assert 'cellgate_in_flight{unit="a1"} 0.0\n' in await reply.text()

    run(check)


def test_the_status_page_is_for_everyone_and_what_it_shows_is_not() -> None:
    async def check(port: Port) -> None:
        async with port.client.get(port.url + "/", headers=RELAYED) as reply:
            assert (reply.status, reply.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
            assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
        assert (await port.get("/status", RELAYED))[0] == 401
        assert (await port.get("/status", RELAYED | {"Authorization": "Bearer t0ken"}))[0] == 200

    run(check, token="t0ken")


def test_status_has_each_unit_in_a_word_and_each_node_as_it_was_last_said_to_be() -> None:
    async def check(port: Port) -> None:
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
        assert (unit["standing"], unit["reason"]) == ("down", "gone: process 7 (source agent)")
        # A unit of which nothing is known yet is taken to prefill 4,000 tokens, of 4 bytes each, a second.
        assert unit["load_s"] == pytest.approx(1.0)
        assert unit["nodes"] == [
            {"name": "a1-0", "role": "leader", "state": "unseen", "reason": ""},
            {"name": "a1-1", "role": "follower", "state": "bad", "reason": "gone: process 7"},
        ]

    run(check)


def ready(is_ready: bool, *, panic: bool = False) -> dict[str, bool]:
    """The first lines of /readyz."""
    return {"ready": is_ready, "stopping": False, "full": False, "panic": panic}


def test_readyz_needs_one_usable_unit_and_says_why_others_are_not() -> None:
    async def check(port: Port) -> None:
        starting = {"usable": False, "verdict": "starting", "reason": "no probe has answered yet"}
        assert await port.get("/readyz") == (
            503,
            {**ready(False), "usable_units": 0, "units": {"a1": starting, "a2": starting}},
        )
        port.observe("a2", Sign.GOOD, Strength.STRONG, "canary", "one token in 40 ms")
        up = {"usable": True, "verdict": "up", "reason": "one token in 40 ms (source canary)"}
        assert await port.get("/readyz") == (
            200,
            {**ready(True), "usable_units": 1, "units": {"a1": starting, "a2": up}},
        )

    run(check)


def test_a_stopping_gate_is_not_ready_but_alive() -> None:
    async def check(port: Port) -> None:
        port.observe("a1", Sign.GOOD, Strength.STRONG, "canary", "token")
        port.stopping = True
        status, body = await port.get("/readyz")
        assert (status, body["ready"], body["stopping"], body["usable_units"]) == (503, False, True, 1)
        async with port.client.get(port.url + "/livez") as reply:
            assert reply.status == 200

    run(check)


def test_a_unit_is_shown_with_the_evidence_behind_its_verdict() -> None:
    async def check(port: Port) -> None:
        port.observe("a1", Sign.BAD, Strength.FATAL, "request", "connection refused")
        port.board.report(Load("a1", 101.0, running=3, waiting=1, kv_use=0.5))
        port.now = 102.0
        unit = (await port.get("/units"))[1][0]
        assert unit == {
            "name": "a1",
            "cell": "a",
            "url": "http://127.0.0.1:8101",
            "verdict": "down",
            "usable": False,
            "drained": False,
            "restart_suspected": False,
            "degraded": 0.0,
            "since_s": 2.0,
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
        status, page = await port.get("/units/a1")
        assert status == 200
        assert page.keys() > unit.keys()
        assert page["why"][0] == "a1 is out of rotation, for 2.0 s: it is down."
        assert page["next_canary_s"] == 0.8
        assert "within 0.8 s" in page["why"][-2]
        status, units = await port.get("/units")
        assert (status, [u["name"] for u in units], units[0], units[1]["load"]) == (
            200,
            ["a1", "a2"],
            unit,
            None,
        )

    run(check)


def test_the_deciding_evidence_stays_in_sight_when_newer_pieces_come() -> None:
    async def check(port: Port) -> None:
        port.observe("a1", Sign.BAD, Strength.FATAL, "request", "connection refused")
        for i in range(9):
            port.observe("a1", Sign.BAD, Strength.WEAK, "ready", f"no answer {i}")
        _, unit = await port.get("/units/a1")
        reasons = [piece["reason"] for piece in unit["evidence"]]
        assert reasons == ["no answer 8", "no answer 7", "no answer 6", "no answer 5", "connection refused"]

    run(check)


def test_drain_and_undrain_change_rotation_and_are_events_only_when_they_change_something() -> None:
    async def check(port: Port) -> None:
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

    run(check)


def test_a_whole_cell_is_drained_in_one_go_and_is_one_event() -> None:
    async def check(port: Port) -> None:
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

    run(check)


def test_explain_is_asked_by_parameters_or_with_a_body() -> None:
    async def check(port: Port) -> None:
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
        assert answer["error"]["message"].startswith("'tokens' is no parameter of this; there are: model, ")
        async with port.client.post(port.url + "/explain", data=b"{") as reply:
            assert reply.status == 400
            assert "not valid JSON" in (await reply.json())["error"]["message"]
        assert (await port.get("/explain", RELAYED))[0] == 403

    run(check)


def test_health_of_one_unit_is_200_503_or_404() -> None:
    async def check(port: Port) -> None:
        assert (await port.get("/healthz/unit/a1"))[0] == 503
        port.observe("a1", Sign.GOOD, Strength.STRONG, "canary", "token")
        assert await port.get("/healthz/unit/a1") == (200, {"unit": "a1", "reason": "token (source canary)"})
        await port.post("/units/a1/drain")
        assert await port.get("/healthz/unit/a1") == (404, {"unit": "a1", "reason": "drained by an operator"})
        assert await port.get("/healthz/unit/b7") == (404, {"unit": "b7", "reason": "no unit is named 'b7'"})

    run(check)


def test_mistakes_get_one_line_that_says_what_there_is() -> None:
    async def check(port: Port) -> None:
        status, body = await port.get("/unit")
        assert (status, body["error"]["code"]) == (404, "not_found")
        assert body["error"]["message"].startswith(
            "there is no /unit here; there are: /, /livez, /readyz, /metrics, "
        )
        status, body = await port.post("/units/a11/drain")
        assert (status, body["error"]["message"]) == (404, "no unit is named 'a11'; did you mean 'a1'?")
        status, body = await port.get("/units/zebra")
        assert (status, body["error"]["message"]) == (404, "no unit is named 'zebra'; there are: a1, a2")
        status, body = await port.get("/units/a1/drain")
        assert (status, body["error"]["code"]) == (405, "method_not_allowed")
        assert body["error"]["message"] == "/units/a1/drain takes POST, not GET"

    run(check)


def test_a_handler_that_fails_is_logged_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    async def check(port: Port) -> None:
        port.board.units["a1"].weight = object()  # type: ignore[assignment]
        status, body = await port.get("/units")
        assert (status, body["error"]["code"]) == (500, "internal_server_error")

    run(check)
    assert "admin port: GET /units failed: TypeError" in caplog.text


def test_a_relayed_caller_sees_only_what_is_for_everyone() -> None:
    async def check(port: Port) -> None:
        for path, status in (("/livez", 200), ("/readyz", 503), ("/metrics", 200)):
            async with port.client.get(port.url + path, headers=RELAYED) as reply:
                assert reply.status == status
        for path in ("/units", "/units/a1", "/events", "/healthz/unit/a1", "/nowhere"):
            status, body = await port.get(path, RELAYED)
            assert (status, body["error"]["code"]) == (403, "forbidden")
        assert (await port.post("/units/a1/drain", RELAYED))[0] == 403
        assert not port.board.units["a1"].drained

    run(check)


def test_with_a_token_a_relayed_caller_may_do_everything_and_without_it_nothing() -> None:
    async def check(port: Port) -> None:
        for wrong in ({}, {"Authorization": "Bearer secret2"}, {"Authorization": "Basic secret"}):
            async with port.client.get(port.url + "/units", headers=RELAYED | wrong) as reply:
                assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
                assert "secret" not in await reply.text()
        assert (await port.post("/units/a1/drain", RELAYED | {"Authorization": "Bearer secret"}))[0] == 200
        assert (await port.get("/units"))[0] == 200

    run(check, token="secret")


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:192.0.2.1", False),
        ("192.0.2.1", False),
        ("fe80::1%eth0", False),
        ("", False),
        (None, False),
        ("localhost", False),
    ],
)
def test_who_counts_as_this_machine(peer: str | None, local: bool) -> None:
    assert (refusal("GET", "/units", peer, {}, None, NOBODY) is None) is local
    assert (refusal("POST", "/units/a1/drain", peer, {}, "token", NOBODY) is None) is local


def test_only_reading_is_for_everyone() -> None:
    for path in ("/livez", "/readyz", "/metrics"):
        assert refusal("GET", path, "192.0.2.1", {}, None, NOBODY) is None
        assert refusal("HEAD", path, "192.0.2.1", {}, None, NOBODY) is None
        assert refusal("POST", path, "192.0.2.1", {}, None, NOBODY) is not None


@pytest.mark.parametrize(
    "path", ["/units", "/units/a1", "/events", "/status", "/healthz/unit/a1", "/livez/", "//livez", "/x"]
)
def test_all_else_is_for_trusted_networks_and_for_who_has_the_token(path: str) -> None:
    peers = Peers(["10.0.0.0/8"])
    assert refusal("GET", path, "10.1.2.3", {}, None, peers) is None
    assert refusal("GET", path, "::ffff:10.1.2.3", {}, None, peers) is None
    assert refused("GET", path, "11.1.2.3", {}, None, peers) is HTTPStatus.FORBIDDEN
    assert refused("GET", path, "11.1.2.3", {}, "right", peers) is HTTPStatus.UNAUTHORIZED
    assert refused("GET", path, "10.1.2.3", RELAYED, None, peers) is HTTPStatus.FORBIDDEN
    for given in ("Bearer right", "bearer  right"):
        assert refusal("GET", path, "11.1.2.3", {"Authorization": given}, "right", peers) is None
    for given in ("Bearer wrong", "Bearer righ", "Basic right", "right", "Bearer \udcff", "Bearer "):
        headers = {"Authorization": given}
        assert refused("GET", path, "11.1.2.3", headers, "right", peers) is HTTPStatus.UNAUTHORIZED


@pytest.mark.parametrize("peer", ["127.0.0.1", "10.1.2.3", "192.0.2.1"])
@pytest.mark.parametrize("token", [None, "right"])
@pytest.mark.parametrize("given", ["Bearer wrong", "bearer  righ", "Bearer ", "Bearer"])
def test_a_token_that_is_shown_and_wrong_is_refused_from_anywhere(
    peer: str, token: str | None, given: str
) -> None:
    asked = ("POST", "/units/a1/drain", peer, {"Authorization": given}, token, Peers(["10.0.0.0/8"]))
    assert refused(*asked) is HTTPStatus.UNAUTHORIZED
    right = {"Authorization": "Bearer right"}
    assert (refusal("POST", "/units/a1/drain", peer, right, token, NOBODY) is None) is (token == "right")


def test_what_is_for_everyone_needs_no_right_token() -> None:
    wrong = {"Authorization": "Bearer of another"}
    assert refusal("GET", "/metrics", "192.0.2.1", wrong, "right", NOBODY) is None
    # Another scheme is no token of ours: a proxy or a browser has put it there.
    assert refusal("GET", "/units", "127.0.0.1", {"Authorization": "Basic x"}, "right", NOBODY) is None


def refused(*asked: Any) -> HTTPStatus:
    """The status of a refusal."""
    no = refusal(*asked)
    assert no is not None
    return no[0]


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(given: bytes, right: bytes) -> bool:
        compared.append((given, right))
        return False

    monkeypatch.setattr("hmac.compare_digest", compare)
    refusal("GET", "/units", "192.0.2.1", {"Authorization": "Bearer wrong"}, "right", NOBODY)
    assert compared == [(b"wrong", b"right")]


def test_followers_get_events_as_they_happen_and_the_end_when_the_gate_goes() -> None:
    async def check(port: Port) -> None:
        async with port.client.get(port.url + "/events", headers={"Accept": "text/event-stream"}) as reply:
            assert reply.headers["Content-Type"] == "text/event-stream"
            assert (await reply.content.readuntil(b"\n\n")).startswith(b": ")
            port.observe("a1", Sign.BAD, Strength.FATAL, "request", "refused")
            event = await reply.content.readuntil(b"\n\n")
            assert event.startswith(b'id: 1\nevent: flip\ndata: {"id":1,"time":"2023-11-14T22:13:20.000Z",')
            port.events.close()
            assert await reply.content.read() == b""

    run(check)


def test_stopping_does_not_wait_for_followers() -> None:
    replies: list[aiohttp.ClientResponse] = []
    started = time.monotonic()

    async def check(port: Port) -> None:
        replies.append(await port.client.get(port.url + "/events?follow=1"))

    run(check)
    assert replies[0].status == 200
    assert time.monotonic() - started < 20.0


def test_a_quiet_stream_carries_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "HEARTBEAT_S", 0.005)

    async def check(port: Port) -> None:
        async with port.client.get(port.url + "/events?follow=1") as reply:
            await reply.content.readuntil(b"\n\n")
            for _ in range(3):
                assert await reply.content.readuntil(b"\n\n") == b": heartbeat\n\n"
            port.events.add(Action("reload", "SIGHUP"))
            assert b"event: reload\n" in await reply.content.readuntil(b"}\n\n")

    run(check)


def test_a_follower_that_leaves_is_forgotten_at_once() -> None:
    async def check(port: Port) -> None:
        async with port.client.get(port.url + "/events?follow=1") as reply:
            await reply.content.readuntil(b"\n\n")
            assert port.events.followers == 1
        await until(lambda: port.events.followers == 0)

    run(check)


def test_a_follower_that_never_reads_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SEND_TIMEOUT_S", 0.02)

    async def check(port: Port) -> None:
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

    run(check)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("127.0.0.1:9901", True),
        ("localhost:9901", True),
        ("[::1]:9901", True),
        ("10.0.0.1:9901", True),
        ("evil.example:9901", False),
        ("127.0.0.1.evil.example", False),
    ],
)
def test_a_name_made_to_point_at_this_machine_opens_nothing(host: str, is_here: bool) -> None:
    asked = "GET", "/units", "127.0.0.1", {"Host": host}, "token", NOBODY
    assert (refusal(*asked) is None) is is_here


def test_callers_of_trusted_networks_may_use_names() -> None:
    peers = Peers(("10.0.0.0/8",))
    assert refusal("GET", "/units", "10.1.2.3", {"Host": "gate.cells.svc:9901"}, "token", peers) is None


def test_refused_prompts_are_listed_and_an_operator_lets_them_be_asked_again() -> None:
    async def check(port: Port) -> None:
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

    run(check)


def test_who_may_not_drain_may_not_see_or_clear_refused_prompts() -> None:
    async def check(port: Port) -> None:
        assert (await port.get("/poison", RELAYED))[0] == 401
        assert (await port.post("/poison/clear", RELAYED))[0] == 401

    run(check, token="t0ken")
