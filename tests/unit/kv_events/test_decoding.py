"""Decoding of batches: small ones on the loop, large ones elsewhere, and what costs more than it is worth."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from cellgate.proxy.extras.kv_events import wire
from cellgate.proxy.extras.kv_events.wire import (
    EVENTS_MAX,
    SMALL_BYTES,
    EventPart,
    KvDecoder,
    MalformedError,
    parts,
)
from cellgate.router.kv_index import Event


def batch(*events: Any) -> bytes:
    packed: bytes = msgpack.packb([1.5, events, None])
    return packed


def stores(count: int) -> list[list[Any]]:
    return [["BlockStored", [name], None, [name] * 16, 16, None, "GPU", None] for name in range(count)]


SMALL, LARGE = batch(*stores(10)), batch(*stores(2000), ["BlockRemoved", list(range(100))])


def decoded(payload: bytes, rank: int | None = None) -> list[Event]:
    async def run() -> list[Event]:
        decoder = KvDecoder()
        try:
            return [event async for part in decoder.decode(payload, rank) for event in part]
        finally:
            await decoder.close()

    return asyncio.run(run())


@pytest.mark.parametrize("payload", [SMALL, LARGE])
def test_a_batch_is_decoded_the_same_wherever_that_is_done(payload: bytes) -> None:
    assert decoded(payload) == [event for part in parts(payload, None) for event in part]


async def test_a_small_batch_needs_no_process_and_a_large_one_does() -> None:
    decoder = KvDecoder()
    assert len(SMALL) <= SMALL_BYTES < len(LARGE)
    [part async for part in decoder.decode(SMALL, None)]
    assert not has_process(decoder)
    [part async for part in decoder.decode(LARGE, None)]
    assert has_process(decoder)
    await decoder.close()


def test_a_part_is_a_bounded_piece_of_work() -> None:
    sizes = [sum(1 + len(getattr(event, "blocks", ())) for event in part) for part in parts(LARGE, None)]
    assert max(sizes) < 2 * wire.GROWN_BLOCKS


def has_process(decoder: KvDecoder) -> bool:
    return decoder._process is not None


def array_of(count: int, piece: bytes) -> bytes:
    return b"\x93\xcb" + bytes(8) + b"\xdd" + count.to_bytes(4, "big") + piece * count + b"\xc0"


@pytest.mark.parametrize("piece", [b"\x80", b"\x91\xa1x", b"\xc0", msgpack.packb(["BlockRemoved", []])])
def test_events_of_any_kind_count_before_they_are_looked_at(piece: bytes) -> None:
    with pytest.raises(MalformedError, match="events, more than"):
        decoded(array_of(EVENTS_MAX + 1, piece))


async def test_what_is_wrong_with_a_large_batch_is_told_and_the_next_one_is_decoded() -> None:
    decoder = KvDecoder()
    with pytest.raises(MalformedError):
        [part async for part in decoder.decode(LARGE[:-3000], None)]
    process = decoder._process
    assert len([part async for part in decoder.decode(LARGE, None)]) > 1
    assert decoder._process is process
    await decoder.close()


async def test_a_batch_that_takes_too_long_costs_its_process_and_no_other_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = "import cellgate.proxy.extras.kv_events.wire as d; d.BATCH_CPU_S = 0.05; real = d.parts\n"
    slow += "def spin(payload, rank):\n    while len(payload) % 2: pass\n    return real(payload, rank)\n"
    slow += "d.parts = spin; d.main()\n"
    monkeypatch.setattr(wire, "_COMMAND", (*wire._COMMAND[:2], slow))
    odd, even = (LARGE, LARGE + b"\xc0") if len(LARGE) % 2 else (LARGE + b"\xc0", LARGE)

    async def read(decoder: KvDecoder, payload: bytes) -> list[EventPart]:
        return [part async for part in decoder.decode(payload, None)]

    decoder = KvDecoder()
    first, second = await asyncio.gather(read(decoder, odd), read(decoder, even), return_exceptions=True)
    assert isinstance(first, MalformedError)
    assert isinstance(second, list)
    await decoder.close()
