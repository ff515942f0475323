"""Large bodies are read elsewhere; what cannot be read there is refused, and hurts nobody else."""

from __future__ import annotations

import asyncio
import functools
import io
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import orjson
import pytest
import uvloop

from cellgate.proxy.config.limits import LIMITS, REACHED
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.request import large_bodies
from cellgate.proxy.request.body import read_ask
from cellgate.proxy.request.large_bodies import IDLE_S, LargeBodies
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
                async with asyncio.timeout(100.0):
                    await test(bodies)
            finally:
                await bodies.close()

        uvloop.run(bounded())

    # pytest would take the parameter for a fixture.
    del run.__wrapped__
    return run


def kind_of(answer: object) -> FailureKind | None:
    """Why a body was refused, if it was."""
    return answer.kind if isinstance(answer, Failure) else None


def pid(bodies: LargeBodies) -> int:
    (parser,) = (*bodies._idle, *bodies._busy.values())
    assert parser.process is not None
    return parser.process.pid


@reading
async def test_bodies_are_read_in_another_process_which_tells_what_is_wrong(bodies: LargeBodies) -> None:
    assert await bodies.read(BODY) == read_ask(BODY)
    assert pid(bodies) != os.getpid()
    first, counted = pid(bodies), REACHED["name_chars"]
    answer = await bodies.read(orjson.dumps({"model": "m" * 2_000_000}))
    assert isinstance(answer, Failure)
    assert (answer.kind, answer.param) == (FailureKind.BAD_JSON, "model")
    assert REACHED["name_chars"] == counted + 1
    for body in (b"[" * 3_000_000, b'{"a":' * 1_000_000):
        assert kind_of(await bodies.read(body)) is FailureKind.BAD_JSON
    refusal = Failure(FailureKind.LIMITED, "used up")
    assert await bodies.read(BODY, "a", lambda: refusal) is refusal
    assert [parser.bodies for parser in bodies._idle] == [4]
    assert await bodies.read(BODY, "a") == read_ask(BODY)
    assert pid(bodies) == first


@reading
async def test_a_process_that_is_killed_costs_the_body_in_it_and_no_other(bodies: LargeBodies) -> None:
    await bodies.read(BODY)
    os.kill(pid(bodies), signal.SIGSTOP)
    inside, behind = (asyncio.ensure_future(bodies.read(BODY)) for _ in range(2))
    await asyncio.sleep(0)
    os.kill(pid(bodies), signal.SIGKILL)
    assert kind_of(await inside) is FailureKind.NO_RESOURCES
    assert isinstance(await behind, Ask)


def test_a_body_that_needs_too_much_time_or_memory_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = READER
    odd += "read = r.read_large_ask\n"
    odd += "def take(body, *_):\n    while b'spin' in body: pass\n"
    odd += "    if b'eat' in body: bytearray(1 << 32)\n    return read(body)\n"
    odd += "r.read_large_ask, r.LIMITS = take, type(r.LIMITS)(large_body_cpu_s=0.1)\nmain()\n"
    monkeypatch.setattr(large_bodies, "_LARGE_BODY_COMMAND", (*large_bodies._LARGE_BODY_COMMAND[:2], odd))

    @reading
    async def test(bodies: LargeBodies) -> None:
        for limit, body in (("large_body_cpu_s", b'{"m":"spin"}'), ("large_body_memory", b'{"m":"eat"}')):
            counted = REACHED[limit]
            taking = asyncio.ensure_future(bodies.read(body))
            behind = asyncio.ensure_future(bodies.read(BODY))
            assert kind_of(await taking) is FailureKind.BODY_TOO_LARGE
            assert REACHED[limit] == counted + 1
            assert isinstance(await behind, Ask)

    test()


def test_without_a_process_bodies_are_refused_and_not_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "_LARGE_BODY_COMMAND", ("/nowhere/python",))

    @reading
    async def test(bodies: LargeBodies) -> None:
        assert kind_of(await bodies.read(BODY)) is FailureKind.NO_RESOURCES

    test()


