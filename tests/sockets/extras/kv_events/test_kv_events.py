"""KV events over real sockets of ZeroMQ: a publisher as vLLM's, its restart, and what is no publisher."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator

import msgpack
import pytest
import zmq

from cellgate.extras.kv_events.follow import KvEventFollowers
from cellgate.probes.base import Reply
from cellgate.router.board import Board
from cellgate.router.nouns import KvEvents, Unit
from cellgate.router.prefix import KnownPrefixes
from cellgate.router.unit_state import UnitState
from tests.patient import FakePatient
from tests.unit.router.fleets import board_up
from tests.wire.stage import until

HOST = "127.0.0.1"


class Publisher:
    """A publisher with replays, in a thread, as vLLM's ZmqEventPublisher."""

    def __init__(self, port: int, replay_port: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._publish = self._context.socket(zmq.PUB)
        self._publish.bind(f"tcp://*:{port}")
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.bind(f"tcp://*:{replay_port}")
        self._kept: list[list[bytes]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def store(self, *names: int, is_lost: bool = False) -> None:
        """Blocks behind one another, the first of a prompt."""
        events = [["BlockStored", list(names), None, [name for name in names for _ in "ab"], 2]]
        frames = [b"kv@a@m", len(self._kept).to_bytes(8, "big"), msgpack.packb([1.5, events, 0])]
        self._kept.append(frames)
        if not is_lost:
            self._publish.send_multipart(frames)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _answer(self) -> None:
        while not self._ended.is_set():
            if self._replay.poll(20):
                asker, _, first = self._replay.recv_multipart()
                for frames in self._kept[int.from_bytes(first, "big") :]:
                    self._replay.send_multipart([asker, b"", *frames])
                self._replay.send_multipart([asker, b"", b"", b"\xff" * 8, b""])


@pytest.fixture
def ports() -> tuple[int, int]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(2)]
        first, second = (each.getsockname()[1] for each in made)
        return first, second


@pytest.fixture
def publisher(ports: tuple[int, int]) -> Iterator[Publisher]:
    made = Publisher(*ports)
    yield made
    made.close()


def board_of(keys: KvEvents | None, engine: str = "vllm") -> Board:
    board = board_up(Unit("a", "c", f"http://{HOST}:1", engine=engine, kv_events=keys), at=1.0)
    assert board.units["a"].is_usable()
    return board


def keys_of(ports: tuple[int, int]) -> KvEvents:
    return KvEvents("vllm", f"tcp://{HOST}:{ports[0]}", f"tcp://{HOST}:{ports[1]}")


@contextlib.asynccontextmanager
async def followed(
    board: Board, answer: Reply | None = None
) -> AsyncIterator[tuple[KvEventFollowers, UnitState]]:
    def given(_target: str) -> Reply:
        assert answer is not None
        return answer

    asking = FakePatient(given)
    loop = asyncio.get_running_loop()
    following = KvEventFollowers(board, lambda _state: asking.fetch, loop.time)
    following.tick(loop.time())
    try:
        yield following, board.units["a"]
        following.tick(loop.time())
        assert len(asking.asked) <= 1
    finally:
        await following.close()


def known_of(state: UnitState) -> KnownPrefixes:
    assert state.costs.known is not None
    return state.costs.known


@pytest.mark.alone
async def test_events_are_followed_through_a_gap_and_a_restart(
    publisher: Publisher, ports: tuple[int, int]
) -> None:
    publisher.store(1, 2)
    async with followed(board_of(keys_of(ports))) as (_, state):
        known = known_of(state)
        await until(lambda: len(known) == 2 and known._live)
        publisher.store(3)
        await until(lambda: len(known) == 3)
        publisher.store(4, is_lost=True)
        publisher.store(5)
        await until(lambda: len(known) == 5)
        await asyncio.to_thread(publisher.close)
        lost_at = time.monotonic()
        await until(lambda: not known._live)
        assert time.monotonic() - lost_at < 1.0
        again = Publisher(*ports)
        try:
            again.store(7)
            await until(lambda: known._live and len(known) == 1)
        finally:
            await asyncio.to_thread(again.close)


async def test_a_unit_tells_where_it_publishes(publisher: Publisher, ports: tuple[int, int]) -> None:
    sources = b'{"0": {"endpoint": "tcp://*:%d", "replay_endpoint": "tcp://*:%d"}}' % ports
    async with followed(board_of(None), Reply(200, {}, sources)) as (_, state):
        await until(lambda: state.costs.known is not None)
        known = known_of(state)
        await until(lambda: known._live_ranks)
        publisher.store(1)
        await until(lambda: len(known) == 1)


@pytest.mark.parametrize("reply", [Reply(404, {}, b""), Reply(200, {}, b"{}"), Reply(200, {}, b"[1")])
async def test_a_unit_that_publishes_nothing_goes_by_belief(reply: Reply) -> None:
    async with followed(board_of(None), reply) as (following, state):
        await asyncio.sleep(0.05)
        following.tick(1.0)
        assert state.costs.known is None
        assert state.costs.cache is state.costs.prefixes


def test_what_does_not_speak_zeromq_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        server = await asyncio.start_server(_http, HOST, 0)
        port = server.sockets[0].getsockname()[1]
        board = board_of(KvEvents("vllm", f"tcp://{HOST}:{port}"))
        async with followed(board) as (following, _):
            await until(lambda: any(counts["broken"] for _, _, counts in following))
        server.close()

    with caplog.at_level("WARNING"):
        asyncio.run(run())
    assert ["does not speak ZeroMQ" in record.getMessage() for record in caplog.records] == [True]


async def _http(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    writer.close()
