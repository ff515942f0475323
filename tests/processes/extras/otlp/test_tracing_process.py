"""A gate that is configured to trace, as a process: what its collector gets, and what it logs without one."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from pathlib import Path
from typing import Any

import openai
import pytest

from loadtests.kit.collector import Collector, collecting
from loadtests.simunit.process import SimUnit
from tests.extras import ONE_OR_TWO_WORKERS
from tests.wire.process import GateProcess, eventually, metrics
from tests.wire.stage import PROCESSES_S, live_for

AT_ONCE = {"drain_delay_s": 0}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


@pytest.mark.parametrize("workers", ONE_OR_TWO_WORKERS)
@live_for(PROCESSES_S)
async def test_a_gate_that_is_configured_so_tells_a_collector_of_a_broken_stream(
    tmp_path: Path, workers: int
) -> None:
    asked: dict[str, Any] = {
        "model": "sim",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 60,
    }
    units = SimUnit.start_all(["a", "b"], followers=1, step_ms=5)
    try:
        async with collecting() as collector:
            tracing = {"endpoint": collector.endpoint, "sample_ratio": 1.0}
            urls = {unit.name: unit.url for unit in units}
            keys: dict[str, Any] = {"tracing": tracing, "timeouts": AT_ONCE, "workers": workers}
            keys |= {"otlp_metrics": collector.metrics_endpoint}
            with GateProcess(tmp_path, urls, **keys) as gate:
                await asyncio.to_thread(gate.until_up, "a", "b")
                await asyncio.to_thread(units[0].fault, "in_stream_error", after_tokens=20)
                url = f"{gate.url}/v1"
                async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
                    while not any(span.name == "continuation" for span in collector.spans):
                        async for _ in await client.chat.completions.create(**asked, **STREAM):
                            pass
                        await asyncio.sleep(0.2)
                page = await asyncio.to_thread(metrics, gate, OPENMETRICS)
                gate.signal(signal.SIGTERM)
                assert await asyncio.to_thread(gate.exit_code) == 0
            [requests] = collector.metrics["cellgate_client_requests"].sum.data_points
            generated = generations(collector)
    finally:
        for unit in units:
            unit.stop()
    continuation = collector.named("continuation")[0]
    attempts = [span for span in collector.named("attempt") if span.parent_id == continuation.parent_id]
    assert [span.about["cellgate.unit"] for span in attempts] == ["a", "b"]
    assert attempts[0].about["error.type"] == "stream_error"
    assert continuation.about == {"cellgate.unit": "a", "cellgate.outcome": "continued"}
    assert requests.as_double == len(collector.named("POST /v1/chat/completions"))
    about = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": "sim"}
    times = ("duration", "time_to_first_token", "time_per_output_token")
    assert generated == {time: [(about, requests.as_double)] for time in times}
    exemplars = set(re.findall(r'# {trace_id="([0-9a-f]{32})"}', page))
    assert exemplars
    assert exemplars <= {span.trace_id for span in collector.spans}


def generations(collector: Collector) -> dict[str, list[tuple[dict[str, str], int]]]:
    """What it has heard by the names of OpenTelemetry: attributes and counts, by the last word of a name."""
    return {
        name.rpartition(".")[2]: [
            ({pair.key: pair.value.string_value for pair in point.attributes}, point.count)
            for point in metric.histogram.data_points
        ]
        for name, metric in collector.metrics.items()
        if name.startswith("gen_ai.server.")
    }


def test_a_collector_that_is_away_costs_one_line_and_no_request(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    tracing = {"endpoint": f"http://127.0.0.1:{port}/v1/traces"}
    with GateProcess(tmp_path, {"a": "http://127.0.0.1:9"}, tracing=tracing, timeouts=AT_ONCE) as gate:
        for _ in range(20):
            assert_refused(gate)
        assert eventually(lambda: "does not accept spans" in gate.log), gate.log
        for _ in range(20):
            assert_refused(gate)
        gate.signal(signal.SIGTERM)
        gate.exit_code()
        lines = [line for line in gate.log.splitlines() if re.search("trac|span|opentelemetry", line, re.I)]
        [line] = lines
        assert f"tracing: {tracing['endpoint']} does not accept spans (" in line


def assert_refused(gate: GateProcess) -> None:
    connection = gate.connect()
    connection.request("POST", "/v1/completions", b'{"prompt": "x"}', {"content-type": "application/json"})
    assert connection.getresponse().status == 503
    connection.close()
