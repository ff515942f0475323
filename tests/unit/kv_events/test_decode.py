"""The wire format of KV events, of today's and of older engines."""

from __future__ import annotations

import contextlib
from array import array
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.proxy.extras.kv_events.wire import ITEMS_MAX, PART_BLOCKS, MalformedError, events
from cellgate.router.kv_index import Cleared, Event, KvIndex, Removed, Stored

MAPS = (
    "93cb3ff80000000000009188a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c4020102b1706172656e"
    "745f626c6f636b5f68617368c0a9746f6b656e5f696473920708aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469"
    "756da3475055a96c6f72615f6e616d65c000"
)
ARRAYS = "93cb3ff80000000000009197ab426c6f636b53746f72656491c4020102c092070802c0a347505500"
"""A batch as msgspec writes vLLM's structures: with maps, and with positional arrays as before."""
SGLANG_STORED = (
    "93cb41dac0e7dc02870c9187a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391d3cc6e4dca3699"
    "bfb8b1706172656e745f626c6f636b5f68617368cf7663225b96a6d346a9746f6b656e5f696473dc0020cd0c1dcd02a1cd02"
    "89cd055bcd01c8cd0c1dcd02a1cd0289cd0f85cd01c8cd0c1dcd02a1cd02891419cd01c8cd0c1dcd02a1cd0289141acd01c8"
    "cd0c1dcd02a1cd0289141bcd01c8cd0c1dcd016acd0536cd0db0aa626c6f636b5f73697a6520a76c6f72615f6964c0a66d65"
    "6469756da347505500"
)
SGLANG_CLEARED = "93cb41dac0e7dca4b4799181a474797065b0416c6c426c6f636b73436c656172656400"
"""Batches of SGLang 0.5.23, as they came: hashes are signed."""
TWO_TOKENS = array("I", [7, 8]).tobytes()


def batch(*found: Any, rank: int | None = 0) -> bytes:
    packed: bytes = msgpack.packb([1.5, list(found), rank])
    return packed


def stored(**more: Any) -> dict[str, Any]:
    first = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [7, 8]}
    return first | {"block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None} | more


def decoded(*found: Any) -> list[Event]:
    return list(events(batch(*found)))


@pytest.mark.parametrize("vector", [MAPS, ARRAYS])
def test_both_formats_are_read_alike(vector: str) -> None:
    assert list(events(bytes.fromhex(vector), 0)) == [Stored([0x0102], None, TWO_TOKENS, 2)]


def test_batches_of_sglang_are_read() -> None:
    tokens = [
        3101, 673, 649, 1371, 456, 3101, 673, 649, 3973, 456, 3101, 673, 649, 20, 25, 456,
        3101, 673, 649, 20, 26, 456, 3101, 673, 649, 20, 27, 456, 3101, 362, 1334, 3504,
    ]  # fmt: skip
    low = (1 << 60) - 1
    stored = Stored([-3715947111639302216 & low], 8530699895934735174 & low, array("I", tokens).tobytes(), 32)
    assert list(events(bytes.fromhex(SGLANG_STORED), 0)) == [stored]
    assert list(events(bytes.fromhex(SGLANG_CLEARED), 0)) == [Cleared()]


def test_removals_and_clears() -> None:
    assert decoded({"type": "BlockRemoved", "block_hashes": [5, -1]}, {"type": "AllBlocksCleared"}) == [
        Removed([5, (1 << 60) - 1]),
        Cleared(),
    ]
    assert decoded(["BlockRemoved", [5], "GPU"], ["AllBlocksCleared"]) == [Removed([5]), Cleared()]


def test_of_a_hash_in_bytes_the_last_eight_count() -> None:
    assert decoded(["BlockRemoved", [bytes(range(32))]]) == [
        Removed([int.from_bytes(bytes(range(24, 32)), "big") & ((1 << 60) - 1)])
    ]


def test_a_default_at_the_end_may_be_left_out() -> None:
    assert list(events(msgpack.packb([1.5, [["AllBlocksCleared"]]]), 0)) == [Cleared()]


def chains(*found: Any) -> set[int]:
    index = KvIndex()
    for event in decoded(*found):
        index.apply(event, 0.0)
    return set(index.held)


def test_adapter_and_salt_are_part_of_a_block() -> None:
    plain = chains(stored())
    assert chains(stored(lora_name="a", extra_keys=[["a"]])) == chains(stored(lora_name="a")) != plain
    assert chains(stored(extra_keys=[["salt"]])) == chains(stored(cache_salt="salt")) != plain
    assert chains(stored(extra_keys=[[["image", 0]]])) != plain
    assert chains(stored(extra_keys=[None])) == plain
    assert chains(stored(extra_keys=[[b"\x00\xff"]])) != plain


def test_a_large_event_comes_in_parts_that_make_one_chain() -> None:
    count = 3 * PART_BLOCKS + 1
    whole = stored(block_hashes=list(range(1, count + 1)), token_ids=list(range(2 * count)))
    parts = decoded(whole, {"type": "BlockRemoved", "block_hashes": list(range(count))})
    assert [len(part.blocks) for part in parts if not isinstance(part, Cleared)] == 2 * [
        *3 * [PART_BLOCKS],
        1,
    ]
    assert len(chains(whole)) == count


def test_layers_that_keep_only_the_end_of_a_prompt_are_left_out() -> None:
    assert decoded(stored(kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=128)) == []
    assert len(decoded(stored(kv_cache_spec_kind="full_attention"))) == 1


def test_kinds_of_events_that_are_not_known_are_left_out() -> None:
    assert decoded({"type": "BlockMoved"}, ["BlockMoved", 1], {}) == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"hello",
        msgpack.packb({"ts": 1}),
        msgpack.packb([1.5]),
        msgpack.packb(["x", []]),
        msgpack.packb([1.5, 3]),
        msgpack.packb([1.5, [3]]),
        batch(stored(block_hashes=["text"])),
        batch(stored(block_hashes=3)),
        batch(stored(token_ids=[7])),
        batch(stored(token_ids=[7, -8])),
        batch(stored(token_ids=["a", "b"])),
        batch(stored(block_size="many")),
        batch({"type": "BlockRemoved", "block_hashes": list(range(ITEMS_MAX + 1))}),
        batch(stored())[:-4],
    ],
)
def test_what_no_engine_sends_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedError):
        list(events(payload))


def test_a_batch_of_another_rank_is_malformed() -> None:
    assert list(events(batch(stored(), rank=None), 1))
    with pytest.raises(MalformedError, match="rank 7 came from the endpoint of rank 1"):
        list(events(batch(stored(), rank=7), 1))


@settings(max_examples=100)
@given(st.recursive(st.none() | st.integers(-5, 5) | st.binary() | st.text(), lambda x: st.lists(x)))
def test_whatever_comes_it_is_events_or_malformed(found: Any) -> None:
    for payload in (msgpack.packb(found), batch(found), batch(stored(extra_keys=found, lora_name=found))):
        with contextlib.suppress(MalformedError):
            list(events(payload))
