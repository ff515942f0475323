"""The budget of retries: what draws on it, and for how long."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from cellgate.router.nouns import Rules
from tests.wire.client import chat
from tests.wire.stage import live, stage
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, TOKENS, Received, chunk, in_turn, then_close, whole

RETRIES = 3


async def begin(request: Received) -> None:
    """Show the first token of a stream that goes on for ever."""
    request.write(SSE_HEAD + chunk(TOKENS[0]))


@live
async def test_a_retry_that_has_shown_a_token_leaves_its_place_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = whole(status="500 Internal Server Error")
    rules = Rules(retry_min=RETRIES, retry_budget=0.0)
    async with stage(failing, begin, rules=rules) as here, AsyncExitStack() as stack:
        # As of a gate that lags, and does not trust its eyes: the failing unit stays in rotation.
        monkeypatch.setattr(here.plane.prober, "observe", lambda _evidence: None)
        monkeypatch.setattr("cellgate.proxy.control.dispatcher.COOL_S", 0.0)
        for _ in range(4 * RETRIES):
            client = await stack.enter_async_context(here.client())
            client.send(chat())
            async with asyncio.timeout(5.0):
                head = await client.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert here.plane.board.retries_in_flight == 0
        refused, answered = here.units
        assert len(refused.requests) > RETRIES
        assert len(answered.requests) == 4 * RETRIES


@live
async def test_a_model_that_one_unit_has_unloaded_is_asked_of_another() -> None:
    gone = whole(b'{"error":{"message":"The model `poet` does not exist."}}', "404 Not Found")
    async with stage(gone, whole()) as here, here.client() as client:
        asked: list[str] = []
        here.plane.prober.look_now = lambda unit, *_: asked.append(unit)  # type: ignore[method-assign]
        for _ in range(3):
            client.send(chat())
            assert (await client.reply()).status == 200
        first, second = here.plane.board.units.values()
        assert (first.cool_until, first.case.window) == (0.0, ())
        # All units are asked what they serve, once for all of these requests.
        assert asked == [first.unit.name, second.unit.name]


WRITTEN = b'{"choices":[{"message":{"content":"Once upon"},"finish_reason":"stop"}]}'
ABORTED = b'{"choices":[{"message":{"content":"Once"},"finish_reason":"abort"}]}'
USED = b'{"choices":[{"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":3}}'
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize("together", [True, False])
@live
async def test_a_plain_answer_that_its_engine_aborted_is_asked_of_another_unit(*, together: bool) -> None:
    head = PLAIN % len(ABORTED)
    aborting = in_turn(head + ABORTED) if together else in_turn(head, ABORTED)
    async with stage(aborting, whole(WRITTEN)) as here, here.client() as client:
        reply = await client.ask(chat(stream=False))
        assert (reply.status, reply.body) == (200, WRITTEN)
        assert [len(unit.requests) for unit in here.units] == [1, 1]


@live
async def test_an_aborted_answer_is_no_whole_one_where_there_is_no_other_unit() -> None:
    async with stage(whole(ABORTED)) as here, here.client() as client:
        assert (await client.ask(chat(stream=False))).status == 503


@live
async def test_a_plain_answer_that_breaks_in_the_middle_is_asked_of_another_unit() -> None:
    async with stage(then_close(PLAIN % 9 + b"{"), whole()) as here, here.client() as client:
        reply = await client.ask(chat(stream=False))
        assert (reply.status, reply.whole) == (200, True)
        assert [len(unit.requests) for unit in here.units] == [1, 1]


@live
async def test_the_usage_of_a_plain_answer_that_comes_behind_its_head_is_read() -> None:
    """Engines write both apart."""
    async with stage(in_turn(PLAIN % len(USED), USED)) as here, here.client() as client:
        learnt = here.plane.board.answer_lengths
        before = learnt.expected("tiny")
        assert (await client.ask(chat(stream=False))).body == USED
        assert learnt.expected("tiny") < before


@live
async def test_who_got_an_error_waits_for_another_unit_that_is_full() -> None:
    failing = whole(status="500 Internal Server Error")
    ending = asyncio.Event()

    async def one_at_a_time(request: Received) -> None:
        request.write(SSE_HEAD + chunk(TOKENS[0]))
        await ending.wait()
        request.write(chunk(TOKENS[1]) + LAST_CHUNK)

    async with stage(failing, one_at_a_time) as here, here.client() as first, here.client() as second:
        refusing, serving = here.plane.board.units.values()
        refusing.drained = True
        first.send(chat())
        await here.until(lambda: len(serving.leases))
        serving.limit = serving.learnt_limit = 1.0
        refusing.drained = False
        second.send(chat())
        await here.until(lambda: here.units[0].requests and not refusing.leases)
        assert len(here.plane.router.queue) == 1
        ending.set()
        assert [(await client.reply()).status for client in (first, second)] == [200, 200]
