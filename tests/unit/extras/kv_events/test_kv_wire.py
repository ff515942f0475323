"""KV events: the wire format of today's and of older engines, decoding of batches, followers of ranks."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import Counter, deque
from collections.abc import AsyncGenerator
from typing import Any, cast

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.extras.kv_events import wire
from cellgate.extras.kv_events.follow import BLOCKS_PER_TURN, RESTARTS_MAX, RankFollower
from cellgate.extras.kv_events.wire import (
    EVENTS_MAX,
    ITEMS_MAX,
    KV_WIRE_RANKS_MAX,
    PART_BLOCKS,
    SMALL_BYTES,
    BrokenPublisherError,
    EventBatch,
    KvDecoder,
    MalformedError,
    Publisher,
    Reached,
    configured,
    events,
    parts,
    publishers_in,
)
from cellgate.router.kv_index import Cleared, Event, KvIndex, Lessons, Removed, Stored
from cellgate.router.nouns import KvEvents
from cellgate.router.prefix import KnownPrefixes, PrefixCache

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


def test_batches_of_vllm_in_both_formats_and_of_sglang_are_read() -> None:
    for vector in (MAPS, ARRAYS):
        assert list(events(bytes.fromhex(vector), 0)) == [Stored([0x0102], None, TWO_TOKENS, 2)]
    tokens = [
        3101, 673, 649, 1371, 456, 3101, 673, 649, 3973, 456, 3101, 673, 649, 20, 25, 456,
        3101, 673, 649, 20, 26, 456, 3101, 673, 649, 20, 27, 456, 3101, 362, 1334, 3504,
    ]  # fmt: skip
    low = (1 << 60) - 1
    stored = Stored([-3715947111639302216 & low], 8530699895934735174 & low, array("I", tokens).tobytes(), 32)
    assert list(events(bytes.fromhex(SGLANG_STORED), 0)) == [stored]
    assert list(events(bytes.fromhex(SGLANG_CLEARED), 0)) == [Cleared()]


def test_removals_and_clears() -> None:
    """Of a hash in bytes the last eight count; a default at the end may be left out."""
    low = (1 << 60) - 1
    long, short = bytes(range(32)), int.from_bytes(bytes(range(24, 32)), "big") & low
    assert decoded({"type": "BlockRemoved", "block_hashes": [5, -1]}, {"type": "AllBlocksCleared"}) == [
        Removed([5, low]),
        Cleared(),
    ]
    assert decoded(["BlockRemoved", [5], "GPU"], ["AllBlocksCleared"]) == [Removed([5]), Cleared()]
    assert decoded(["BlockRemoved", [long]]) == [Removed([short])]
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
    found = decoded(whole, {"type": "BlockRemoved", "block_hashes": list(range(count))})
    sizes = [len(part.blocks) for part in found if not isinstance(part, Cleared)]
    assert sizes == 2 * [*3 * [PART_BLOCKS], 1]
    assert len(chains(whole)) == count
    sizes = [sum(1 + len(getattr(event, "blocks", ())) for event in part) for part in parts(LARGE, None)]
    assert max(sizes) < 2 * wire.GROWN_BLOCKS, "a part is a bounded piece of work"


def test_layers_that_keep_only_the_end_of_a_prompt_and_unknown_events_are_left_out() -> None:
    assert decoded(stored(kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=128)) == []
    assert len(decoded(stored(kv_cache_spec_kind="full_attention"))) == 1
    assert decoded({"type": "BlockMoved"}, ["BlockMoved", 1], {}) == []


WRONG: dict[str, list[Any]] = {
    "block_hashes": [["text"], 3],
    "token_ids": [[7], [7, -8], ["a", "b"]],
    "block_size": ["many"],
}


@pytest.mark.parametrize(
    "payload",
    [
        *(batch(stored(**{field: value})) for field, values in WRONG.items() for value in values),
        *map(msgpack.packb, ({"ts": 1}, [1.5], ["x", []], [1.5, 3], [1.5, [3]])),
        batch({"type": "BlockRemoved", "block_hashes": list(range(ITEMS_MAX + 1))}),
        *(b"", b"\xc1", b"hello", batch(stored())[:-4]),
    ],
)
def test_what_no_engine_sends_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedError):
        list(events(payload))


def test_a_batch_of_another_rank_is_malformed() -> None:
    assert list(events(batch(stored(), rank=None), 1))
    with pytest.raises(MalformedError, match="rank 7 came from the endpoint of rank 1"):
        list(events(batch(stored(), rank=7), 1))


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.integers(-5, 5) | st.binary(max_size=9) | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=4),
        max_leaves=9,
    )
)
def test_whatever_comes_it_is_events_or_malformed(found: Any) -> None:
    for payload in (msgpack.packb(found), batch(found), batch(stored(extra_keys=found, lora_name=found))):
        with contextlib.suppress(MalformedError):
            list(events(payload))


# Decoding of batches: small ones on the loop, large ones elsewhere, and what costs more than it is worth.


STORES = [["BlockStored", [name], None, [name] * 16, 16, None, "GPU", None] for name in range(2000)]
SMALL, LARGE = batch(*STORES[:10], rank=None), batch(*STORES, ["BlockRemoved", list(range(100))], rank=None)


async def read(decoder: KvDecoder, payload: bytes) -> list[Event]:
    return [event async for part in decoder.decode(payload, None) for event in part]


async def test_a_batch_is_decoded_the_same_wherever_that_is_done() -> None:
    """A small one needs no process; what is wrong with a large one is told, and the next one is decoded."""
    decoder = KvDecoder()
    assert len(SMALL) <= SMALL_BYTES < len(LARGE)
    assert await read(decoder, SMALL) == [event for part in parts(SMALL, None) for event in part]
    processes = [decoder._process]
    with pytest.raises(MalformedError):
        await read(decoder, LARGE[:-3000])
    processes.append(decoder._process)
    assert await read(decoder, LARGE) == [event for part in parts(LARGE, None) for event in part]
    assert processes == [None, decoder._process] != [None, None]
    await decoder.close()


@pytest.mark.parametrize("piece", [b"\x80", b"\x91\xa1x", b"\xc0", msgpack.packb(["BlockRemoved", []])])
def test_events_of_any_kind_count_before_they_are_looked_at(piece: bytes) -> None:
    count = EVENTS_MAX + 1
    head = b"\x93\xcb" + bytes(8) + b"\xdd" + count.to_bytes(4, "big")
    with pytest.raises(MalformedError, match="events, more than"):
        list(events(head + piece * count + b"\xc0"))


async def test_a_batch_that_takes_too_long_costs_its_process_and_no_other_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = "import cellgate.extras.kv_events.wire as d; d.BATCH_CPU_S = 0.05; real = d.parts\n"
    slow += "def spin(payload, rank):\n    while len(payload) % 2: pass\n    return real(payload, rank)\n"
    slow += "d.parts = spin; d.main()\n"
    monkeypatch.setattr(wire, "_KV_WIRE_COMMAND", (*wire._KV_WIRE_COMMAND[:2], slow))
    odd, even = (LARGE, LARGE + b"\xc0") if len(LARGE) % 2 else (LARGE + b"\xc0", LARGE)
    decoder = KvDecoder()
    first, second = await asyncio.gather(read(decoder, odd), read(decoder, even), return_exceptions=True)
    assert isinstance(first, MalformedError)
    assert isinstance(second, list)
    await decoder.close()


# Where a unit publishes: as configured, and as engines tell.

URL = "http://10.0.0.1:8000"


def test_a_rank_is_at_the_port_behind_the_one_before_and_vllm_tells_of_each() -> None:
    assert configured(KvEvents("vllm", "tcp://a:5557", "tcp://a:6000", ranks=2)) == {
        0: Publisher("tcp://a:5557", "tcp://a:6000"),
        1: Publisher("tcp://a:5558", "tcp://a:6001"),
    }
    assert configured(KvEvents("vllm", "tcp://a:5557")) == {0: Publisher("tcp://a:5557", "")}
    row = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}
    answer = {"0": row, "1": {"endpoint": "tcp://[::]:7"}, "2": {"publisher": "null"}, "x": row}
    assert publishers_in("vllm", answer, URL) == {
        0: Publisher("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
        1: Publisher("tcp://10.0.0.1:7", ""),
    }


def test_sglang_tells_a_base_and_how_many() -> None:
    """The second row is what 0.5.23 tells."""
    row = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5, "dp_size": 2}
    assert publishers_in("sglang", {"kv_events": row}, "http://[fe80::1]:80") == {
        0: Publisher("tcp://[fe80::1]:5", ""),
        1: Publisher("tcp://[fe80::1]:6", ""),
    }
    ports = {"endpoint_port_base": 15601, "replay_endpoint_port_base": 15701, "topic": "kv", "block_size": 32}
    answer = {"version": "0.5.23", "kv_events": row | ports, "internal_states": [{}]}
    assert publishers_in("sglang", answer, URL) == {
        0: Publisher("tcp://10.0.0.1:15601", "tcp://10.0.0.1:15701"),
        1: Publisher("tcp://10.0.0.1:15602", "tcp://10.0.0.1:15702"),
    }


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_is_not_understood_is_no_publisher(engine: str) -> None:
    endpoints: list[Any] = [3, "ipc:///tmp/x", "tcp://*:0", "tcp://*:99999"]
    port = {"publisher": "zmq", "endpoint_port_base": 5}
    rows: list[Any] = [None, port | {"endpoint_port_base": "5"}, port | {"dp_size": 10**9}]
    answers: list[Any] = [None, [], {"0": None}, {str(KV_WIRE_RANKS_MAX): {"endpoint": "tcp://*:5557"}}]
    answers += [{"0": {"endpoint": endpoint}} for endpoint in endpoints]
    answers += [{"kv_events": row} for row in (*rows, port | {"publisher": "null"})]
    assert [publishers_in(engine, answer, URL) for answer in answers] == [{}] * len(answers)


# KvEventFollowers one rank: gaps, replays, restarts, lost connections, broken publishers.

UP, DOWN = Reached(True), Reached(False)


class Engine:
    """A publisher that keeps all it has published."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.kept: list[EventBatch] = []

    def publish(self, *events: Any) -> EventBatch:
        number = len(self.kept)
        self.kept.append(EventBatch(number, batch(*events, rank=None)))
        return self.kept[-1]

    def store(self, name: int, parent: int | None = None, first: int | None = None) -> EventBatch:
        first = self.first + name if first is None else first
        return self.publish(["BlockStored", [name], parent, [first, first], 2, None, "GPU", None])


