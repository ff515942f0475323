"""Exceptions of the gate's own: told of once in a while, counted each time."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from cellgate.proxy.observe.log import PLACES_KEPT, REPORT_EVERY_S, Defects
from cellgate.proxy.request.response import Response
from cellgate.router.nouns import Verdict
from tests.wire.client import chat
from tests.wire.stage import live, simulated, stage
from tests.wire.unit import SSE_HEAD, chunk, in_turn, whole


class Told:
    """Defects at a time of the test's own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.defects = Defects(lambda _level, line: self.lines.append(line), lambda: self.now)

    def fail(self, error: BaseException | None, **context: Any) -> None:
        if error is not None:
            try:
                raise error
            except BaseException as raised:
                error = raised
        about = {"message": "something failed", "exception": error, **context}
        self.defects.handle(
            cast(asyncio.AbstractEventLoop, None), {key: value for key, value in about.items() if value}
        )


def test_each_is_counted_and_one_line_tells_of_many() -> None:
    told = Told()
    for _ in range(100):
        told.fail(ValueError("boom"))
    assert told.defects.count == 100
    (line,) = told.lines
    assert line.startswith("something failed: ValueError('boom') at ValueError ")
    assert "test_defects.py" in line
    told.now = REPORT_EVERY_S
    told.fail(ValueError("boom"))
    assert told.lines[1].endswith("; 99 more of these since the last report")


def test_another_place_is_told_of_at_once() -> None:
    told = Told()
    told.fail(ValueError("boom"))
    told.fail(KeyError("boom"))
    assert len(told.lines) == 2


def test_what_the_network_does_is_no_defect() -> None:
    told = Told()
    told.fail(TimeoutError(110, "it took too long"))
    told.fail(None)
    assert (told.defects.count, len(told.lines)) == (0, 2)


def test_what_is_remembered_is_bounded() -> None:
    told = Told()
    for number in range(3 * PLACES_KEPT):
        told.fail(None, message=f"message {number}")
    assert len(told.defects._reported_at) <= PLACES_KEPT


def failing(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@simulated
async def test_before_anything_was_shown_it_is_500_in_openai_s_shape_with_the_request_s_id() -> None:
    defects: list[dict[str, Any]] = []
    async with stage(whole(), defects=defects) as here, here.client() as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(here.gateway, "pool", failing(ZeroDivisionError("boom")))
            reply = await client.ask(chat(stream=False, head="x-request-id: mine\r\n"))
        assert (reply.status, reply.get("x-request-id"), reply.get("connection")) == (500, "mine", "close")
        assert (reply.error["type"], reply.error["code"]) == ("internal_server_error", "internal")
        assert "mine" in reply.error["message"]
        assert await client.rest() == b""
    assert [problem["message"] for problem in defects] == ["request mine failed"]
    assert here.outcomes == ["gate_error"]


FIRST, LIKE_IT, UNLIKE_IT = [
    b'data: {"id":"t-0","choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n',
    b'data: {"id":"t-1","choices":[{"delta":{"content":"b"},"finish_reason":null}]}\n\n',
    b'data: {"id":"t-1","choices":[{"finish_reason":null,"delta":{"content":"b"}}]}\n\n',
]


@pytest.mark.parametrize(
    ("where", "second"), [("on_token", LIKE_IT), ("pass_on", UNLIKE_IT)], ids=["passed_on_unread", "read"]
)
@live
async def test_a_stream_ends_in_an_error_event_and_its_unit_is_not_blamed(where: str, second: bytes) -> None:
    defects: list[dict[str, Any]] = []
    script = in_turn(SSE_HEAD + chunk(FIRST), chunk(second))
    async with stage(script, defects=defects) as here, here.client() as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Response, where, failing(ZeroDivisionError("boom")))
            client.send(chat())
            said = await client.rest()
        assert FIRST in said
        assert second not in said
        assert b'"code":"internal"' in said
        assert not said.endswith(b"0\r\n\r\n")
        assert [state.case.verdict for state in here.plane.board] == [Verdict.UP]
    assert len(defects) == 1
    assert here.outcomes == ["gate_error"]


@live
async def test_the_one_timer_goes_on_though_one_of_its_looks_fails() -> None:
    defects: list[dict[str, Any]] = []
    async with stage(whole(), defects=defects) as here:
        here.plane.ticker.looks.append(failing(ZeroDivisionError("boom")))
        ticks: list[float] = []
        here.plane.ticker.looks.append(ticks.append)
        await here.until(lambda: len(ticks) >= 2)
        here.plane.ticker.looks.clear()
    assert {problem["message"] for problem in defects} == {"the gate's timer"}