class Held:
    """In the place of processes: a body is read when it is let go, and has taken `cpu_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cpu_s: float = 0.0) -> None:
        self.go_on = asyncio.Event()
        self.sizes: list[int] = []

        async def read(parser: large_bodies.Parser, body: bytes, _route: str) -> Ask:
            self.sizes.append(len(body))
            await self.go_on.wait()
            parser.bodies, parser.cpu_s = parser.bodies + 1, cpu_s * (len(body) % 2)
            return Ask()

        monkeypatch.setattr(large_bodies.Parser, "read", read)


def started(bodies: LargeBodies, *payers: str, body: bytes = b"{}") -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(bodies.read(body, payer)) for payer in payers]


async def turns() -> None:
    """More turns of the loop than anything here takes."""
    for _ in range(10):
        await asyncio.sleep(0)


@simulated
async def test_who_left_before_its_turn_waits_no_more_and_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies, held = LargeBodies(), Held(monkeypatch)
    first, *waiting = started(bodies, *[""] * 7)
    await turns()
    assert len(bodies._queue) == 6
    waiting[1].cancel()
    held.go_on.set()
    assert isinstance(await first, Ask)
    # In the very turn of the loop in which it is the turn of one of them.
    for each in waiting[:5]:
        each.cancel()
    assert isinstance(await waiting[5], Ask)
    assert all(each.cancelled() for each in waiting[:5])
    assert isinstance(await bodies.read(b"{}"), Ask)
    assert (len(bodies._queue), bodies._busy) == (0, {})


@simulated
async def test_who_leaves_while_its_body_is_read_is_held_until_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies, held = LargeBodies(), Held(monkeypatch)
    (task,) = started(bodies, "")
    await turns()
    task.cancel()
    await turns()
    assert not task.done()
    held.go_on.set()
    await asyncio.wait((task,))
    assert task.cancelled()
    assert isinstance(await bodies.read(b"{}"), Ask)


@simulated
async def test_more_bodies_than_may_wait_are_refused_and_few_of_one_displace_one_of_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bodies, held = LargeBodies(), Held(monkeypatch)
    counted = REACHED["large_bodies_waiting"]
    greedy = started(bodies, *["greedy"] * (LIMITS.large_bodies_waiting + 2))
    await turns()
    (neighbour,) = started(bodies, "neighbour")
    await turns()
    refused = [await task for task in greedy if task.done()]
    held.go_on.set()
    assert isinstance(await neighbour, Ask)
    answers = await asyncio.gather(*greedy)
    assert refused == [answer for answer in answers if isinstance(answer, Failure)]
    assert [failure.kind for failure in refused] == [FailureKind.NO_RESOURCES] * 2
    assert REACHED["large_bodies_waiting"] == counted + 2
    await asyncio.sleep(IDLE_S)
    assert len(bodies._idle) == 1


@simulated
async def test_a_small_body_goes_before_the_large_ones_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies, held = LargeBodies(), Held(monkeypatch)
    held.go_on.set()
    await asyncio.gather(*(bodies.read(bytes(size)) for size in (1_000_000, 8_000_000, 4_000_000, 2_000_000)))
    assert held.sizes == [1_000_000, 2_000_000, 4_000_000, 8_000_000]


def test_an_exception_of_ours_is_told_and_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: bytes, _route: str) -> Ask:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(large_bodies, "read_large_ask", fail)
    told = large_bodies.read(io.BytesIO(b"{}"), 2)
    assert (told.found, told.trouble) == (None, "ZeroDivisionError('boom')")


def test_a_process_with_much_memory_left_behind_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    full = READER + "r._LARGE_BODY_KEPT_BYTES = 0; main()"
    monkeypatch.setattr(large_bodies, "_LARGE_BODY_COMMAND", (*large_bodies._LARGE_BODY_COMMAND[:2], full))

    @reading
    async def test(bodies: LargeBodies) -> None:
        for _ in range(2):
            assert isinstance(await bodies.read(BODY), Ask)
            assert [parser.process for parser in bodies._idle] == [None]

    test()


@simulated
async def test_who_sends_slow_bodies_waits_for_them_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(large_bodies, "LIMITS", replace(LIMITS, large_body_processes=1))
    bodies, held, order = LargeBodies(), Held(monkeypatch, cpu_s=0.2), list[str]()
    held.go_on.set()
    assert isinstance(await bodies.read(b"{} ", "greedy"), Ask)
    held.go_on.clear()
    payers = ["other", "greedy", "neighbour", "neighbour"]
    tasks = started(bodies, *payers)
    for payer, task in zip(payers, tasks, strict=True):
        task.add_done_callback(functools.partial(lambda payer, _: order.append(payer), payer))
    await turns()
    held.go_on.set()
    await asyncio.gather(*tasks)
    assert order == ["other", "neighbour", "neighbour", "greedy"]


@simulated
async def test_one_body_of_a_payer_is_read_at_a_time_and_few_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies, held = LargeBodies(), Held(monkeypatch)
    tasks = started(bodies, *"aaabbbcccddd")
    await turns()
    assert sorted(bodies._busy) == ["a", "b", "c"][: LIMITS.large_body_processes]
    held.go_on.set()
    await asyncio.gather(*tasks)
    await asyncio.sleep(IDLE_S)
