"""What an operator does through the admin port, and how mistakes are answered, over real sockets."""

from __future__ import annotations

import asyncio
import http.client
import time
from urllib.parse import urlsplit

import pytest

from cellgate.router.nouns import Sign, Strength
from cellgate.router.poison import Ban
from tests.sockets.admin_stage import RELAYED, Port, run


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


def test_a_change_is_published_before_its_answer_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[str] = []

    def publish(unit: str) -> None:
        # Long enough for who has an answer already to look here before the end of it.
        time.sleep(0.05)
        published.append(unit)

    async def check(port: Port) -> None:
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
        assert answer["error"]["message"].startswith(
            "'tokens' is not a parameter; the parameters are: model, "
        )
        async with port.client.post(port.url + "/explain", data=b"{") as reply:
            assert reply.status == 400
            assert "not valid JSON" in (await reply.json())["error"]["message"]
        assert (await port.get("/explain", RELAYED))[0] == 403

    run(check)


def test_mistakes_get_one_line_that_says_what_there_is() -> None:
    async def check(port: Port) -> None:
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

    run(check)


def test_a_handler_that_fails_is_logged_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    async def check(port: Port) -> None:
        port.board.units["a1"].weight = object()  # type: ignore[assignment]
        status, body = await port.get("/units")
        assert (status, body["error"]["code"]) == (500, "internal_server_error")

    run(check)
    assert "admin port: GET /units failed: TypeError" in caplog.text


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
