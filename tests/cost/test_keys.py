"""What keys and limits cost a request: nothing where they are off, and little where they are on.

`python -m tests.cost.test_keys` measures it in microseconds.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import orjson
import pytest

from cellgate.proxy.config.settings import KeySettings
from tests.cost.bench import Bench, Cost, counted
from tests.cost.traffic import END, HEAD, WHOLE, request, token

KEY = "none"
"""What the requests of traffic.py show."""
KEY_LIMITS = {"requests_per_minute": 10**9, "tokens_per_minute": 10**12, "in_flight": 10**6}
TENANT_LIMITS = {"tokens_per_minute": 10**12, "cost_per_month": 10**6}
PLAIN_MORE, CHUNK_MORE = 1200, 0
"""The most bytecodes that a request, and a chunk, may take more."""
TIMES, ROUNDS = 100, 40


@asynccontextmanager
async def keyed_bench(folder: Path) -> AsyncIterator[Bench]:
    """A bench with keys, limits on key and tenant, and prices."""
    file = folder / "keys.jsonl"
    lines = [
        {
            "key": "k",
            "sha256": sha256(KEY.encode()).hexdigest(),
            "tenant": "t",
            "limits": KEY_LIMITS,
            "models": ["m"],
        },
        {"tenant": "t", "limits": TENANT_LIMITS},
        {"model": "m", "prompt": 1, "completion": 2},
    ]
    file.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    bench = Bench(asyncio.get_running_loop(), keys=KeySettings(str(file)))
    assert bench.plane.accounting is not None
    bench.plane.accounting.begin()
    try:
        yield bench
    finally:
        await bench.plane.accounting.close()
        bench.close()


def plain(bench: Bench, times: int = TIMES) -> None:
    """So many requests that do not stream."""
    asked = request(stream=False)
    for _ in range(times):
        bench.ask(asked).data_received(WHOLE)


def chunks(bench: Bench) -> Cost:
    """The cost of a chunk."""
    conn = bench.ask(request(stream=True))
    conn.data_received(HEAD)
    conn.data_received(token(0))
    tokens = [token(number) for number in range(TIMES)]
    with counted() as counts:
        for each in tokens:
            conn.data_received(each)
    conn.data_received(END)
    return Cost(counts, TIMES)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the bounds are in the bytecodes of CPython 3.11")
def test_a_request_costs_a_little_more_and_a_chunk_nothing(tmp_path: Path) -> None:
    async def costs() -> list[tuple[float, float]]:
        found = []
        off = Bench(asyncio.get_running_loop())
        async with keyed_bench(tmp_path) as on:
            for bench in (off, on):
                plain(bench)
                with counted() as counts:
                    plain(bench)
                found.append((Cost(counts, TIMES).each, chunks(bench).each))
        off.close()
        return found

    (off, off_chunk), (on, on_chunk) = asyncio.run(costs())
    print(f"a request {off:.0f} -> {on:.0f} bytecodes, a chunk {off_chunk:.0f} -> {on_chunk:.0f}")
    assert on - off <= PLAIN_MORE
    assert on_chunk - off_chunk <= CHUNK_MORE


async def main() -> None:
    """Off and on in turns, in CPU time of this process."""
    off, times = Bench(asyncio.get_running_loop()), list[tuple[float, float]]()
    async with keyed_bench(Path(tempfile.mkdtemp())) as on:
        for number in range(ROUNDS + 2):
            taken = []
            for bench in (off, on) if number % 2 else (on, off):
                begun = time.process_time()
                plain(bench)
                taken.append((time.process_time() - begun) / TIMES * 1e6)
            # The first two are for warming up.
            if number >= 2:
                times.append((taken[0], taken[1]) if number % 2 else (taken[1], taken[0]))
    off.close()
    more = [after - before for before, after in times]
    print(
        f"off {statistics.median(before for before, _ in times):.1f} us, "
        f"on {statistics.median(after for _, after in times):.1f} us a request; "
        f"more: {statistics.median(more):.1f} us (median of {ROUNDS} interleaved rounds)"
    )


if __name__ == "__main__":
    asyncio.run(main())
