"""`fetch`: one bounded request to a unit; whatever goes wrong, a FetchError and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from functools import partial
from typing import cast

import pytest

from cellgate.probes.base import FetchError, PageWait, Reply, Trouble
from cellgate.probes.runner import EXPIRE_EVERY_S, Timers
from cellgate.proxy.http.fetch import FETCH_FRESH_S, FRESH_POST_S, UnitFetch
from tests.sim.loop import SimLoop
from tests.wire.stage import Stage, simulated, stage
from tests.wire.unit import LAST_CHUNK, Received, Script, chunk, then_close, whole

TIMEOUT_S = 2.0
PLAIN_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def fetch_of(here: Stage) -> UnitFetch:
    """The fetch of the only unit. In the end it waits for nothing."""
    pool, loop = here.gateway.services.pool(here.plane.board.units["u0"]), asyncio.get_running_loop()
    deadlines = Timers(loop)
    here.plane.on_close.append(partial(_close, deadlines))
    return UnitFetch(pool, loop, lambda: None, deadlines)


def _close(deadlines: Timers) -> None:
    assert not deadlines.awaited
    deadlines.close()


@simulated
async def test_the_whole_reply_is_brought() -> None:
    async with stage(whole(b"abc", head="X-A: b\r\nX-Empty: \r\n")) as here:
        reply = await fetch_of(here)("GET", "/health?x=1", timeout_s=TIMEOUT_S)
        assert (reply.status, reply.body) == (200, b"abc")
        assert (reply.headers["x-a"], reply.headers["x-empty"], reply.headers["content-length"]) == (
            "b",
            "",
            "3",
        )
        request = here.unit.requests[0]
        assert (request.method, request.target, request.body) == ("GET", "/health?x=1", b"")
        assert (request.get("user-agent"), request.get("x-request-id")) == ("cellgate", None)
        # A body and an id are sent.
        here.unit.script = PLAIN_CHUNKED + chunk(b"a") + chunk(b"b") + LAST_CHUNK
        reply = await fetch_of(here)("POST", "/x", body=b"{}", request_id="canary-1", timeout_s=TIMEOUT_S)
        assert reply.body == b"ab"
        request = here.unit.requests[1]
        assert (request.body, request.get("content-type")) == (b"{}", "application/json")
        assert request.get("x-request-id") == "canary-1"


@pytest.mark.parametrize(
    ("method", "every_s", "requests", "on_each"),
    [("GET", FETCH_FRESH_S / 10, 21, [10, 10, 1]), ("POST", FRESH_POST_S / 5, 11, [5, 5, 1])],
)
@simulated
async def test_a_connection_is_kept_but_now_and_then_it_is_a_new_one(
    method: str, every_s: float, requests: int, on_each: list[int]
) -> None:
    """A unit that lets nobody in any more must not pass for well; what proves most tries it more often."""
    async with stage(whole()) as here:
        fetch = fetch_of(here)
        for _ in range(requests):
            await fetch(method, "/x", body=b"{}" * (method == "POST"), timeout_s=TIMEOUT_S)
            await asyncio.sleep(every_s)
        assert [connection.requests for connection in here.unit.connections] == on_each
        await fetch("POST", "/x", body=b"{}", fresh=True, timeout_s=TIMEOUT_S)
        assert len(here.unit.connections) == len(on_each) + 1


@simulated
async def test_after_trouble_each_is_a_new_connection_until_one_answers() -> None:
    """What is kept may be all that is left of the unit."""
    answers = iter([whole(), whole(), None, whole(), whole(), whole()])

    async def script(request: Received) -> None:
        answer = next(answers)
        if answer is None:
            await asyncio.sleep(60.0)
        else:
            request.write(answer)

    async with stage(script) as here:
        fetch = fetch_of(here)
        for trouble in (False, False, True, False, False):
            if trouble:
                with pytest.raises(FetchError):
                    await fetch("GET", "/health", timeout_s=TIMEOUT_S)
            else:
                await fetch("GET", "/health", timeout_s=TIMEOUT_S)
        assert [connection.requests for connection in here.unit.connections] == [3, 2]


@simulated
async def test_a_kept_connection_that_was_closed_meanwhile_is_no_trouble() -> None:
    """Engines close what has been idle; the request goes on a new one."""
    async with stage(whole()) as here:
        fetch = fetch_of(here)
        await fetch("GET", "/health", timeout_s=TIMEOUT_S)
        here.unit.connections[0].close()
        reply = await fetch("GET", "/health", timeout_s=TIMEOUT_S)
        assert reply.status == 200
        assert [connection.requests for connection in here.unit.connections] == [1, 1]


async def silent(request: Received) -> None:
    """No answer."""
    await asyncio.sleep(60.0)


async def halting(request: Received) -> None:
    """A part of an answer."""
    request.write(whole(b"abc")[:-1])
    await asyncio.sleep(60.0)


TROUBLES: dict[str, tuple[Script, Trouble, str]] = {
    "no answer": (silent, Trouble.TIMEOUT, "waiting for its reply"),
    "half an answer": (halting, Trouble.TIMEOUT, "reading its reply"),
    "garbage": (b"SSH-2.0\r\n", Trouble.BROKEN, "does not parse"),
    "closes at once": (then_close(b""), Trouble.BROKEN, "before its reply"),
    "closes in the middle": (then_close(whole(b"abc")[:-1]), Trouble.BROKEN, "in the middle of its reply"),
    "too much": (whole(b"x" * 1001), Trouble.BROKEN, "larger than 1000 bytes"),
    "too much in pieces": (PLAIN_CHUNKED + chunk(b"x" * 600) * 9, Trouble.BROKEN, "larger than 1000 bytes"),
}


@pytest.mark.parametrize(("script", "trouble", "said"), TROUBLES.values(), ids=TROUBLES)
@simulated
async def test_what_goes_wrong_is_told_and_leaves_no_connection(
    script: Script, trouble: Trouble, said: str
) -> None:
    async with stage(script) as here:
        began_at = asyncio.get_running_loop().time()
        with pytest.raises(FetchError) as caught:
            await fetch_of(here)("GET", "/x", timeout_s=TIMEOUT_S, max_bytes=1000)
        assert (caught.value.trouble, said in str(caught.value)) == (trouble, True), str(caught.value)
        assert asyncio.get_running_loop().time() - began_at <= TIMEOUT_S + 0.01
        await asyncio.sleep(0.1)
        assert not here.gateway.services.pool(here.plane.board.units["u0"]).connections


STRIKES: dict[str, tuple[Callable[[SimLoop, int], None], Trouble]] = {
    "nobody listens": (lambda loop, port: loop.network.kill(f"127.0.0.1:{port}"), Trouble.REFUSED),
    "nobody answers": (lambda loop, port: loop.network.blackhole(f"127.0.0.1:{port}"), Trouble.TIMEOUT),
    "no descriptors left": (lambda loop, port: loop.network.exhaust_files("gate"), Trouble.OWN),
}


@pytest.mark.parametrize(("strike", "trouble"), STRIKES.values(), ids=STRIKES)
@simulated
async def test_no_connection_is_trouble_of_its_own_kind(
    strike: Callable[[SimLoop, int], None], trouble: Trouble
) -> None:
    async with stage(whole()) as here:
        strike(cast(SimLoop, asyncio.get_running_loop()), here.unit.port)
        with pytest.raises(FetchError) as caught:
            await fetch_of(here)("GET", "/x", timeout_s=TIMEOUT_S)
        assert caught.value.trouble is trouble
        cast(SimLoop, asyncio.get_running_loop()).network.heal()


@simulated
async def test_who_gives_up_leaves_no_connection() -> None:
    async with stage(silent) as here:
        asking = asyncio.create_task(fetch_of(here)("GET", "/x", timeout_s=60.0))
        request = await here.unit.received()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await request.connection.until_gone()


@simulated
async def test_pages_by_callback_bring_replies_and_troubles() -> None:
    """On one connection, and never from within the call itself."""
    answers = iter([whole(b"a"), whole(b"b"), b"SSH-2.0\r\n"])

    async def script(request: Received) -> None:
        request.write(next(answers))

    async with stage(script) as here:
        fetch, told = fetch_of(here), list[Reply | FetchError]()
        for number in range(3):
            fetch.get("/health", told.append, timeout_s=TIMEOUT_S)
            assert len(told) == number
            await asyncio.sleep(1.0)
        first, second, third = told
        assert isinstance(first, Reply)
        assert isinstance(second, Reply)
        assert (first.body, second.body) == (b"a", b"b")
        assert isinstance(third, FetchError)
        assert third.trouble is Trouble.BROKEN
        assert [connection.requests for connection in here.unit.connections] == [3]


@simulated
async def test_pages_that_hang_expire_in_time_though_many_do_and_kept_connections_are_renewed() -> None:
    async with stage(whole()) as here:
        fetch, got, loop = fetch_of(here), list[float](), asyncio.get_running_loop()

        def told(answer: Reply | FetchError) -> None:
            assert isinstance(answer, FetchError)
            got.append(loop.time())

        for _ in range(3):
            fetch.get("/x", lambda _: None, timeout_s=TIMEOUT_S)
            await asyncio.sleep(1.0)
        assert [connection.requests for connection in here.unit.connections] == [3]
        here.unit.script, asked = silent, []
        for _ in range(8):
            asked.append(loop.time())
            fetch.get("/x", told, timeout_s=TIMEOUT_S)
            await asyncio.sleep(0.003)
        await asyncio.sleep(TIMEOUT_S + 0.1)
        assert [
            0.0 <= at - begun - TIMEOUT_S <= 2 * EXPIRE_EVERY_S for at, begun in zip(got, asked, strict=True)
        ]
        here.unit.script = whole()
        for _ in range(2):
            fetch.get("/x", lambda _: None, timeout_s=TIMEOUT_S)
            await asyncio.sleep(FETCH_FRESH_S)
        assert [connection.requests for connection in here.unit.connections][-2:] == [1, 1]


@simulated
async def test_who_gives_up_a_page_is_not_told_of_it() -> None:
    """Neither while it is awaited, nor when it has just come."""
    async with stage(whole()) as here:
        pool, loop = here.gateway.services.pool(here.plane.board.units["u0"]), asyncio.get_running_loop()
        told, waits = list[Reply | FetchError](), list[PageWait]()
        fetch = UnitFetch(pool, loop, lambda: waits[-1].abandon(), deadlines := Timers(loop))
        # The last one on a kept connection.
        for pause_s in (0.0, 1.0, 1.0):
            waits.append(fetch.get("/health", told.append, timeout_s=TIMEOUT_S))
            if not pause_s:
                waits[0].abandon()
            await asyncio.sleep(pause_s)
        assert told == []
        assert not deadlines.awaited
        deadlines.close()
        assert fetch.answered_at == pytest.approx(loop.time() - 1.0, abs=0.1), "but it has answered"


@simulated
async def test_requests_leave_nothing_to_the_collector() -> None:
    """Thousands are made each second."""
    async with stage(whole(), silent) as here:
        states, loop = list(here.plane.board), asyncio.get_running_loop()
        agenda = Timers(loop)
        answered, late = (
            UnitFetch(here.gateway.services.pool(state), loop, lambda: None, agenda) for state in states
        )
        told: list[Reply | FetchError] = []
        for fetch in (answered, late):
            fetch.get("/health", told.append, timeout_s=TIMEOUT_S)
        await asyncio.sleep(2 * TIMEOUT_S)
        gc.collect()
        for _ in range(3):
            answered.get("/health", told.append, timeout_s=TIMEOUT_S)
            late.get("/health", lambda _: None, timeout_s=TIMEOUT_S).abandon()
            await asyncio.sleep(2 * TIMEOUT_S)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        kinds = {type(thing).__name__ for thing in gc.garbage}
        gc.garbage.clear()
        assert len(told) == 5
        assert kinds.isdisjoint({"_Waiting", "Call", "Due"}), kinds


@pytest.mark.parametrize("is_held", [True, False])
@simulated
async def test_a_page_on_a_kept_connection_is_mostly_as_always_and_read_whatever_comes(is_held: bool) -> None:
    async def silent(_request: Received) -> None:
        await asyncio.sleep(60.0)

    async with stage(whole(b"ok")) as here:
        fetch, got = fetch_of(here), list[Reply | FetchError]()
        if is_held:
            fetch.hold(lambda: None)
        await asyncio.sleep(0.1)

        async def ask(script: Script, wait_s: float = 0.1) -> Reply | FetchError:
            here.unit.script = script
            fetch.get("/node", got.append, timeout_s=TIMEOUT_S)
            await asyncio.sleep(wait_s)
            return got[-1]

        always = [await ask(whole(b"ok")) for _ in range(4)]
        assert always[1] is always[2] is always[3]
        for script, body in (
            (whole(b"no"), b"no"),
            (whole(b"ok"), b"ok"),
            (PLAIN_CHUNKED + chunk(b"ok") + LAST_CHUNK, b"ok"),
            (whole(b"ok"), b"ok"),
            (whole(b"ok"), b"ok"),
        ):
            reply = await ask(script)
            assert isinstance(reply, Reply)
            assert reply.body == body
        assert len(here.unit.connections) == 1 + is_held, "but for the first question"
        late = await ask(silent, TIMEOUT_S + 0.1)
        assert isinstance(late, FetchError)
        assert late.trouble is Trouble.TIMEOUT
        assert "waiting for its reply" in str(late)
        # It was the connection that is held.
        assert not fetch.is_held
        if is_held:
            fetch.hold(lambda: None)
        for _ in range(2):
            await ask(whole(b"ok"))
        cut = await ask(then_close(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no"))
        assert isinstance(cut, FetchError)
        assert cut.trouble is Trouble.BROKEN
        assert len(got) == 13
        fetch.close()
        fetch.deadlines.close()
