"""What a body of any shape may cost to read: bytecodes and memory, which count alike on every machine.

Reading on the loop holds up every stream, so that what is read there is bounded in values as well as in
bytes; what is read elsewhere is bounded too, for other large bodies wait for it.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.http.server import ClientConnection
from cellgate.proxy.http.turns import ReadScheduler
from cellgate.proxy.request.body import is_large, read_ask, read_large_ask
from cellgate.router.nouns import Ask
from tests.cost.bench import Bench, Wire, counted

MIB = 1 << 20
BYTECODES = 300_000
"""Some 3 ms. A text takes a few hundred."""
LOOP_BYTES = 24 * MIB
"""Memory at the worst while a body is read on the loop."""

SHAPES: dict[str, tuple[bytes, bytes, bytes]] = {
    "empty messages": (b'{"messages":[', b"{},", b"{}]}"),
    "odd messages": (b'{"messages":[', b'{"a":1},', b"{}]}"),
    "messages of parts": (b'{"messages":[', b'{"content":[{},{}]},', b"{}]}"),
    "empty parts": (b'{"messages":[{"role":"user","content":[', b"{},", b"{}]}]}"),
    "images": (b'{"messages":[{"role":"user","content":[', b'{"image":1},', b"{}]}]}"),
    "texts": (b'{"prompt":[', b'"a",', b'"a"]}'),
    "lists of token ids": (b'{"prompt":[', b"[1],", b"[1]]}"),
    "lists of lists": (b'{"prompt":[', b"[[]],", b"[[]]]}"),
    "token ids": (b'{"prompt":[', b"1234,", b"1]}"),
    "lists of odd ids": (b'{"prompt":[', b"[-1],", b"[-1]]}"),
    "tools": (b'{"tools":[', b'{"a":[]},', b"{}]}"),
    "whole tools": (b'{"tools":[', b'{"type":"function","function":{"name":"a"}},', b"{}]}"),
    "calls of tools": (
        b'{"messages":[',
        b'{"role":"a","content":"b","tool_calls":[{"function":{"name":"a","arguments":"{}"}}]},',
        b"{}]}",
    ),
    "items of a response": (b'{"input":[', b'{"type":"input_text","text":"a"},', b"{}]}"),
    "links to images": (
        b'{"messages":[{"role":"user","content":[',
        b'{"type":"image_url","image_url":{"url":"a"}},',
        b"{}]}]}",
    ),
    "stop strings": (b'{"stream":true,"prompt":"a","stop":[', b'"a",', b'"a"]}'),
    "a bias": (b'{"prompt":"a","logit_bias":{"a":1', b',"%d":1', b"}}"),
    "Python's numbers": (b'{"prompt":"a","z":NaN', b',"%d":1', b"}"),
    "an unknown field": (b'{"stream":true,"zzz":[', b"[],", b"[]]}"),
    "fields of a message": (b'{"messages":[{"role":"user"', b',"%d":1', b"}]}"),
    "fields without a value": (b'{"stream":true', b',"%d":null', b"}"),
    "a text with commas": (b'{"prompt":"', b"a, [b], ", b'"}'),
}


def body(shape: str, size: int) -> bytes:
    """A body of at most so many bytes."""
    begin, piece, end = SHAPES[shape]
    room = size - len(begin) - len(end)
    if b"%d" in piece:
        return begin + b"".join(piece % (10**6 + n) for n in range(room // (len(piece) + 5))) + end
    return begin + piece * (room // len(piece)) + end


def largest_on_loop(shape: str) -> bytes:
    """The largest body of a shape that is read on the loop."""
    size = LIMITS.json_bytes_on_loop
    while is_large(body(shape, size)):
        size = size * 9 // 10
    return body(shape, size)


@pytest.mark.parametrize("shape", SHAPES)
def test_reading_is_bounded_whatever_the_shape(shape: str) -> None:
    asked = largest_on_loop(shape)
    with counted() as counts:
        assert isinstance(read_ask(asked), Ask)
    assert counts.total() <= BYTECODES, counts.most_common(5)
    tracemalloc.start()
    try:
        read_ask(asked)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= LOOP_BYTES
    asked = body(shape, 5 * MIB // 2)
    with counted() as counts:
        assert isinstance(read_large_ask(asked), Ask), "elsewhere"
    assert counts.total() <= 4 * BYTECODES, counts.most_common(5)


@pytest.mark.parametrize(("size", "most"), [(32_000, 4), (16_000, 6), (4_000, 11)])
def test_of_bodies_that_are_not_tiny_few_are_read_in_one_turn(size: int, most: int) -> None:
    read = asyncio.run(_read_by_turn(24, size))
    assert max(after - before for before, after in pairwise([0, *read])) <= most
    assert read[-1] == 24


async def _read_by_turn(clients: int, size: int) -> list[int]:
    """So many send a body of a size, for a model that is unknown: how many have an answer, by turn."""
    bench, due, answered = Bench(asyncio.get_running_loop()), list[Callable[[], None]](), set[int]()
    by_turn = ReadScheduler(due.append, LIMITS.request_bytes_per_turn)
    bench.gateway.start_scheduler = bench.gateway.services.start_scheduler = by_turn
    bench.gateway.read_scheduler = ReadScheduler(lambda turn: turn(), 1 << 30)
    asked = b'{"model":"none","messages":[{"role":"user","content":[%b{}]}]}' % (b'{"a":1},' * (size // 8))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(asked)
    for number in range(clients):
        client = ClientConnection(bench.gateway)
        client.connection_made(Wire(partial(answered.add, number)))
        client.data_received(head + asked)
    read = [len(answered)]
    while due:
        turns, due[:] = due[:], []
        for turn in turns:
            turn()
        read.append(len(answered))
    bench.close()
    return read