class FakeLink:
    """A link whose reader is told what comes."""

    def __init__(self, engine: Engine | None) -> None:
        self.engine = engine
        self.coming: deque[EventBatch | Reached | Exception] = deque()
        self.replays: list[int] = []
        self.is_closed = False
        self._came = asyncio.Event()

    @property
    def can_replay(self) -> bool:
        return self.engine is not None

    def take(self) -> EventBatch | Reached | None:
        found = self.coming.popleft() if self.coming else None
        if isinstance(found, Exception):
            raise found
        return found

    async def wait(self) -> None:
        await self._came.wait()
        self._came.clear()

    async def replay(self, first: int) -> AsyncGenerator[EventBatch, None]:
        assert self.engine is not None
        self.replays.append(first)
        for message in self.engine.kept[first:]:
            yield message

    def close(self) -> None:
        self.is_closed = True

    async def comes(self, *found: EventBatch | Reached | Exception) -> None:
        self.coming.extend(found)
        self._came.set()
        await settled()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Stage:
    """A follower on a fake link."""

    def __init__(self, engine: Engine | None) -> None:
        self.known = KnownPrefixes(PrefixCache(10), Lessons())
        self.link = FakeLink(engine)
        self.counts: Counter[str] = Counter()
        self.links = 0
        link = cast("Any", self._connect)
        follower = RankFollower("a", 0, self.known, link, lambda: 1.0, self.counts, KvDecoder())
        self.task = asyncio.create_task(follower.run())

    def _connect(self) -> FakeLink:
        self.links += 1
        return self.link

    @property
    def index(self) -> KvIndex:
        return self.known.rank(0, 1 << 20)

    @property
    def has_say(self) -> bool:
        return bool(self.known._live)


