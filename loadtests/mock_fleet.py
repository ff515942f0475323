"""A thousand units in one process: they answer every probe at once, and generate one token for a canary.

`python -m loadtests.mock_fleet` listens on an address of loopback for each node. What must stay true: it
costs little, so that it is the gate which is measured, and it counts what it was asked.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import cast

import uvloop

from loadtests import processes

NODES = 4
TOKENS_PER_S = 400
STEPS_PER_S = 20
_BODY = (
    b'{"id":"1","object":"chat.completion","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"a"},"finish_reason":"length"}]}'
)
_MODELS = b'{"object":"list","data":[{"id":"mock","object":"model","owned_by":"vllm"}]}'
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


class Fleet:
    """What all connections share."""

    def __init__(self, kilobytes: float, *, busy: bool) -> None:
        self.counts: Counter[str] = Counter()
        self._busy = busy
        self._before, self._after = page(kilobytes, busy=busy)
        self._fixed = {
            b"GET /health ": _reply(b""),
            b"GET /node ": _reply(b"ok"),
            b"GET /v1/models ": _reply(_MODELS),
            b"GET /version ": _reply(b'{"version":"0.11.0"}'),
            b"POST /v1/chat/completions ": _reply(_BODY),
        }

    def answer(self, head: bytes) -> bytes:
        """The reply to a request line and headers."""
        line = head[: head.index(b"HTTP/1.1")]
        self.counts[line.decode().strip()] += 1
        if line == b"GET /metrics ":
            return self._metrics()
        if line == b"GET /counts ":
            return _reply(json.dumps(self.counts).encode())
        return self._fixed.get(line) or _reply(b"", status=b"404 Not Found")

    def _metrics(self) -> bytes:
        now_s = time.monotonic() if self._busy else 0.0
        counters = (
            b'vllm:generation_tokens_total{engine="0",model_name="mock"} %d\n'
            b'vllm:iteration_tokens_total_count{engine="0",model_name="mock"} %d\n'
        ) % (int(now_s * TOKENS_PER_S), int(now_s * STEPS_PER_S))
        return _reply(self._before + counters + self._after)


class Connection(asyncio.Protocol):
    """One client: requests one after the other."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep it."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer each request that is here as a whole."""
        self._unread += data
        for head in self._heads():
            self._transport.write(self._fleet.answer(head))
            if b"connection: close" in head.lower():
                self._transport.close()

    def _heads(self) -> Iterator[bytes]:
        while (end := self._unread.find(b"\r\n\r\n")) >= 0:
            head = self._unread[:end]
            _, found, length = head.lower().partition(b"content-length:")
            size = int(length.split(b"\r\n", 1)[0]) if found else 0
            if len(self._unread) < end + 4 + size:
                return
            self._unread = self._unread[end + 4 + size :]
            yield head


def _reply(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


async def serve(units: int, port: int, fleet: Fleet) -> None:
    """Listen on every node's address, say so on stdout, and answer until standard input ends."""
    loop = asyncio.get_running_loop()
    hosts = [address(unit, node) for unit in range(units) for node in range(NODES)]
    for host in hosts:
        await loop.create_server(lambda: Connection(fleet), host, port, backlog=16)
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main() -> int:
    """Serve until standard input is closed."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.mock_fleet", description=__doc__)
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
