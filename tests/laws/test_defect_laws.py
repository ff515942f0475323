"""An exception of the gate's own, wherever it comes from, ends one request and leaves nothing behind.

Every method that a request runs through is made to fail once, at its first calls. Then the client must
have had an end, every account must be even, and the next request must be answered.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

import pytest

from cellgate.proxy.control.dispatcher import LocalDispatcher, LocalReports
from cellgate.proxy.control.plane import Plane
from cellgate.proxy.gateway import Gateway
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.http.request import RequestReader
from cellgate.proxy.http.server import ClientConnection
from cellgate.proxy.http.unit import Pool, UnitConnection
from cellgate.proxy.process.signals import Ticker
from cellgate.proxy.request import answers, failures, start
from cellgate.proxy.request.attempt import Attempt
from cellgate.proxy.request.body import read_ask
from cellgate.proxy.request.continuation import StreamResume
from cellgate.proxy.request.exchange import Exchange, Selection
from cellgate.proxy.request.large_bodies import LargeReads
from cellgate.proxy.request.life import ExchangeEvent, ExchangeState, RequestLife, Transition
from cellgate.proxy.request.response import Response
from cellgate.proxy.request.services import Services
from cellgate.proxy.request.table import EXCHANGE_TABLE, IMPOSSIBLE_EVENTS
from cellgate.router.nouns import Ask, Evidence, Sign, Strength
from tests.wire.client import Client, chat, get, post
from tests.wire.replies import MalformedError
from tests.wire.stage import Stage, simulated, stage
from tests.wire.unit import SSE_HEAD, STREAM, TOKENS, Received, chunk, in_turn, then_close, whole

FIRST_CALLS = 2
END_S = 6.0
"""A client is told within this: a connection that is not closed in good order is cut after 5 s."""
CLASSES = (
    *(
        RequestLife,
        Exchange,
        Response,
        Selection,
        StreamResume,
        Attempt,
        UnitConnection,
        Pool,
        ClientConnection,
        RequestReader,
    ),
    *(LocalDispatcher, LocalReports, LargeReads, Gateway, Services, Plane),
)
ACTIONS = (answers, start, failures, failures, start, start)
ACTION_MODULES = {module.__name__ for module in ACTIONS}
_CALLED_BY_THE_LOOP = (
    # By way of the read scheduler.
    "resume_parsing",
    "connection_made",
    "connection_lost",
    "data_received",
    "pause_writing",
    "resume_writing",
)
NOT_TOLD = {
    # What ends a request that has failed, and so is not to fail itself.
    *("RequestLife.crashed", "ending.collapse", "ending._endings", "Services.defect", "Pool.report"),
    *("ClientConnection.crashed", "UnitConnection._crash"),
    # They would fail in the loop: what they consist of is made to fail.
    *("ClientConnection.__init__", "RequestReader.__init__", "Pool._settled", "ClientConnection._begin"),
    *(f"{side}.{name}" for side in ("ClientConnection", "UnitConnection") for name in _CALLED_BY_THE_LOOP),
    *("UnitConnection._fail", "Attempt.on_failed", "Call.on_failed", "RequestLife.asked"),
    # These give back, and do nothing else.
    *("ClientConnection._release", "ClientConnection.close", "Selection.cancel"),
    # How a gate lives, not a request.
    *("Gateway.listen", "Gateway.stop", "Gateway._end", "Gateway.close", "Gateway.leave_to_successor"),
    *("Plane.begin", "Plane.configure", "Plane.announce_stop", "Plane.close", "Pool.close"),
}


class InjectedError(LookupError):
    """What fails."""


def methods() -> dict[str, list[tuple[Any, str]]]:
    """What is made to fail, by name: methods of CLASSES, and ACTIONS wherever they are called from."""
    found: dict[str, list[tuple[Any, str]]] = {}
    for holder in (*CLASSES, *ACTIONS):
        for name, member in vars(holder).items():
            where = getattr(member, "__module__", "")
            if inspect.isfunction(member) and (holder in CLASSES or where in ACTION_MODULES):
                known_as = member.__qualname__ if holder in CLASSES else f"{where.split('.')[-1]}.{name}"
                found.setdefault(known_as, []).append((holder, name))
    return {
        name: places
        for name, places in found.items()
        if name not in NOT_TOLD and name not in ("Gateway.__init__", "Plane.__init__", "Exchange.__init__")
    }


@contextmanager
def watched(call: Callable[[str], None]) -> Iterator[None]:
    """Have `call` called before each method and action."""
    before = {name: getattr(*places[0]) for name, places in methods().items()}
    rows = dict(EXCHANGE_TABLE)

    def wrap(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            call(name)
            return method(*args, **kwargs)

        return wrapped

    wrapped = {name: wrap(name, method) for name, method in before.items()}
    by_action = {method: wrapped[name] for name, method in before.items()}
    try:
        for name, places in PLACES.items():
            for holder, attribute in places:
                setattr(holder, attribute, wrapped[name])
        for pair, row in rows.items():
            EXCHANGE_TABLE[pair] = Transition(by_action.get(row.action, row.action), row.follows)
        yield
    finally:
        EXCHANGE_TABLE.update(rows)
        for name, places in PLACES.items():
            for holder, attribute in places:
                setattr(holder, attribute, before[name])


PLACES = methods()


@contextmanager
def bound_anew(ticker: Ticker) -> Iterator[None]:
    """What is looked at with each tick was bound before it was watched."""
    before = list(ticker.looks)
    ticker.looks = [getattr(look.__self__, look.__name__) for look in before]  # type: ignore[attr-defined]
    yield
    ticker.looks = before


async def plays_whole(client: Client, _: Stage) -> None:
    await client.ask(chat(stream=False))


async def asks_twice(client: Client, _: Stage) -> None:
    await client.ask(chat())
    await client.ask(chat(stream=False))


async def pipelines(client: Client, _: Stage) -> None:
    client.send(chat() + get("/health") + chat(stream=False))
    for _number in range(3):
        await client.reply()


async def leaves(client: Client, here: Stage) -> None:
    client.send(chat())
    await client.event()
    client.abort()


async def is_large(client: Client, here: Stage) -> None:
    async def read_large(body: bytes, *_: object) -> Ask | Failure:
        await asyncio.sleep(0.01)
        return read_ask(body)

    here.gateway.services.large_reads._read = read_large
    await client.ask(post(b'{"prompt": "' + b"x" * (1 << 20) + b'"}'))


async def is_evicted(client: Client, here: Stage) -> None:
    client.send(chat())
    await asyncio.sleep(0.1)
    unit, now = next(iter(here.plane.board.units)), here.gateway.now()
    gone = Evidence(unit, Sign.BAD, Strength.FATAL, "test", "it is gone", now)
    asyncio.get_running_loop().call_soon(here.plane.prober.observe, gone)
    await client.reply()


async def slow(request: Received) -> None:
    await asyncio.sleep(1.0)
    request.write(STREAM)


Scene = Callable[[Client, Stage], Awaitable[None]]
SCENES: dict[str, tuple[Scene, tuple[Any, ...]]] = {
    "an answer that ends by close": (plays_whole, (then_close(b"HTTP/1.1 200 OK\r\n\r\nyes"),)),
    "a stream, then an answer": (asks_twice, (in_turn(SSE_HEAD, *map(chunk, TOKENS), b"0\r\n\r\n"),)),
    "pipelined": (pipelines, (STREAM,)),
    "a unit that closes, and another": (plays_whole, (then_close(b""), whole())),
    "a unit that is busy, and another": (plays_whole, (whole(status="429 Busy"), whole())),
    "a stream that breaks": (plays_whole, (then_close(SSE_HEAD + chunk(TOKENS[0])),)),
    "a client that leaves": (leaves, (in_turn(SSE_HEAD + chunk(TOKENS[0]), *map(chunk, TOKENS)),)),
    "a large body": (is_large, (whole(),)),
    "a unit that goes down": (is_evicted, (slow, whole())),
}


def run(scene: str, call: Callable[[str], None]) -> list[str]:
    """Play a scene with `call` before each method; what was reported. All accounts are even after it."""
    play, scripts = SCENES[scene]
    defects: list[dict[str, Any]] = []

    @simulated
    async def world() -> None:
        async with stage(*scripts, defects=defects) as here:
            with watched(call), bound_anew(here.plane.ticker):
                async with here.client() as client:
                    # Whatever it is, an end comes: an answer, an error, or a connection that is closed.
                    with suppress(EOFError, ConnectionError, MalformedError, AssertionError, TimeoutError):
                        await play(client, here)
                        client.send(get("/health", "connection: close\r\n"))
                    with suppress(ConnectionError):
                        async with asyncio.timeout(END_S):
                            await client.reader.read()
                    await asyncio.sleep(END_S)
            await here.until_quiet()
            for state in here.plane.board:
                now = here.gateway.now()
                if not state.is_usable():
                    for _ in range(5):
                        here.plane.board.observe(
                            Evidence(
                                state.unit.name, Sign.GOOD, Strength.STRONG, "canary", "it answered", now
                            )
                        )
            async with here.client() as other:
                assert (await other.ask(get("/health"))).status in (200, 503)

    world()
    return [repr(problem.get("exception")) for problem in defects]


def calls_of(scene: str) -> Counter[str]:
    """Which methods a scene runs through, and how often."""
    counts: Counter[str] = Counter()
    assert run(scene, lambda name: counts.update((name,))) == []
    return counts


@pytest.mark.parametrize("scene", SCENES)
def test_a_defect_anywhere_ends_one_request_and_leaves_nothing_behind(scene: str) -> None:
    counts = calls_of(scene)
    assert len(counts) > 40
    wrong = []
    for name, times in counts.items():
        for fatal in range(1, min(times, FIRST_CALLS) + 1):
            seen: Counter[str] = Counter()

            def fail(called: str, name: str = name, fatal: int = fatal, seen: Counter[str] = seen) -> None:
                if called == name:
                    seen[name] += 1
                    if seen[name] == fatal:
                        raise InjectedError(f"{name}, call {fatal}")

            try:
                told = run(scene, fail)
            except BaseException as error:
                wrong.append(f"{name}, call {fatal}: {error!r}")
            else:
                if seen[name] < fatal or not any("InjectedError" in each for each in told):
                    wrong.append(f"{name}, call {fatal}: nobody was told: {told}")
    assert wrong == []


# The table of an exchange's life: each pair of a state and an event has a row, or a reason why it cannot be.


def test_each_pair_has_a_row_or_a_reason_why_it_cannot_be_and_each_state_is_reached_and_left() -> None:
    for pair in product(ExchangeState, ExchangeEvent):
        assert (pair in EXCHANGE_TABLE) is not (pair in IMPOSSIBLE_EVENTS), pair
        assert IMPOSSIBLE_EVENTS.get(pair, "has a row"), pair
    from_over = {row.follows for (state, _), row in EXCHANGE_TABLE.items() if state is ExchangeState.OVER}
    assert from_over == {(ExchangeState.OVER,)}
    reached = {
        state for (before, _), row in EXCHANGE_TABLE.items() for state in row.follows if state != before
    }
    assert reached == set(ExchangeState) - {ExchangeState.PARSING}


@pytest.mark.parametrize("scene", SCENES)
def test_what_happens_keeps_to_the_table(scene: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[str] = []
    for pair, row in list(EXCHANGE_TABLE.items()):
        monkeypatch.setitem(EXCHANGE_TABLE, pair, kept(pair, row, wrong))
    run(scene, lambda _name: None)
    assert wrong == []


def kept(pair: tuple[ExchangeState, ExchangeEvent], row: Transition, wrong: list[str]) -> Transition:
    """The row, with a word if it leads elsewhere."""

    def act(exchange: Exchange, *args: Any) -> Any:
        result = row.action(exchange, *args)
        if exchange.state not in row.follows:
            wrong.append(f"{pair[0].name} {pair[1].name} leads to {exchange.state.name}")
        return result

    return Transition(act, row.follows)