@contextlib.asynccontextmanager
async def follows(engine: Engine | None) -> AsyncGenerator[Stage, None]:
    stage = Stage(engine)
    await settled()
    yield stage
    stage.task.cancel()


async def test_what_was_published_before_and_in_a_gap_is_replayed() -> None:
    engine = Engine()
    engine.store(1)
    async with follows(engine) as stage:
        await stage.link.comes(UP, engine.store(2, 1))
        assert (len(stage.index), stage.has_say) == (2, True)
        await stage.link.comes(engine.store(3, 2))
        assert (len(stage.index), stage.link.replays, stage.counts["gaps"]) == (3, [0], 0)
        engine.store(4, 3)
        await stage.link.comes(engine.store(5, 4), engine.store(6, 5))
        assert (len(stage.index), stage.has_say) == (6, True)
    assert (stage.link.replays, stage.counts["gaps"]) == ([0, 3], 1)


async def test_a_lost_connection_has_no_say_until_what_was_missed_is_replayed() -> None:
    engine = Engine()
    async with follows(engine) as stage:
        await stage.link.comes(UP, engine.store(1), DOWN)
        assert not stage.has_say
        engine.store(2, 1)
        await stage.link.comes(UP)
        assert (len(stage.index), stage.has_say) == (2, True)
    assert (stage.link.replays, stage.counts["disconnects"]) == ([0, 0], 1)


