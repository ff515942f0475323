"""KV events: the wire format of today's and of older engines, decoding of batches, followers of ranks."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.proxy.extras.kv_events import wire
from cellgate.proxy.extras.kv_events.follow import BLOCKS_PER_TURN, RESTARTS_MAX, RankFollower
from cellgate.proxy.extras.kv_events.wire import (
    EVENTS_MAX,
    ITEMS_MAX,
    PART_BLOCKS,
    RANKS_MAX,
    SMALL_BYTES,
    BrokenPublisherError,
    EventBatch,
    EventPart,
    KvDecoder,
    MalformedError,
    Publisher,
    Reached,
    configured,
    events,
    parts,
    told,
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


# Decoding of batches: small ones on the loop, large ones elsewhere, and what costs more than it is worth.


def batch_of(*events: Any) -> bytes:
    packed: bytes = msgpack.packb([1.5, events, None])
    return packed


def stores(count: int) -> list[list[Any]]:
    return [["BlockStored", [name], None, [name] * 16, 16, None, "GPU", None] for name in range(count)]


SMALL, LARGE = batch_of(*stores(10)), batch_of(*stores(2000), ["BlockRemoved", list(range(100))])


def decoded_elsewhere(payload: bytes, rank: int | None = None) -> list[Event]:
    async def run() -> list[Event]:
        decoder = KvDecoder()
        try:
            return [event async for part in decoder.decode(payload, rank) for event in part]
        finally:
            await decoder.close()

    return asyncio.run(run())


@pytest.mark.parametrize("payload", [SMALL, LARGE])
def test_a_batch_is_decoded_the_same_wherever_that_is_done(payload: bytes) -> None:
    assert decoded_elsewhere(payload) == [event for part in parts(payload, None) for event in part]


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
        decoded_elsewhere(array_of(EVENTS_MAX + 1, piece))


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


# Where a unit publishes: as configured, and as engines tell.

URL = "http://10.0.0.1:8000"


def test_a_rank_is_at_the_port_behind_the_one_before() -> None:
    keys = KvEvents("vllm", "tcp://a:5557", "tcp://a:6000", ranks=2)
    assert configured(keys) == {
        0: Publisher("tcp://a:5557", "tcp://a:6000"),
        1: Publisher("tcp://a:5558", "tcp://a:6001"),
    }
    assert configured(KvEvents("vllm", "tcp://a:5557")) == {0: Publisher("tcp://a:5557", "")}


def test_vllm_tells_of_each_rank() -> None:
    row = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}
    answer = {"0": row, "1": {"endpoint": "tcp://[::]:7"}, "2": {"publisher": "null"}, "x": row}
    assert told("vllm", answer, URL) == {
        0: Publisher("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
        1: Publisher("tcp://10.0.0.1:7", ""),
    }


def test_sglang_tells_a_base_and_how_many() -> None:
    events = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5, "dp_size": 2}
    assert told("sglang", {"kv_events": events}, "http://[fe80::1]:80") == {
        0: Publisher("tcp://[fe80::1]:5", ""),
        1: Publisher("tcp://[fe80::1]:6", ""),
    }
    replays = events | {"replay_endpoint_port_base": 9}
    assert told("sglang", {"kv_events": replays}, URL)[1].replay == "tcp://10.0.0.1:10"


def test_what_sglang_0_5_23_tells_is_read() -> None:
    ports = {"endpoint_port_base": 15601, "replay_endpoint_port_base": 15701}
    row = {"publisher": "zmq", "endpoint_host": "*", "topic": "kv", "block_size": 32, "dp_size": 1, **ports}
    assert told("sglang", {"version": "0.5.23", "kv_events": row, "internal_states": [{}]}, URL) == {
        0: Publisher("tcp://10.0.0.1:15601", "tcp://10.0.0.1:15701")
    }


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {"0": None},
        {"0": {"endpoint": 3}},
        {"0": {"endpoint": "ipc:///tmp/x"}},
        {"0": {"endpoint": "tcp://*:0"}},
        {"0": {"endpoint": "tcp://*:99999"}},
        {str(RANKS_MAX): {"endpoint": "tcp://*:5557"}},
        {"kv_events": None},
        {"kv_events": {"publisher": "zmq", "endpoint_port_base": "5"}},
        {"kv_events": {"publisher": "zmq", "endpoint_port_base": 5, "dp_size": 10**9}},
        {"kv_events": {"publisher": "null", "endpoint_port_base": 5}},
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_is_not_understood_is_no_publisher(engine: str, answer: Any) -> None:
    assert told(engine, answer, URL) == {}


# KvEventFollowers one rank: gaps, replays, restarts, lost connections, broken publishers.

UP, DOWN = Reached(True), Reached(False)


class Engine:
    """A publisher that keeps all it has published."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.kept: list[EventBatch] = []

    def publish(self, *events: Any) -> EventBatch:
        number = len(self.kept)
        packed: bytes = msgpack.packb([1.5, list(events), None])
        self.kept.append(EventBatch(number, packed))
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
        follower = RankFollower("a", 0, self.known, self._connect, lambda: 1.0, self.counts, KvDecoder())
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


def follows(engine: Engine | None, play: Callable[[Stage], Coroutine[Any, Any, None]]) -> Stage:
    async def run() -> Stage:
        stage = Stage(engine)
        await settled()
        await play(stage)
        stage.task.cancel()
        return stage

    return asyncio.run(run())


