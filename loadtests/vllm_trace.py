"""Drill: a real vLLM engine tells a collector of its spans, and each hangs below the gate's attempt.

`python -m loadtests.vllm_trace` starts one engine on this machine's CPU (4 GB, over a minute), the gate
before it and a collector for both. The exit code is 1 when a span of the engine is not where it belongs.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import orjson

from loadtests.bench import processes
from loadtests.collector import Collector, Seen, collecting
from loadtests.gate import GateProcess
from loadtests.vllm.install import MODEL, VENV, set_up
from loadtests.vllm.unit import ENVIRONMENT, HOST, MODEL_NAME

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
SPANS_TIMEOUT_S = 30.0
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENGINES_SPAN = "llm_request"
ASKED = {
    "model": MODEL_NAME,
    "max_tokens": 8,
    "stream": True,
    "messages": [{"role": "user", "content": "Hello"}],
}


class Engine(NamedTuple):
    """One engine without followers."""

    name: str
    url: str


async def main() -> int:
    """Ask once, and look at what the collector got."""
    set_up()
    async with collecting() as collector, _engine(collector) as engine:
        settings = {"tracing": {"endpoint": collector.endpoint}}
        with GateProcess([engine], settings=settings) as gate:
            await asyncio.to_thread(_ask, gate.url)
            async with asyncio.timeout(SPANS_TIMEOUT_S):
                while len(_of_the_trace(collector)) < 3:  # noqa: ASYNC110 - nobody tells.
                    await asyncio.sleep(0.2)
    [request], [attempt], [engines] = (
        [span for span in _of_the_trace(collector) if span.name == name]
        for name in ("POST /v1/chat/completions", "attempt", ENGINES_SPAN)
    )
    for span in (request, attempt, engines):
        print(f"{span.name:<28}{span.kind:<8}{span.span_id} below {span.parent_id}")
    chain = [request.parent_id, attempt.parent_id, engines.parent_id]
    is_one = chain == [CALLER, request.span_id, attempt.span_id]
    print("each is a child of the one before" if is_one else "they are no chain")
    return 0 if is_one else 1


def _of_the_trace(collector: Collector) -> list[Seen]:
    return [span for span in collector.spans if span.trace_id == TRACE]


def _ask(url: str) -> None:
    head = {"content-type": "application/json", "traceparent": f"00-{TRACE}-{CALLER}-01"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", orjson.dumps(ASKED), head)
    with urllib.request.urlopen(request, timeout=SPANS_TIMEOUT_S) as reply:
        reply.read()


@asynccontextmanager
async def _engine(collector: Collector) -> AsyncIterator[Engine]:
    """`vllm serve` that answers, and traces. None of its processes is left afterwards."""
    port = processes.free_port()
    command = [str(VENV / "bin" / "vllm"), "serve", str(MODEL), "--served-model-name", MODEL_NAME]
    command += ["--host", HOST, "--port", str(port), "--max-model-len", "4096", "--enforce-eager"]
    command += ["--otlp-traces-endpoint", collector.endpoint]
    environ = os.environ | ENVIRONMENT | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    with tempfile.TemporaryDirectory(prefix="vllm-trace-") as folder:
        log = Path(folder) / "vllm.log"
        process = _start(command, environ, log)
        try:
            await _until_healthy(process, port, log)
            yield Engine("a", f"http://{HOST}:{port}")
        finally:
            await asyncio.to_thread(_end, process)


def _start(command: list[str], environ: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environ, start_new_session=True)


async def _until_healthy(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while not await asyncio.to_thread(_is_healthy, port):
            if process.poll() is not None:
                raise RuntimeError(
                    f"vllm ended with {process.returncode}; it printed:\n{processes.tail(log)}"
                )
            await asyncio.sleep(1.0)


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=2.0) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the engine and all that it started: they are one session of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
