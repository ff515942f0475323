"""What a request and a chunk of a stream may cost: bytecodes, with everything on that is by default.

A change that makes one of them 15 % dearer fails here. Who has a good reason raises the budget and says why;
who makes one cheaper lowers it.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType

import orjson
import pytest

from tests.cost.bench import Bench, Cost, counted

MARGIN = 1.15
TIMES = 40

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="budgets are in the bytecodes of CPython 3.11"
)


def request(*, stream: bool) -> bytes:
    body = orjson.dumps(
        {
            "model": "m",
            "stream": stream,
            "stream_options": {"include_usage": True} if stream else None,
            "max_tokens": 128,
            "messages": [{"role": "user", "content": "x" * 900}],
        }
    )
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nUser-Agent: client\r\n"
        "Accept: application/json\r\nAuthorization: Bearer none\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


REPLY = orjson.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 230, "completion_tokens": 1, "total_tokens": 231},
    }
)
WHOLE = (
    b"HTTP/1.1 200 OK\r\nServer: engine\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    % (len(REPLY), REPLY)
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def token(number: int) -> bytes:
    event = (
        '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":'
        f'[{{"index":0,"delta":{{"content":" t{number}"}},"logprobs":null,"finish_reason":null}}]}}'
    )
    data = b"data: %b\n\n" % event.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def plain(bench: Bench) -> Cost:
    """A request that does not stream, and its answer."""
    asked = request(stream=False)
    with counted() as counts:
        for _ in range(TIMES):
            bench.ask(asked).data_received(WHOLE)
    return Cost(counts, TIMES)


def begun(bench: Bench) -> Cost:
    """A stream up to its first token."""
    asked, counts = request(stream=True), Counter[CodeType]()
    for _ in range(TIMES):
        with counted() as one:
            conn = bench.ask(asked)
            conn.data_received(HEAD)
            conn.data_received(token(0))
        counts += one
        conn.data_received(END)
    return Cost(counts, TIMES)


def carried(bench: Bench, chunks: int = TIMES) -> Cost:
    """A chunk in the middle of a stream, as long as nothing of it is folded."""
    conn = bench.ask(request(stream=True))
    conn.data_received(HEAD)
    conn.data_received(token(0))
    tokens = [token(number) for number in range(chunks)]
    with counted() as counts:
        for each in tokens:
            conn.data_received(each)
    conn.data_received(END)
    return Cost(counts, chunks)


def carried_long(bench: Bench) -> Cost:
    """A chunk of a long stream: what is kept of it is folded now and then."""
    return carried(bench, 20 * TIMES)


MEASURES: dict[Callable[[Bench], Cost], int] = {plain: 6180, begun: 5640, carried: 141, carried_long: 177}
"""Each with its budget, in bytecodes of CPython 3.11."""


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.__name__)
def test_it_costs_no_more_than_it_did(measure: Callable[[Bench], Cost]) -> None:
    async def measured() -> Cost:
        bench = Bench(asyncio.get_running_loop())
        try:
            measure(bench)
            return measure(bench)
        finally:
            bench.close()

    cost = asyncio.run(measured())
    print(f"{measure.__name__}: {cost.each:.0f} bytecodes")
    assert cost.each <= MARGIN * MEASURES[measure], f"{cost.each:.0f} bytecodes, most of them here:\n{cost}"
