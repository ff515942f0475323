"""What the gate tells the ingress with its answers, over real sockets."""

from __future__ import annotations

import asyncio
import base64

import pytest

from cellgate.proxy.ingress.reports import encoded
from cellgate.router.nouns import Load
from tests.wire.client import chat, get
from tests.wire.stage import live, stage
from tests.wire.unit import STREAM, whole

ENGINES = (
    "Endpoint-Load-Metrics: TEXT named_metrics.kv_cache_usage_perc=0.4\r\nendpoint-load-metrics-bin: AAAA\r\n"
)


@pytest.mark.parametrize("script", [STREAM, whole(head=ENGINES)])
@live
async def test_every_proxied_answer_carries_the_gates_report_and_no_other(script: bytes) -> None:
    async with stage(script) as here, here.client() as client:
        here.plane.orca.refresh(here.gateway.now())
        reply = await client.ask(chat())
        assert reply.all("endpoint-load-metrics") == []
        (value,) = reply.all("endpoint-load-metrics-bin")
        assert base64.b64decode(value) == encoded(here.plane.orca.report)
        assert here.plane.orca.report.named_metrics["units_ready"] == 1.0


@pytest.mark.parametrize(
    ("asked", "begins"), [("TEXT", "TEXT application_u"), ("json", 'JSON {"application_u')]
)
@live
async def test_the_report_comes_as_it_is_asked_for_and_units_are_not_asked(asked: str, begins: str) -> None:
    async with stage(STREAM) as here, here.client() as client:
        reply = await client.ask(chat(head=f"Endpoint-Load-Metrics-Format: {asked}\r\n"))
        (value,) = reply.all("endpoint-load-metrics")
        assert value.startswith(begins)
        assert reply.all("endpoint-load-metrics-bin") == []
        assert here.unit.requests[0].get("endpoint-load-metrics-format") is None


@live
async def test_what_no_unit_has_answered_carries_none() -> None:
    async with stage(STREAM) as here, here.client() as client:
        here.plane.set_drain("u0", True)
        reply = await client.ask(chat())
        assert reply.status == 503
        assert reply.get("endpoint-load-metrics-bin") is None
        reply = await client.ask(get("/readyz"))
        assert reply.status == 503
        assert reply.get("endpoint-load-metrics-bin") is None
        assert reply.get("x-envoy-immediate-health-check-fail") is None


@live
async def test_a_stopping_gate_says_so_on_every_answer() -> None:
    async with stage(STREAM) as here, here.client() as client, here.client() as other:
        stopping = asyncio.create_task(here.gate.stop(delay_s=1.0, drain_s=1.0))
        await asyncio.sleep(0)
        for reply in (await client.ask(chat()), await other.ask(get("/readyz"))):
            assert reply.get("x-envoy-immediate-health-check-fail") == "1"
        await stopping


@live
async def test_a_unit_takes_at_most_forty_series_of_a_page() -> None:
    async with stage(STREAM) as here, here.client() as client:
        here.plane.board.report(Load("u0", here.gateway.now(), running=1))
        for _ in range(2):
            assert (await client.ask(chat())).status == 200
        page = (await here.plane.metrics.render()).decode()
        series = [line for line in page.splitlines() if 'unit="u0"' in line]
        assert 20 < len(series) <= 46
