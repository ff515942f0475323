"""A thousand units in one process: they answer every probe at once, and generate one token for a canary.

`python -m loadtests.kit.mock_fleet` listens on an address of loopback for each node. What must stay true: it
costs little, so that it is the gate which is measured, and it counts what it was asked.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import orjson
import uvloop

from loadtests.kit import processes
from loadtests.wire.messages import whole
from loadtests.wire.scripted import Request, announce, listen

NODES = 4
TOKENS_PER_S = 400
STEPS_PER_S = 20
_BODY = (
    b'{"id":"1","object":"chat.completion","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"a"},"finish_reason":"length"}]}'
)
_MODELS = b'{"object":"list","data":[{"id":"mock","object":"model","owned_by":"vllm"}]}'
_KNOWN_PROMPT = b'"logprobs"'
"""No canary asks for them."""
_FAMILY = "vllm:filler_seconds_bucket"


def address(unit: int, node: int) -> str:
    """The loopback address of a node; node 0 is the leader."""
    return f"127.{100 + node}.{unit // 250}.{unit % 250 + 1}"


def page(kilobytes: float, *, busy: bool) -> tuple[bytes, bytes]:
    """A page of vLLM's metrics, before and after its two counters; filled up with histogram lines."""
    labels = '{engine="0",model_name="mock"}'
    running = 8 if busy else 0
    gauges = f"vllm:num_requests_running{labels} {running}.0\nvllm:num_requests_waiting{labels} 0.0\n"
    gauges += f"vllm:kv_cache_usage_perc{labels} 0.25\nprocess_start_time_seconds 1.7e+09\n"
    line = f'{_FAMILY}{{engine="0",le="0.075",model_name="mock"}} 1234.0\n'
    filler = line * int((kilobytes * 1000 - len(gauges)) / len(line))
    half = len(filler) // 2 // len(line) * len(line)
    return (filler[:half] + gauges).encode(), filler[half:].encode()


@dataclass(frozen=True, slots=True)
class MockUnit:
    """A unit of the mock fleet, as the gate's file names it."""

    number: int
    port: int

    @property
    def name(self) -> str:
        """Its name."""
        return f"u{self.number:04d}"

    @property
    def url(self) -> str:
        """The leader's address."""
        return f"http://{address(self.number, 0)}:{self.port}"

    def nodes(self) -> list[dict[str, object]]:
        """The leader, and followers with a probe each."""
        leader: dict[str, object] = {"name": f"{self.name}-0", "role": "leader"}
        return [leader, *(self._follower(node) for node in range(1, NODES))]

    def _follower(self, node: int) -> dict[str, object]:
        probe = {"probe": "http", "url": f"http://{address(self.number, node)}:{self.port}/node"}
        return {"name": f"{self.name}-{node}", "role": "follower", "probes": [probe]}


@contextmanager
def mock_fleet(count: int, kilobytes: float, *, busy: bool = False) -> Iterator[list[MockUnit]]:
    """So many units as a process; each shows a page of metrics of so many kilobytes."""
    port = processes.free_port()
    flags = ["--units", count, "--port", port, "--metrics-kb", kilobytes, *(["--busy"] if busy else [])]
    with processes.announcing("loadtests.kit.mock_fleet", *flags):
        yield [MockUnit(number, port) for number in range(count)]


class Fleet:
    """What all units share; `answer` is their script."""

    def __init__(self, kilobytes: float, *, busy: bool) -> None:
        self._counts: Counter[str] = Counter()
        self._busy = busy
        self._before, self._after = page(kilobytes, busy=busy)
        self._fixed = {
            b"GET /health": whole(b""),
            b"GET /node": whole(b"ok"),
            b"GET /v1/models": whole(_MODELS),
            b"GET /version": whole(b'{"version":"0.11.0"}'),
            b"POST /v1/chat/completions": whole(_BODY),
        }

    def answer(self, request: Request) -> None:
        """The page that it asks for."""
        line = b"%b %b" % (request.method, request.target)
        is_known_prompt = _KNOWN_PROMPT in request.body
        self._counts[f"{line.decode()}{' (known prompt)' if is_known_prompt else ''}"] += 1
        if line == b"GET /metrics":
            request.write(self._metrics())
        elif line == b"GET /counts":
            request.write(whole(orjson.dumps(self._counts)))
        else:
            request.write(self._fixed.get(line) or whole(b"", status=b"404 Not Found"))
        if not request.keeps_connection:
            request.close()

    def _metrics(self) -> bytes:
        now_s = time.monotonic() if self._busy else 0.0
        counters = (
            b'vllm:generation_tokens_total{engine="0",model_name="mock"} %d\n'
            b'vllm:iteration_tokens_total_count{engine="0",model_name="mock"} %d\n'
        ) % (int(now_s * TOKENS_PER_S), int(now_s * STEPS_PER_S))
        return whole(self._before + counters + self._after, kind=b"text/plain")


async def serve(units: int, port: int, fleet: Fleet) -> None:
    """Listen on every node's address, and say so."""
    for host in (address(unit, node) for unit in range(units) for node in range(NODES)):
        await listen(fleet.answer, port, host)
    await announce(port)


def main() -> int:
    """Serve until whoever started it has gone."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.kit.mock_fleet", description=__doc__)
    parser.add_argument("--units", type=int, default=1000)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--metrics-kb", type=float, default=50.0, help="size of each page of metrics")
    parser.add_argument("--busy", action="store_true", help="the engines' counters grow")
    args = parser.parse_args()
    processes.raise_files()
    uvloop.run(serve(args.units, args.port, Fleet(args.metrics_kb, busy=args.busy)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
