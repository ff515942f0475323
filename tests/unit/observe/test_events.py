"""What the gate says: flips and operator actions, and exceptions of its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest

from cellgate.proxy.app import App
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.observe.defects import PLACES_KEPT, REPORT_EVERY_S, Defects
from cellgate.proxy.observe.events import FLIPS_A_MINUTE, FOLLOWER_BACKLOG, KEPT, Action, ActionKind, EventLog
from cellgate.proxy.request.response import Response
from cellgate.router.board import Flip
from cellgate.router.nouns import Ask, Evidence, Sign, Strength, Unit, Verdict
from tests.unit.router.fleets import board_of
from tests.wire.client import chat
from tests.wire.stage import live, simulated, stage
from tests.wire.unit import SSE_HEAD, chunk, in_turn, whole

REFUSED = Evidence("a1", Sign.BAD, Strength.FATAL, "request", "connection refused by 127.0.0.1:8101", 5.0)
DOWN = Flip("a1", "a", Verdict.UP, Verdict.DOWN, 5.0, REFUSED)


def make() -> tuple[EventLog, list[tuple[str, str]]]:
    lines: list[tuple[str, str]] = []
    return EventLog(lambda: 1_700_000_000.25, 2, lambda *line: lines.append(line)), lines


def test_a_unit_that_goes_down_gets_one_line_with_reason_and_what_comes_next() -> None:
    events, lines = make()
    board = board_of(Unit("a1", "a", "http://127.0.0.1:8101"))
    leases = [board.open("a1", Ask(), 1.0, retry=False) for _ in range(32)]
    leases[7].commit(2.0)
    consequence = board.observe(REFUSED)
    assert consequence.flip is not None
    events.add(consequence.flip, consequence.evicted, consequence.staying)
    assert lines == [
        (
            "warning",
            "unit a1 (cell a) starting -> down: connection refused by 127.0.0.1:8101 (source request); "
            "31 requests stay until another unit does better, 1 stream goes on, or goes over to another "
            "unit; it returns after 2 canaries pass",
        )
    ]


def test_each_kind_of_action_has_words_and_a_level() -> None:
    events, lines = make()
    for kind in get_args(ActionKind):
        events.add(Action(kind, "gate", "a1", "{why}", cell="a"))
    assert len(lines) == len(get_args(ActionKind)) == len(events.last())
    assert all(line.endswith(": {why}") and "None" not in line for _, line in lines)


def test_what_became_of_the_requests_is_in_the_event_and_told_once() -> None:
    events, lines = make()
    board = board_of(Unit("a1", "a", "http://127.0.0.1:8101"))
    leases = [board.open("a1", Ask(), 1.0, retry=False) for _ in range(3)]
    events.became("a1", "went on")
    events.add(replace(DOWN, unit="a2"))
    events.add(DOWN, leases)
    events.add(Action("drain", "127.0.0.1", "a1"))
    for how in ("continued elsewhere", "answered 503", "continued elsewhere", "went on"):
        events.became("a1", how)
    _, event, _ = events.last()
    assert event["became"] == {"continued elsewhere": 2, "answered 503": 1, "went on": 1}
    said = "2 continued elsewhere, 1 answered 503"
    assert event["line"].endswith(f"; its requests since: {said}, 1 went on")
    assert lines[3:] == [("info", f"unit a1 is out; its requests: {said}")]


NOTHING_LOST = "warning it returns"


@pytest.mark.parametrize(
    ("after", "strength", "said"),
    [
        (Verdict.STARTING, Strength.STRONG, "info it gets requests once a canary passes"),
        (Verdict.UP, Strength.STRONG, "info it gets requests"),
        (
            Verdict.SUSPECT,
            Strength.STRONG,
            "warning a canary is sent now; until it passes, other units are preferred",
        ),
        (Verdict.DOWN, Strength.STRONG, f"{NOTHING_LOST} after 2 canaries pass"),
        (Verdict.DOWN, Strength.FATAL, f"{NOTHING_LOST} once node a1-1 is healthy again and 2 canaries pass"),
        (Verdict.PROBATION, Strength.STRONG, "info it gets requests once 2 canaries pass in a row"),
    ],
)
def test_a_verdict_says_in_a_line_what_becomes_of_it(after: Verdict, strength: Strength, said: str) -> None:
    events, lines = make()
    why = Evidence("a1", Sign.BAD, strength, "agent", "gone\r\nunit a2 up", 5.0, node="a1-1")
    events.add(Flip("a1", "a", Verdict.PROBATION, after, 5.0, why))
    reason = "gone\\x0d\\x0aunit a2 up (source agent, node a1-1)"
    level, _, end = said.partition(" ")
    assert lines == [(level, f"unit a1 (cell a) probation -> {after.value}: {reason}; {end}")]


def test_an_event_is_ready_for_json() -> None:
    events, lines = make()
    events.add(DOWN)
    assert events.last() == [
        {
            "id": 1,
            "time": "2023-11-14T22:13:20.250Z",
            "kind": "flip",
            "unit": "a1",
            "cell": "a",
            "node": None,
            "before": "up",
            "after": "down",
            "source": "request",
            "strength": "fatal",
            "reason": "connection refused by 127.0.0.1:8101",
            "leaving": 0,
            "staying": 0,
            "streams": 0,
            "line": lines[0][1],
        }
    ]


def test_what_operators_do_is_remembered_with_who_did_it() -> None:
    events, lines = make()
    events.add(Action("drain", "127.0.0.1", "a1"))
    events.add(Action("undrain", "127.0.0.1", "a1"))
    events.add(Action("reload", "SIGHUP", detail="1 unit added, 0 removed"))
    assert lines == [
        ("info", "unit a1 drained by 127.0.0.1: no new requests, running ones finish"),
        ("info", "unit a1 undrained by 127.0.0.1"),
        ("info", "configuration reloaded by SIGHUP: 1 unit added, 0 removed"),
    ]
    assert [event["kind"] for event in events.last()] == ["drain", "undrain", "reload"]
    for number in range(KEPT):
        events.add(replace(DOWN, unit=f"u{number}"))
    assert [event["id"] for event in events.last()] == list(range(4, KEPT + 4)), "only the last ones"


async def test_a_follower_gets_what_happens_from_then_on_and_nothing_once_it_has_left() -> None:
    events, _ = make()
    events.add(DOWN)
    follower, other = events.subscribe(), events.subscribe()
    events.unsubscribe(other)
    events.add(DOWN)
    events.add(DOWN)
    events.close()
    other.end()
    assert [event["id"] async for event in follower] == [2, 3]
    assert [event async for event in other] == []


async def test_a_follower_that_does_not_read_is_cut_with_a_note_and_holds_no_more_memory() -> None:
    events, _ = make()
    follower = events.subscribe()
    for number in range(FOLLOWER_BACKLOG + 10):
        events.add(replace(DOWN, unit=f"u{number}"))
    got = [event async for event in follower]
    assert [event["kind"] for event in got] == ["flip"] * FOLLOWER_BACKLOG + ["cut"]
    note = f"cut: {FOLLOWER_BACKLOG} events were waiting to be read; GET /events has the last 256"
    assert got[-1]["line"] == note


# Exceptions of the gate's own: told of once in a while, counted each time.


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
    assert "test_events.py" in line
    told.now = REPORT_EVERY_S
    told.fail(ValueError("boom"))
    assert told.lines[1].endswith("; 99 more of these since the last report")


def test_another_place_is_told_of_at_once_and_what_is_remembered_is_bounded() -> None:
    told = Told()
    told.fail(ValueError("boom"))
    told.fail(KeyError("boom"))
    assert len(told.lines) == 2
    for number in range(3 * PLACES_KEPT):
        told.fail(None, message=f"message {number}")
    assert len(told.defects._reported_at) <= PLACES_KEPT


def test_what_the_network_does_is_no_defect() -> None:
    told = Told()
    told.fail(TimeoutError(110, "it took too long"))
    told.fail(None)
    assert (told.defects.count, len(told.lines)) == (0, 2)


@pytest.mark.parametrize(("error", "is_said"), [(ConfigError(["no"]), False), (KeyError("x"), True)])
async def test_a_reload_that_fails_by_a_defect_is_said(error: Exception, *, is_said: bool) -> None:
    async def fail() -> str:
        raise error

    said: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["exception"]))
    await asyncio.wait([task := asyncio.create_task(fail())])
    App._reloaded(cast("Any", SimpleNamespace(_reloads={task})), task)
    assert said == ([error] if is_said else [])


def failing(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@simulated
async def test_before_anything_was_shown_it_is_500_in_openai_s_shape_with_the_request_s_id() -> None:
    defects: list[dict[str, Any]] = []
    async with stage(whole(), defects=defects) as here, here.client() as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(here.gateway.services, "pool", failing(ZeroDivisionError("boom")))
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


def test_a_unit_that_tells_restarts_all_the_time_pushes_nobody_elses_events_out() -> None:
    events, lines = make()
    events.add(Action("reload", "SIGHUP"))
    for _ in range(1000):
        for after in (Verdict.STARTING, Verdict.UP):
            events.add(replace(DOWN, after=after))
    last = events.last()
    assert last[0]["kind"] == "reload"
    assert len(last) == len(lines) <= 1 + FLIPS_A_MINUTE
    assert sum(event.get("count", 1) for event in last[1:]) == 2000
    assert "times, last at 2023-11-14T22:13:20.250Z: it changes too often)" in last[-1]["line"]
    events.add(replace(DOWN, unit="b1"))
    assert events.last()[-1]["unit"] == "b1"
