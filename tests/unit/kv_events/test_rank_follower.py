"""KvEventFollowers one rank: gaps, replays, restarts, lost connections, broken publishers."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import msgpack
import pytest

from cellgate.proxy.extras.kv_events.follow import BLOCKS_PER_TURN, RESTARTS_MAX, RankFollower
from cellgate.proxy.extras.kv_events.wire import (
    BrokenPublisherError,
    EventBatch,
    KvDecoder,
    MalformedError,
    Reached,
)
from cellgate.router.kv_index import KvIndex, Lessons
from cellgate.router.prefix import KnownPrefixes, PrefixCache

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