def test_what_was_published_before_is_replayed() -> None:
    engine = Engine()
    engine.store(1)

    async def play(stage: Stage) -> None:
        await stage.link.comes(UP, engine.store(2, 1))
        assert (len(stage.index), stage.has_say) == (2, True)
        await stage.link.comes(engine.store(3, 2))
        assert len(stage.index) == 3

    stage = follows(engine, play)
    assert stage.link.replays == [0]
    assert not stage.counts["gaps"]


def test_a_gap_is_filled_by_a_replay() -> None:
    engine = Engine()

    async def play(stage: Stage) -> None:
        await stage.link.comes(UP, engine.store(1))
        engine.store(2, 1)
        await stage.link.comes(engine.store(3, 2), engine.store(4, 3))
        assert (len(stage.index), stage.has_say) == (4, True)

    stage = follows(engine, play)
    assert (stage.link.replays, stage.counts["gaps"]) == ([0, 1], 1)


def test_a_gap_without_a_replay_begins_anew() -> None:
    engine = Engine()

    async def play(stage: Stage) -> None:
        await stage.link.comes(UP, engine.store(1))
        engine.store(2, 1)
        await stage.link.comes(engine.store(3))
        assert len(stage.index) == 1

    assert follows(None, play).counts["gaps"] == 1


def test_a_lost_connection_has_no_say_until_what_was_missed_is_replayed() -> None:
    engine = Engine()

    async def play(stage: Stage) -> None:
        await stage.link.comes(UP, engine.store(1), DOWN)
        assert not stage.has_say
        engine.store(2, 1)
        await stage.link.comes(UP)
        assert (len(stage.index), stage.has_say) == (2, True)

    stage = follows(engine, play)
    assert (stage.link.replays, stage.counts["disconnects"]) == ([0, 0], 1)


def test_a_lost_connection_without_a_replay_begins_anew() -> None:
    engine = Engine()

    async def play(stage: Stage) -> None:
        await stage.link.comes(UP, engine.store(1), DOWN, UP, engine.store(2))
        assert len(stage.index) == 1

    follows(None, play)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_another_process_behind_the_same_address_begins_anew(count: int) -> None:
    """It may have published less than the one before, or as much, or more."""
    engine = Engine()

    async def play(stage: Stage) -> None:
        await stage.link.comes(UP, engine.store(1), engine.store(2), DOWN)
        engine.kept.clear()
        engine.first = 100
        for name in range(count):
            engine.store(10 + name)
        await stage.link.comes(UP)
        assert len(stage.index) == count

    follows(engine, play)


def test_numbers_that_run_backwards_are_another_process() -> None:
    engine = Engine()

    async def play(stage: Stage) -> None:
        await stage.link.comes(UP, engine.store(1), engine.store(2))
        engine.kept.clear()
        await stage.link.comes(engine.store(7))
        assert len(stage.index) == 1
        await stage.link.comes(engine.store(8))
        assert len(stage.index) == 2

    assert follows(engine, play).counts["restarts"] == 1


def test_numbers_that_always_run_backwards_are_of_a_broken_publisher() -> None:
    async def play(stage: Stage) -> None:
        message = Engine().store(1)
        await stage.link.comes(UP, *[message] * (RESTARTS_MAX + 2))
        assert (len(stage.index), stage.has_say) == (0, False)

    assert follows(None, play).counts["broken"] == 1


def test_a_restart_that_probes_have_seen_is_replayed_from_its_beginning() -> None:
    engine = Engine()

    async def play(stage: Stage) -> None:
        await stage.link.comes(UP, engine.store(1))
        stage.known.forget()
        await stage.link.comes(engine.store(2, 1))
        assert len(stage.index) == 2

    follows(engine, play)


@pytest.mark.parametrize(
    ("trouble", "count"),
    [
        (EventBatch(1, b"garbage"), "malformed"),
        (MalformedError("no number"), "malformed"),
        (BrokenPublisherError("does not speak ZeroMQ"), "broken"),
    ],
)
def test_a_broken_publisher_is_left_with_one_line(
    trouble: EventBatch | Exception, count: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()

    async def play(stage: Stage) -> None:
        await stage.link.comes(UP, engine.store(1))
        await stage.link.comes(trouble)
        assert (len(stage.index), stage.has_say, stage.link.is_closed) == (0, False, True)

    with caplog.at_level("WARNING"):
        assert follows(None, play).counts[count] == 1
    assert [record.getMessage()[:47] for record in caplog.records] == [
        "unit a: its KV events (rank 0) are not used: " + caplog.records[0].getMessage()[45:47]
    ]


def test_a_huge_batch_leaves_others_their_turns() -> None:
    engine, turns = Engine(), 0

    async def play(stage: Stage) -> None:
        nonlocal turns
        await stage.link.comes(UP)
        events = [["BlockStored", [name], None, [name, name], 2] for name in range(60_000)]
        stage.link.coming.append(engine.publish(*events))
        stage.link._came.set()
        while len(stage.index) < 60_000:
            turns += 1
            await asyncio.sleep(0)

    follows(None, play)
    assert turns >= 60_000 / BLOCKS_PER_TURN