async def test_a_gap_or_a_lost_connection_without_a_replay_begins_anew() -> None:
    engine = Engine()
    async with follows(None) as stage:
        await stage.link.comes(UP, engine.store(1))
        engine.store(2, 1)
        await stage.link.comes(engine.store(3))
        assert (len(stage.index), stage.counts["gaps"]) == (1, 1)
        await stage.link.comes(engine.store(4, 3), DOWN, UP, engine.store(5))
        assert len(stage.index) == 1


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_another_process_behind_the_same_address_begins_anew(count: int) -> None:
    """It may have published less than the one before, or as much, or more."""
    engine = Engine()
    async with follows(engine) as stage:
        await stage.link.comes(UP, engine.store(1), engine.store(2), DOWN)
        engine.kept.clear()
        engine.first = 100
        for name in range(count):
            engine.store(10 + name)
        await stage.link.comes(UP)
        assert len(stage.index) == count


async def test_numbers_that_run_backwards_are_another_process_and_always_of_a_broken_publisher() -> None:
    engine = Engine()
    async with follows(engine) as stage:
        await stage.link.comes(UP, engine.store(1), engine.store(2))
        engine.kept.clear()
        for name in (7, 8):
            await stage.link.comes(engine.store(name))
            assert len(stage.index) == name - 6
        assert stage.counts["restarts"] == 1
        # A restart that probes have seen is replayed from its beginning.
        stage.known.forget()
        await stage.link.comes(engine.store(9, 8))
        assert len(stage.index) == 3
    async with follows(None) as stage:
        await stage.link.comes(UP, *[Engine().store(1)] * (RESTARTS_MAX + 2))
        assert (len(stage.index), stage.has_say, stage.counts["broken"]) == (0, False, 1)


@pytest.mark.parametrize(
    ("trouble", "count"),
    [
        (EventBatch(1, b"garbage"), "malformed"),
        (MalformedError("no number"), "malformed"),
        (BrokenPublisherError("does not speak ZeroMQ"), "broken"),
    ],
)
async def test_a_broken_publisher_is_left_with_one_line(
    trouble: EventBatch | Exception, count: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with follows(None) as stage:
        with caplog.at_level("WARNING"):
            await stage.link.comes(UP, Engine().store(1))
            await stage.link.comes(trouble)
        assert (len(stage.index), stage.has_say, stage.link.is_closed) == (0, False, True)
        assert stage.counts[count] == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("unit a: its KV events (rank 0) are not used: ")


async def test_a_huge_batch_leaves_others_their_turns() -> None:
    engine, turns, count = Engine(), 0, 2 * BLOCKS_PER_TURN
    async with follows(None) as stage:
        await stage.link.comes(UP)
        events = [["BlockStored", [name], None, [name, name], 2] for name in range(count)]
        stage.link.coming.append(engine.publish(*events))
        stage.link._came.set()
        while len(stage.index) < count:
            turns += 1
            await asyncio.sleep(0)
    assert turns >= 2
