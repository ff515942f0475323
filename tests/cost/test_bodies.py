"""What a body of any shape may cost to read: bytecodes and memory, which count alike on every machine.

Reading on the loop holds up every stream, so that what is read there is bounded in values as well as in
bytes; what is read elsewhere is bounded too, for other large bodies wait for it.
"""

from __future__ import annotations

import tracemalloc

import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.request.body import is_large, read_ask, read_large_ask
from cellgate.router.nouns import Ask
from tests.cost.bench import counted

MIB = 1 << 20
BYTECODES = 800_000
"""Some 10 ms. A text takes a few hundred."""
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
    "tools": (b'{"tools":[', b'{"a":[]},', b"{}]}"),
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
def test_reading_on_the_loop_is_bounded_whatever_the_shape(shape: str) -> None:
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


@pytest.mark.parametrize("shape", SHAPES)
def test_reading_elsewhere_looks_at_no_more(shape: str) -> None:
    asked = body(shape, 5 * MIB // 2)
    with counted() as counts:
        assert isinstance(read_large_ask(asked), Ask)
    assert counts.total() <= 2 * BYTECODES, counts.most_common(5)
