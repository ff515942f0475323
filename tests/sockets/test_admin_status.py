"""What the admin port shows of the gate and its units, over real sockets."""

from __future__ import annotations

import pytest

from cellgate.router.nouns import Ask, Evidence, Load, Sign, Strength
from tests.sockets.admin_stage import RELAYED, Port, run


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
        assert (unit["standing"], unit["reason"]) == ("down", "gone: process 7 (source agent, node a1-1)")
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


SHOWN = {
    "name": "a1",
    "cell": "a",
    "url": "http://127.0.0.1:8101",
    "role": "both",
    "links": [],
    "verdict": "down",
    "usable": False,
    "drained": False,
    "hold": None,
    "restart_suspected": False,
    "degraded": 0.0,
    "odd_answers": False,
    "build": {"fingerprint": "", "version": "", "other_builds": []},
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
"""A unit that has refused a connection 2 s ago, as /units shows it."""


def test_a_unit_is_shown_with_the_evidence_behind_its_verdict() -> None:
    async def check(port: Port) -> None:
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


def test_health_of_one_unit_is_200_503_or_404() -> None:
    async def check(port: Port) -> None:
        assert (await port.get("/healthz/unit/a1"))[0] == 503
        port.observe("a1", Sign.GOOD, Strength.STRONG, "canary", "token")
        assert await port.get("/healthz/unit/a1") == (200, {"unit": "a1", "reason": "token (source canary)"})
        await port.post("/units/a1/drain")
        assert await port.get("/healthz/unit/a1") == (404, {"unit": "a1", "reason": "drained by an operator"})
        assert await port.get("/healthz/unit/b7") == (404, {"unit": "b7", "reason": "no unit is named 'b7'"})

    run(check)
