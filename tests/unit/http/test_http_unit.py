"""Connections to a unit, turns of units that send much, and which replies need no parser."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any, cast

import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.reply import BYTES_MAX, ReplyReader, UsualReply, usual_reply
from cellgate.proxy.http.turns import PART_BYTES, PIECE_BYTES, ReadScheduler
from cellgate.proxy.http.unit import POOL_IDLE_S, Pool, UnitConnection
from tests.sim.loop import SimLoop
from tests.sim.world import World, played, run
from tests.unit.http.test_fetch import TIMEOUT_S, fetch_of
from tests.wire.rig import Rig
from tests.wire.stage import simulated, stage
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, TOKENS, Received, chunk, whole

HOST, PORT = "unit", 8000
URL = f"http://{HOST}:{PORT}"
CONNECT_S = 3.0


class Taker:
    """Takes what the pool gives."""

    def __init__(self) -> None:
        self.conn: UnitConnection | None = None
        self.failure: Failure | None = None

    def on_connected(self, conn: UnitConnection) -> None:
        self.conn = conn

    def on_failed(self, failure: Failure) -> None:
        self.failure = failure


class Place:
    """A pool, and units that accept connections and say nothing; `accepted` holds who accepted each."""

    def __init__(self) -> None:
        self.world = world = World(seed=1)
        self.pool = Pool(URL, world.loop, connect_timeout_s=CONNECT_S, tls=None)
        self.accepted: list[str] = []
        self.listen(HOST)

    def listen(self, host: str) -> None:
        """Let a host listen, under an address of its own."""
        address = self.world.net.add_host(host)

        def accept() -> asyncio.Protocol:
            self.accepted.append(host)
            return asyncio.Protocol()

        self.world.net.listen(accept, address, PORT, is_outside=True)

    async def take(self, *, fresh: bool = False, wait_s: float = 1.0) -> UnitConnection:
        """What the pool gives within a while."""
        conn = (await self.ask(fresh=fresh, wait_s=wait_s)).conn
        assert conn is not None
        return conn

    async def ask(self, *, fresh: bool = False, wait_s: float = 1.0) -> Taker:
        """What the pool does within a while."""
        taker = Taker()
        self.pool.take(taker, fresh=fresh)
        await asyncio.sleep(wait_s)
        return taker

    def play(self, test: Coroutine[Any, Any, None]) -> None:
        """Run a test, at whose end the pool must have left nothing open."""

        async def main() -> None:
            await test
            self.pool.close()
            await asyncio.sleep(1.0)
            for conn in tuple(self.pool.connections):
                conn.drop()
            await asyncio.sleep(1.0)
            assert not self.pool.connections

        run(self.world, main())


@played(Place)
async def test_the_youngest_that_was_given_back_is_taken_first_unless_a_fresh_one_is_asked_for(
    place: Place,
) -> None:
    conns = [await place.take() for _ in range(3)]
    assert [conn.reused for conn in conns] == [False] * 3
    for conn in conns:
        place.pool.give_back(conn)
    again = [await place.take(wait_s=0.0) for _ in range(3)]
    assert again == conns[::-1]
    assert [conn.reused for conn in conns] == [True] * 3
    assert len(place.accepted) == 3
    place.pool.give_back(conns[0])
    assert await place.take(fresh=True) is not conns[0]


@played(Place)
async def test_one_that_was_idle_too_long_is_closed_and_not_taken(place: Place) -> None:
    first = await place.take()
    place.pool.give_back(first)
    await asyncio.sleep(POOL_IDLE_S)
    second = await place.take()
    assert second is not first
    assert list(place.pool.connections) == [second]
    # The purge closes what is too old.
    place.pool.give_back(second)
    for _ in range(2):
        place.pool.give_back(await place.take(fresh=True))
    now = place.world.loop.time()
    place.pool.purge(now + POOL_IDLE_S - 1.5)
    await asyncio.sleep(0.1)
    assert len(place.pool.connections) == 2
    place.pool.purge()
    await asyncio.sleep(0.1)
    assert len(place.pool.connections) == 0


@played(Place)
async def test_one_that_the_unit_has_closed_is_not_taken_and_says_so_when_it_is_used(place: Place) -> None:
    first, used = await place.take(), await place.take()
    place.pool.give_back(first)
    place.world.net.reset(HOST)
    await asyncio.sleep(0.1)
    assert await place.take() is not first
    sink = Taker()
    used.send(b"GET / HTTP/1.1\r\n\r\n", b"", cast(Any, sink), to_head=False)
    assert sink.failure is not None
    assert sink.failure.kind is FailureKind.CLOSED_EARLY


@played(Place)
async def test_what_nobody_waits_for_any_more_is_kept_for_the_next(place: Place) -> None:
    taker = Taker()
    place.pool.take(taker)
    place.pool.cancel(taker)
    await asyncio.sleep(1.0)
    assert taker.conn is None
    await place.take(wait_s=0.0)
    assert len(place.accepted) == 1


@played(Place)
async def test_the_name_is_looked_up_for_each_connection(place: Place) -> None:
    await place.take()
    place.listen("elsewhere")
    place.world.net.names[HOST] = place.world.net.names["elsewhere"]
    await place.take()
    assert place.accepted == [HOST, "elsewhere"]


@played(Place)
async def test_a_closed_pool_keeps_nothing_and_lets_what_is_in_use_finish(place: Place) -> None:
    used, idle = await place.take(), await place.take()
    place.pool.give_back(idle)
    waiting = Taker()
    place.pool.take(waiting, fresh=True)
    place.pool.close()
    await asyncio.sleep(0.1)
    assert waiting.failure is not None
    assert waiting.failure.kind is FailureKind.EVICTED
    assert (used.usable, idle.usable) == (True, False)
    place.pool.give_back(used)
    assert not used.usable


FAULTS: dict[str, tuple[Callable[[World], None], FailureKind]] = {
    "nobody listens": (lambda world: world.net.kill(HOST), FailureKind.REFUSED),
    "no answer": (lambda world: world.net.blackhole(HOST), FailureKind.CONNECT_TIMEOUT),
    "no route": (lambda world: world.net.fail_connects(HOST, 113), FailureKind.UNREACHABLE),
    "no name": (lambda world: world.net.fail_resolver(HOST), FailureKind.NO_RESOURCES),
    "no descriptors left": (lambda world: world.net.exhaust_files("gate"), FailureKind.NO_RESOURCES),
}


@pytest.mark.parametrize(("strike", "kind"), FAULTS.values(), ids=FAULTS)
@played(Place)
async def test_a_failed_connect_says_whose_fault_it_is(
    place: Place, strike: Callable[[World], None], kind: FailureKind
) -> None:
    strike(place.world)
    taker = await place.ask(wait_s=CONNECT_S + 1.0)
    assert taker.failure is not None
    assert taker.failure.kind is kind
    assert HOST in taker.failure.message or kind is FailureKind.NO_RESOURCES
    place.world.net.heal()
    if kind is not FailureKind.REFUSED:
        await place.take()


@pytest.mark.parametrize(
    ("url", "host", "port", "authority"),
    [
        ("http://a", "a", 80, b"a"),
        ("https://a", "a", 443, b"a"),
        ("http://a:8000", "a", 8000, b"a:8000"),
        ("http://[::1]:8000", "::1", 8000, b"[::1]:8000"),
    ],
)
def test_where_a_url_leads(url: str, host: str, port: int, authority: bytes) -> None:
    loop = SimLoop()
    pool = Pool(url, loop, connect_timeout_s=1.0, tls=None)
    loop.close()
    assert (pool.host, pool.port, pool.authority) == (host, port, authority)


# Units that send more than one turn of the loop should parse: others have their turn in between.

CHUNKED_HEAD = SSE_HEAD.replace(b"text/event-stream", b"application/json")
READ_BYTES = 256_000
"""The most that the loop reads of one connection at once."""
STREAMS = 12
EVENT = b'data: {"id":"t"}\n\n'
LARGE = b"data: %b\n\n" % (b"a" * 5000)
FLOODS = {
    "tokens": (EVENT, chunk(EVENT)),
    "large events": (LARGE, chunk(LARGE)),
    "a byte at a time": (EVENT, b"".join(chunk(EVENT[at : at + 1]) for at in range(len(EVENT)))),
}
"""An event, and how it is sent."""
MANY = READ_BYTES // len(chunk(EVENT))
FLOOD = chunk(EVENT) * MANY


class Street:
    """Streams of one gate, of one loop."""

    def __init__(self, streams: int = STREAMS) -> None:
        self.due: list[Callable[[], None]] = []
        self.read_scheduler = ReadScheduler(self.due.append, LIMITS.reply_bytes_per_turn)
        self.rigs = [Rig(read_scheduler=self.read_scheduler) for _ in range(streams)]
        for rig in self.rigs:
            rig.feed([SSE_HEAD + chunk(TOKENS[0])])

    def late(self) -> int:
        """How much was read of all streams together, and has yet to be parsed."""
        return sum(len(rig.conn._late) - rig.conn._late_at for rig in self.rigs)

    def turn(self) -> None:
        """The next turn of the loop."""
        due, self.due[:] = self.due[:], []
        for callback in due:
            callback()


@pytest.mark.parametrize(("event", "sent"), FLOODS.values(), ids=FLOODS)
def test_one_turn_parses_no_more_of_all_streams_together_than_the_bound(event: bytes, sent: bytes) -> None:
    street, many = Street(), READ_BYTES // len(sent)
    for rig in street.rigs:
        rig.feed([sent * many])
    late = [STREAMS * many * len(sent), street.late()]
    while street.due:
        street.turn()
        late.append(street.late())
    # Small pieces are dear, and so there are fewer of them.
    allowed = LIMITS.reply_bytes_per_turn / (1 + PIECE_BYTES * sent.count(b"\r\n") / 2 / len(sent))
    parsed = [before - after for before, after in pairwise(late)]
    assert 0 < max(parsed) <= allowed + PART_BYTES
    assert sum(parsed) == late[0]
    for rig in street.rigs:
        assert rig.wire.reading, "all is read on in the end"
        assert rig.body() == TOKENS[0] + event * many


def test_streams_have_their_turns_one_after_the_other() -> None:
    street = Street()
    for rig in street.rigs:
        rig.feed([FLOOD])
    before = [len(rig.body()) for rig in street.rigs]
    while street.due:
        seen = [len(rig.body()) - had for rig, had in zip(street.rigs, before, strict=True)]
        late = [had for rig, had in zip(street.rigs, seen, strict=True) if not rig.wire.reading]
        assert not late or max(late) - min(late) <= PART_BYTES
        street.turn()


def test_a_small_read_waits_for_nobody() -> None:
    street = Street()
    *floods, neighbour = street.rigs
    for rig in floods:
        rig.feed([FLOOD])
    assert street.due
    unusual = b"event: x\n" + TOKENS[1]
    neighbour.feed([chunk(unusual)])
    assert neighbour.body() == TOKENS[0] + unusual


def test_the_first_read_of_a_reply_comes_before_streams_that_go_on_which_have_half_of_each_turn() -> None:
    """A first token with its head is more than a small read, and waited for a part of each stream."""
    street = Street()
    for rig in street.rigs:
        rig.feed([FLOOD])
    first = SSE_HEAD + chunk(TOKENS[0] * 100)
    assert LIMITS.small_reply_bytes < len(first)
    begun_late = [Rig(read_scheduler=street.read_scheduler) for _ in range(100)]
    for rig in begun_late:
        rig.feed([first])
    turns = 0
    while any(not rig.body() for rig in begun_late):
        late, waiting = street.late(), sum(not rig.body() for rig in begun_late)
        street.turn()
        turns += 1
        assert late - street.late() >= PART_BYTES, "the others go on as well"
        assert sum(not rig.body() for rig in begun_late) < waiting
    assert turns <= 2 + 2 * 100 * (len(first) + PIECE_BYTES) // LIMITS.reply_bytes_per_turn


def test_a_stream_of_whole_chunks_has_its_first_read_once() -> None:
    reader = ReplyReader()
    reader.expect(to_head=False)
    assert reader.is_before_body
    assert reader.feed(SSE_HEAD) == []
    assert reader.is_before_body, "its head came alone"
    for _ in range(2):
        assert reader.feed(chunk(TOKENS[0])) == [TOKENS[0]]
        assert not reader.is_before_body
    reader.expect(to_head=False)
    assert reader.is_before_body


def begun() -> Rig:
    """A stream of which a part of a large read has yet to be parsed."""
    rig = Rig()
    rig.feed([SSE_HEAD + chunk(TOKENS[0]), FLOOD])
    assert rig.due
    assert not rig.wire.reading
    return rig


def run_out(rig: Rig) -> None:
    """All turns that are due."""
    while rig.due:
        rig.turn()


def test_a_connection_is_read_on_once_all_that_was_read_is_parsed() -> None:
    rig = begun()
    for _ in range(2):
        while not rig.wire.reading:
            assert rig.due
            rig.turn()
        rig.feed([FLOOD])
    run_out(rig)
    rig.feed([LAST_CHUNK])
    assert rig.ends[-1] == "done"
    assert rig.kept == [rig.conn]


def test_nothing_is_parsed_for_a_client_that_does_not_read_and_all_of_it_once_it_does() -> None:
    rig = begun()
    # Who pauses and goes on within a turn has no more turns than others.
    for paused in [True, False] * 5:
        rig.attempt.pause(paused=paused)
    before = len(rig.shown)
    rig.turn()
    assert len(rig.shown) - before <= LIMITS.reply_bytes_per_turn + 2 * PART_BYTES
    assert len(rig.due) <= 1
    rig.attempt.pause(paused=True)
    shown = len(rig.shown)
    run_out(rig)
    assert (len(rig.shown), rig.wire.reading) == (shown, False)
    rig.attempt.pause(paused=False)
    run_out(rig)
    assert rig.wire.reading
    assert rig.body() == TOKENS[0] + EVENT * MANY


def test_what_was_read_before_a_connection_broke_still_counts() -> None:
    rig = begun()
    rig.feed([], close=True)
    assert rig.body() == TOKENS[0] + EVENT * MANY
    assert [failure.kind for failure in rig.failures] == [FailureKind.CLOSED_EARLY]
    run_out(rig)
    assert rig.bugs == []


def test_a_plain_body_that_the_close_ends_is_whole_whatever_has_yet_to_be_parsed() -> None:
    rig, body = Rig(), b"a" * 3 * LIMITS.reply_bytes_per_turn
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
    rig.feed([head, body], close=True)
    assert rig.ends == ["committed", "done"]
    assert len(rig.body()) == len(body)


def test_a_unit_that_goes_on_behind_the_end_of_its_reply_gets_no_other_request() -> None:
    rig = Rig()
    reply = chunk(b"a" * (PART_BYTES - len(b"3fff\r\n\r\n" + LAST_CHUNK))) + LAST_CHUNK
    assert len(reply) == PART_BYTES
    rig.feed([CHUNKED_HEAD, reply + b"HTTP/1.1 200 OK\r\n"])
    run_out(rig)
    assert rig.ends == ["committed", "done"]
    assert (rig.kept, rig.wire.closed) == ([], True)


def test_a_connection_that_is_dropped_has_no_turn() -> None:
    rig = begun()
    shown = len(rig.shown)
    rig.conn.drop()
    run_out(rig)
    assert len(rig.shown) == shown
    # Nor has a stream of tokens, the reads of which are not held up.
    again = Rig()
    for piece in (SSE_HEAD + chunk(TOKENS[0]), *map(chunk, TOKENS[1:]), LAST_CHUNK):
        again.feed([piece])
        assert again.wire.reading
        assert not again.due
    assert again.body() == b"".join(TOKENS)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_shown_does_not_depend_on_the_sizes_of_reads(seed: int) -> None:
    chance = random.Random(seed)
    events = [
        b'data: {"id":"%d","text":"%b"}\n\n' % (number, b"x" * int(chance.paretovariate(0.7)))
        for number in range(3000)
    ]
    bytes_sent = b"".join(map(chunk, events)) + LAST_CHUNK
    rig, at = Rig(), 0
    rig.feed([SSE_HEAD])
    while at < len(bytes_sent):
        size = chance.choice((100, 4096, 5000, 60_000, READ_BYTES))
        rig.feed([bytes_sent[at : at + size]])
        at += size
        if chance.random() < 0.2:
            rig.attempt.pause(paused=True)
            rig.turn()
            rig.attempt.pause(paused=False)
    run_out(rig)
    assert (rig.ends[-1], rig.bugs, rig.failures) == ("done", [], [])
    assert rig.body() == b"".join(events)


# Which replies are taken for the one that came before, and need no parser.

EARLIER, LATER = b"Mon, 23 Nov 2026 18:43:47 GMT", b"Mon, 23 Nov 2026 18:43:48 GMT"


def dated(time: bytes, body: bytes = b"ok", status: int = 200) -> bytes:
    """As uvicorn writes it."""
    head = b"HTTP/1.1 %d OK\r\ndate: %b\r\nserver: uvicorn\r\ncontent-length: %d\r\n\r\n"
    return head % (status, time, len(body)) + body


def usual(data: bytes) -> UsualReply | None:
    """What is learnt of a reply that was read at once."""
    reader = ReplyReader()
    reader.expect(to_head=False)
    pieces = reader.feed(data)
    assert reader.ended, reader.misbehaved
    assert reader.head is not None
    return usual_reply(data, reader.head, b"".join(pieces), keep_alive=reader.keep_alive)


UNLIKE = {
    "another status": dated(LATER, status=503),
    "another body": dated(LATER, b"no"),
    "a longer body": dated(LATER, b"okay"),
    "a part of it": dated(LATER)[:-1],
    "more than it": dated(LATER) + b"H",
    "a field instead of the time": dated(b"a\r\nconnection: close\r\nx: aaaa"),
    "a control character in the time": dated(LATER[:-1] + b"\0"),
    "nothing": b"",
}


@pytest.mark.parametrize("data", UNLIKE.values(), ids=UNLIKE)
def test_only_the_time_of_the_usual_reply_may_differ(data: bytes) -> None:
    known = usual(dated(EARLIER))
    assert known is not None
    assert known.is_like(dated(EARLIER))
    assert known.is_like(dated(LATER))
    assert not known.is_like(data)


@pytest.mark.parametrize("body", [b"ok", b"\r\ndate: " + EARLIER + b"\r\n"])
def test_without_a_date_in_its_head_nothing_may_differ(body: bytes) -> None:
    known = usual(whole(body))
    assert known is not None
    assert known.is_like(whole(body))
    assert not known.is_like(whole(body.replace(EARLIER, LATER).replace(b"ok", b"no")))


@pytest.mark.parametrize(
    "data",
    [
        whole(b"x" * BYTES_MAX),
        whole(b"ok", head="Connection: close\r\n"),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
    ],
    ids=["large", "the last of its connection", "in chunks", "without a body"],
)
def test_other_replies_are_always_parsed(data: bytes) -> None:
    assert usual(data) is None


@simulated
async def test_replies_change_as_the_server_does() -> None:
    """The same twice, another one, one in two reads, and the first one again, on one connection."""
    first, other = dated(EARLIER), dated(LATER, b"no", 503)
    answers: Iterator[tuple[bytes, ...]] = iter(
        [
            (first,),
            (dated(LATER),),
            (other,),
            (other[:40], other[40:]),
            (other,),
            (first[:9], first[9:]),
            (first,),
        ]
    )

    async def script(request: Received) -> None:
        for part in next(answers):
            request.write(part)
            await asyncio.sleep(0.1)

    async with stage(script) as here:
        fetch = fetch_of(here)
        replies = [await fetch("GET", "/health", timeout_s=TIMEOUT_S) for _ in range(7)]
        ok, bad = (200, b"ok", "2"), (503, b"no", "2")
        said = [(reply.status, reply.body, reply.headers["content-length"]) for reply in replies]
        assert said == [ok, ok, bad, bad, bad, ok, ok]
        assert [connection.requests for connection in here.unit.connections] == [7]


@pytest.mark.parametrize("length", [b"", b" ", b"+2", b"2\r\ncontent-length: 3"])
def test_a_head_that_was_seen_with_a_length_says_nothing_of_one_without(length: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nx-seen: 1%b\r\ncontent-length: %%b\r\n\r\nok" % length.hex().encode()
    for said, fails in ((b"2", False), (length, True)):
        reader = ReplyReader()
        reader.expect(to_head=False)
        with suppress(ValueError):
            reader.feed(head % said)
        assert bool(reader.misbehaved) is fails, reader.misbehaved


# Garbage: none of it is shown.

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def headed(*lines: str, body: bytes = b"{}") -> bytes:
    """A reply of two bytes with whatever header lines."""
    return PLAIN + "".join(line + "\r\n" for line in lines).encode("latin-1") + b"\r\n" + body


GARBAGE = [
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"HTTP/1.1 OK\r\n\r\n",
    *(whole(status=f"{status} OK") for status in ("000", "600")),
    *(headed(f"Content-Length: {length}") for length in ("2, 2", "+2", "0x2", "-2", "18446744073709551618")),
    *(headed("Content-Length: 2", f"Content-Length: {other}") for other in (2, 3)),
    headed("Content-Length: 2", "Transfer-Encoding: chunked"),
    headed("Transfer-Encoding: gzip"),
    *(
        headed(*(f"Transfer-Encoding: {coding}" for coding in codings), body=chunk(b"{}") + LAST_CHUNK)
        for codings in (["gzip, chunked"], ["gzip", "chunked"])
    ),
    headed("X-A: b", " c", "Content-Length: 2"),
    *(headed(f"X-A: b{end}X-B: c", "Content-Length: 2") for end in ("\0", "\r", "\n")),
    *(headed(line) for line in ("Content-Length 2", "Content-Length : 2")),
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    whole(b"{}") + b"{}",
    *(SSE_HEAD + chunks for chunks in (b"zz\r\ndata", b"3\r\ndata: x\n\n\r\n")),
]


@pytest.mark.parametrize("sent", GARBAGE)
def test_garbage_is_shown_to_nobody_however_it_arrives(sent: bytes) -> None:
    half = len(sent) // 2
    for reads in ([sent], [sent[:half], sent[half:]]):
        rig = Rig()
        rig.feed(reads)
        assert (rig.shown, rig.ends, rig.wire.closed, rig.bugs) == (b"", ["failed"], True, [])
        assert rig.failures[0].kind is FailureKind.GARBAGE
