"""Large bodies are read elsewhere; what cannot be read there is refused, and hurts nobody else."""

from __future__ import annotations

import asyncio
import functools
import io
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
import pytest
import uvloop

from cellgate.proxy.config.limits import LIMITS, REACHED
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.request import large_bodies
from cellgate.proxy.request.body import read_ask
from cellgate.proxy.request.large_bodies import LargeBodies
from cellgate.router.nouns import Ask
from tests.wire.stage import simulated

READER = "import cellgate.proxy.request.large_bodies as r; main = r.main\n"
BODY = orjson.dumps(
    {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x" * 2_000_000}]}
)


def reading(test: Callable[[LargeBodies], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test with large bodies on the loop that the gate uses."""

    @functools.wraps(test)
    def run() -> None:
        async def bounded() -> None:
            bodies = LargeBodies()
            try:
                async with asyncio.timeout(30.0):
                    await test(bodies)
            finally:
                await bodies.close()

        uvloop.run(bounded())

    # pytest would take the parameter for a fixture.
    del run.__wrapped__
    return run


def pid(bodies: LargeBodies) -> int:
    (parser,) = (*bodies._idle, *bodies._busy.values())
    assert parser.process is not None
    return parser.process.pid


@reading
async def test_a_body_is_read_in_another_process(bodies: LargeBodies) -> None:
    assert await bodies.read(BODY) == read_ask(BODY)
    assert pid(bodies) != os.getpid()
    first = pid(bodies)
    assert await bodies.read(BODY) == read_ask(BODY)
    assert pid(bodies) == first


@reading
async def test_what_is_wrong_with_a_body_comes_back_from_there_and_is_counted_here(
    bodies: LargeBodies,
) -> None:
    counted = REACHED["name_chars"]
    answer = await bodies.read(orjson.dumps({"model": "m" * 2_000_000}))
    assert isinstance(answer, Failure)
    assert (answer.kind, answer.param) == (FailureKind.BAD_JSON, "model")
    assert REACHED["name_chars"] == counted + 1


@reading
async def test_a_body_that_is_nested_without_end_is_refused(bodies: LargeBodies) -> None:
    for body in (b"[" * 3_000_000, b'{"a":' * 1_000_000):
        answer = await bodies.read(body)
        assert isinstance(answer, Failure)
        assert answer.kind is FailureKind.BAD_JSON


@reading
async def test_a_process_that_is_killed_costs_the_body_in_it_and_no_other(bodies: LargeBodies) -> None:
    await bodies.read(BODY)
    os.kill(pid(bodies), signal.SIGSTOP)
    inside, behind = (asyncio.ensure_future(bodies.read(BODY)) for _ in range(2))
    await asyncio.sleep(0)
    os.kill(pid(bodies), signal.SIGKILL)
    lost = await inside
    assert isinstance(lost, Failure)
    assert lost.kind is FailureKind.NO_RESOURCES
    assert isinstance(await behind, Ask)


def test_a_body_that_takes_too_long_is_refused_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = READER
    slow += "read = r.read_large_ask\n"
    slow += "def spin(body, *_):\n    while b'spin' in body: pass\n    return read(body)\n"
    slow += "r.read_large_ask, r.LIMITS = spin, type(r.LIMITS)(large_body_cpu_s=0.1)\nmain()\n"
    monkeypatch.setattr(large_bodies, "_COMMAND", (*large_bodies._COMMAND[:2], slow))

    @reading
    async def test(bodies: LargeBodies) -> None:
        counted = REACHED["large_body_cpu_s"]
        spun = asyncio.ensure_future(bodies.read(b'{"model":"spin"}'))
        behind = asyncio.ensure_future(bodies.read(BODY))
        answer = await spun
        assert isinstance(answer, Failure)
        assert answer.kind is FailureKind.BODY_TOO_LARGE
        assert REACHED["large_body_cpu_s"] == counted + 1
        assert isinstance(await behind, Ask)

    test()


def test_a_body_that_takes_too_much_memory_is_refused_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = READER
    greedy += "read = r.read_large_ask\n"
    greedy += "def eat(body, *_):\n    if b'eat' in body: bytearray(1 << 32)\n    return read(body)\n"
    greedy += "r.read_large_ask = eat\nmain()\n"
    monkeypatch.setattr(large_bodies, "_COMMAND", (*large_bodies._COMMAND[:2], greedy))

    @reading
    async def test(bodies: LargeBodies) -> None:
        counted = REACHED["large_body_memory"]
        answer = await bodies.read(b'{"model":"eat"}')
        assert isinstance(answer, Failure)
        assert answer.kind is FailureKind.BODY_TOO_LARGE
        assert REACHED["large_body_memory"] == counted + 1
        assert isinstance(await bodies.read(BODY), Ask)

    test()


def test_without_a_process_bodies_are_refused_and_not_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "_COMMAND", ("/nowhere/python",))

    @reading
    async def test(bodies: LargeBodies) -> None:
        answer = await bodies.read(BODY)
        assert isinstance(answer, Failure)
        assert answer.kind is FailureKind.NO_RESOURCES

    test()


@reading
async def test_who_leaves_before_its_turn_waits_no_more_and_others_do(bodies: LargeBodies) -> None:
    first = asyncio.ensure_future(bodies.read(BODY))
    await asyncio.sleep(0)
    waiting = [asyncio.ensure_future(bodies.read(BODY)) for _ in range(6)]
    await asyncio.sleep(0)
    assert len(bodies._queue) == 6
    waiting[1].cancel()
    assert isinstance(await first, Ask)
    # In the very turn of the loop in which it is the turn of one of them.
    for each in waiting[:5]:
        each.cancel()
    assert isinstance(await waiting[5], Ask)
    assert all(each.cancelled() for each in waiting[:5])
    assert isinstance(await bodies.read(BODY), Ask)
    assert (len(bodies._queue), bodies._busy) == (0, {})


@reading
async def test_who_leaves_while_its_body_is_read_is_held_until_it_is(bodies: LargeBodies) -> None:
    await bodies.read(BODY)
    os.kill(pid(bodies), signal.SIGSTOP)
    task = asyncio.ensure_future(bodies.read(BODY))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    os.kill(pid(bodies), signal.SIGCONT)
    await asyncio.wait((task,))
    assert task.cancelled()
    assert isinstance(await bodies.read(BODY), Ask)


@reading
async def test_more_bodies_than_may_wait_are_refused_at_once(bodies: LargeBodies) -> None:
    counted = REACHED["large_bodies_waiting"]
    tasks = [
        asyncio.ensure_future(bodies.read(b'{"model":"m"}')) for _ in range(LIMITS.large_bodies_waiting + 2)
    ]
    answers = await asyncio.gather(*tasks)
    refused = [answer for answer in answers if isinstance(answer, Failure)]
    assert [failure.kind for failure in refused] == [FailureKind.NO_RESOURCES]
    assert REACHED["large_bodies_waiting"] == counted + 1


@simulated
async def test_a_small_body_goes_before_the_large_ones_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []

    async def read(_: large_bodies.Parser, body: bytes, _route: str) -> Ask:
        order.append(len(body))
        return Ask()

    monkeypatch.setattr(large_bodies.Parser, "read", read)
    bodies = LargeBodies()
    await asyncio.gather(*(bodies.read(bytes(size)) for size in (1_000_000, 8_000_000, 4_000_000, 2_000_000)))
    assert order == [1_000_000, 2_000_000, 4_000_000, 8_000_000]


def test_an_exception_of_ours_is_told_and_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: bytes, _route: str) -> Ask:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(large_bodies, "read_large_ask", fail)
    told = large_bodies.read(io.BytesIO(b"{}"), 2)
    assert (told.found, told.trouble) == (None, "ZeroDivisionError('boom')")


def test_a_process_with_much_memory_left_behind_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    full = READER + "r._KEPT_BYTES = 0; main()"
    monkeypatch.setattr(large_bodies, "_COMMAND", (*large_bodies._COMMAND[:2], full))

    @reading
    async def test(bodies: LargeBodies) -> None:
        for _ in range(2):
            assert isinstance(await bodies.read(BODY), Ask)
            assert [parser.process for parser in bodies._idle] == [None]

    test()


def counting(monkeypatch: pytest.MonkeyPatch, cpu_s: float) -> None:
    """Have a body of an even number of bytes take so much of a processor."""
    slow = READER + "import time\nread = r.read_large_ask\n"
    slow += "def spin(body, *_):\n    until = time.process_time() + (len(body) % 2 == 0) * "
    slow += f"{cpu_s}\n    while time.process_time() < until: pass\n    return read(body)\n"
    slow += "r.read_large_ask = spin\nmain()\n"
    monkeypatch.setattr(large_bodies, "_COMMAND", (*large_bodies._COMMAND[:2], slow))


def test_who_sends_bodies_that_take_long_waits_for_them_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counting(monkeypatch, 0.2)

    @reading
    async def test(bodies: LargeBodies) -> None:
        order: list[str] = []

        async def read(body: bytes, payer: str) -> None:
            assert isinstance(await bodies.read(body, payer), Ask)
            order.append(payer)

        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(read(b'{"p": 1}', "greedy"))
            await asyncio.sleep(0)
            for _ in range(2):
                group.create_task(read(b'{"p": 11}', "neighbour"))
        # Two processes begin, so one of the greedy may be through before the first of the neighbour.
        assert max(at for at, payer in enumerate(order) if payer == "neighbour") <= 4

    test()


def test_of_one_payer_one_body_is_read_at_a_time_and_of_several_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = asyncio.Event()

    async def hangs(_: large_bodies.Parser, body: bytes, _route: str) -> Ask:
        await go_on.wait()
        return Ask()

    monkeypatch.setattr(large_bodies.Parser, "read", hangs)

    @reading
    async def test(bodies: LargeBodies) -> None:
        tasks = [asyncio.ensure_future(bodies.read(b"{}", payer)) for payer in "aaabbbcccddd"]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sorted(bodies._busy) == ["a", "b", "c"][: LIMITS.large_body_processes]
        go_on.set()
        await asyncio.gather(*tasks)

    test()


@reading
async def test_in_a_full_queue_one_with_few_bodies_displaces_one_with_many(bodies: LargeBodies) -> None:
    greedy = [
        asyncio.ensure_future(bodies.read(b'{"model":"m"}', "greedy"))
        for _ in range(LIMITS.large_bodies_waiting + 1)
    ]
    await asyncio.sleep(0)
    assert isinstance(await bodies.read(b'{"model":"m"}', "neighbour"), Ask)
    answers = await asyncio.gather(*greedy)
    assert sum(isinstance(answer, Failure) for answer in answers) <= 1


@reading
async def test_a_body_that_is_not_worth_reading_any_more_is_not_read(bodies: LargeBodies) -> None:
    refusal = Failure(FailureKind.LIMITED, "used up")
    assert await bodies.read(BODY, "a", lambda: refusal) is refusal
    assert [parser.bodies for parser in bodies._idle] == [0]
    assert isinstance(await bodies.read(BODY, "a"), Ask)
