"""Drill: a real vLLM engine tells a collector of its spans, and each hangs below the gate's attempt.

`python -m loadtests.vllm_trace` starts one engine on this machine's CPU (4 GB, over a minute), the gate
before it and a collector for both. The exit code is 1 when a span of the engine is not where it belongs.
"""

import asyncio
import sys

import orjson

from loadtests.kit import progress
from loadtests.kit.collector import Collector, Seen, collecting
from loadtests.kit.gate import GateProcess, Named
from loadtests.vllm.install import set_up
from loadtests.vllm.single import serving
from loadtests.vllm.unit import MODEL_NAME
from loadtests.wire.blocking import fetch

SPANS_TIMEOUT_S = 30.0
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENGINES_SPAN = "llm_request"
ASKED = {
    "model": MODEL_NAME,
    "max_tokens": 8,
    "stream": True,
    "messages": [{"role": "user", "content": "Hello"}],
}


async def main() -> int:
    """Ask once, and look at what the collector got."""
    set_up()
    async with collecting() as collector, serving(*_traced(collector)) as url:
        settings = {"tracing": {"endpoint": collector.endpoint}}
        with GateProcess([Named("a", url)], settings=settings) as gate:
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


def _traced(collector: Collector) -> tuple[list[str], dict[str, str]]:
    """The options and the environment of an engine that traces."""
    options = ["--otlp-traces-endpoint", collector.endpoint]
    return options, {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}


def _of_the_trace(collector: Collector) -> list[Seen]:
    return [span for span in collector.spans if span.trace_id == TRACE]


def _ask(url: str) -> None:
    line = f"traceparent: 00-{TRACE}-{CALLER}-01\r\n"
    fetch(f"{url}/v1/chat/completions", orjson.dumps(ASKED), lines=line, silence_s=SPANS_TIMEOUT_S)


if __name__ == "__main__":
    with progress.shown("vllm-trace"):
        sys.exit(asyncio.run(main()))
