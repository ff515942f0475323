"""Streams that a unit breaks in the middle: another one goes on with them, and their clients cannot tell.

That each answer is byte for byte that of one unit alone is looked at after every scenario (see visit.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import orjson
import pytest

from cellgate.proxy.config.settings import Timeouts
from cellgate.proxy.observe.counters import ResumeKind, ResumeResult
from cellgate.proxy.resume.chat import StreamJoiner
from cellgate.proxy.resume.shown import MismatchError
from tests.scenarios.harness import BACK_S, CHAT, COMPLETIONS, LATENCY_S, MESSAGES, RESPONSES, RULES, Stage
from tests.scenarios.seeds import seeds
from tests.scenarios.users import Users
from tests.scenarios.visit import Visit
from tests.sim.agent_speech import AGENT
from tests.sim.behaviour import Behaviour, Break
from tests.sim.chaos import STRIKES, Chaos
from tests.sim.client import Manner
from tests.sim.conversation import End
from tests.sim.engine import Engine
from tests.sim.hurt import kill, stop
from tests.sim.world import played

LONG: dict[str, Any] = {"max_tokens": 40, "stream_options": {"include_usage": True}}

TOOLS = [{"type": "function", "function": {"name": "f"}}]

BREAKS: dict[str, Callable[[Engine], None]] = {
    "error in the stream": lambda engine: _behave(
        engine, Behaviour(breaks=Break.ERROR, breaks_after_events=7)
    ),
    "connection closed": lambda engine: _behave(
        engine, Behaviour(breaks=Break.TRUNCATE, breaks_after_events=7)
    ),
    "torn, and closed": lambda engine: _behave(
        engine, Behaviour(breaks=Break.TRUNCATE, breaks_after_events=7, torn=True)
    ),
    "delimited by close, and closed": lambda engine: _behave(
        engine, Behaviour(breaks=Break.TRUNCATE, breaks_after_events=7, close_delimited=True)
    ),
    "leader killed": lambda engine: kill(engine, 0),
    "follower killed": lambda engine: kill(engine, 1),
    "leader frozen": lambda engine: stop(engine, 0),
    "follower frozen": lambda engine: stop(engine, 1),
    "spinning": lambda engine: _behave(engine, Behaviour(spinning=True)),
    "wedged under comments": lambda engine: _behave(engine, Behaviour(wedged=True, keepalive_s=0.5)),
}


KINDS = {
    CHAT: ResumeKind.TEXT,
    MESSAGES: ResumeKind.MESSAGES,
    RESPONSES: ResumeKind.RESPONSES,
}


def long(path: str) -> dict[str, Any]:
    """An answer of forty tokens; chats count them."""
    return LONG if path == CHAT else {"max_tokens": LONG["max_tokens"]}


def _behave(engine: Engine, behaviour: Behaviour) -> None:
    engine.behaviour = behaviour


def on(unit: str, visits: list[Visit]) -> list[Visit]:
    """Those that the unit began."""
    return [visit for visit in visits if visit.unit == unit]


async def when_a_dies(stage: Stage, path: str = CHAT, **fields: Any) -> list[Visit]:
    """Streams that are under way when a unit dies; what came of them."""
    crowd = stage.crowd(8, path=path, **long(path), **fields)
    await asyncio.sleep(0.5)
    stage.engines["a"].die()
    return await crowd


@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize("breaks", BREAKS.values(), ids=BREAKS)
@played(Stage, units=2, followers=1)
async def test_whatever_breaks_a_stream_another_unit_goes_on(
    stage: Stage, breaks: Callable[[Engine], None], path: str
) -> None:
    crowd = stage.crowd(16, path=path, **long(path))
    await asyncio.sleep(0.5)
    breaks(stage.engines["a"])
    visits = await crowd
    assert [visit.reply.error for visit in visits if not visit.is_answered] == []
    assert len(on("a", visits)) == 8
    assert stage.gate.metrics.continuations[KINDS[path], ResumeResult.RESUMED] == 8
    assert stage.continuations() == {"continued": 8}
    records = [record for record in stage.gate.records if record.resumed]
    assert len(records) == 8
    assert {record.unit for record in records} == {"b"}


@pytest.mark.parametrize("breaks", [kill, stop], ids=["killed", "stopped"])
@played(Stage, units=2, followers=1, agents=True)
async def test_what_an_agent_reports_breaks_streams_within_half_a_second(
    stage: Stage, breaks: Callable[[Engine, int], None]
) -> None:
    crowd = stage.crowd(16, **LONG)
    await asyncio.sleep(0.5)
    breaks(stage.engines["a"], 1)
    visits = on("a", await crowd)
    assert all(visit.is_answered for visit in visits)
    assert stage.continuations() == {"continued": len(visits)}
    times = [visit.reply.event_times_s for visit in visits]
    assert max(after - before for each in times for before, after in pairwise(each)) < 0.6


@played(Stage, units=2)
async def test_completions_are_continued_as_well(stage: Stage) -> None:
    stage.engines["a"].behaviour = Behaviour(breaks=Break.ERROR, breaks_after_events=7)
    for _ in range(4):
        visit = await stage.ask(path=COMPLETIONS, **LONG)
        assert visit.is_answered
        await asyncio.sleep(1.0)
    assert stage.continuations()["continued"] >= 1


@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize("after", range(6))
@played(Stage, units=2)
async def test_it_may_break_at_any_token_the_first_and_the_last_too(
    stage: Stage, after: int, path: str
) -> None:
    stage.engines["a"].behaviour = Behaviour(breaks=Break.TRUNCATE, breaks_after_events=after)
    visits = await stage.crowd(8, path=path, **long(path) | {"max_tokens": 5})
    assert all(visit.is_answered for visit in visits)
    if after == 0:
        # What comes before anything was computed is not shown: another unit answers from the beginning.
        assert stage.continuations() == {}


@pytest.mark.parametrize("path", KINDS)
@played(Stage, units=4)
async def test_several_failures_in_one_stream_are_survived(stage: Stage, path: str) -> None:
    for name in "abc":
        stage.engines[name].behaviour = Behaviour(breaks=Break.ERROR, breaks_after_events=7)
    visits = await stage.crowd(8, path=path, **long(path))
    assert all(visit.is_answered for visit in visits)
    assert max(record.resumed for record in stage.gate.records) >= 2


NOT_CONTINUABLE: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": TOOLS, "tool_choice": "required"},
    "n": {"n": 2},
    "logprobs": {"logprobs": True},
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {}}},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "guided_regex": {"guided_regex": "a*"},
}


@pytest.mark.parametrize("name", NOT_CONTINUABLE)
@played(Stage, units=2)
async def test_what_cannot_be_continued_ends_in_one_error_event_that_says_why(
    stage: Stage, name: str
) -> None:
    broken = on("a", await when_a_dies(stage, **NOT_CONTINUABLE[name]))
    assert len(broken) == 4
    for visit in broken:
        assert (visit.code, visit.reply.end) == ("truncated", End.TRUNCATED)
        assert visit.reply.error is not None
        assert name in visit.reply.error["message"]
        assert sum(b'"error"' in event for event in visit.reply.events) == 1
    assert stage.continuations() == {"not_continuable": 4}
    await asyncio.sleep(2.0)
    (told,) = stage.told("broken_streams")
    assert told["unit"] == "a"
    assert f"4 not continuable (the request has {name}" in told["line"]


COMPUTED_AGAIN: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": {"temperature": 0.7, "seed": 3},
}


@pytest.mark.parametrize("name", ["logprobs", "response_format", "frequency_penalty", "tool_choice"])
@pytest.mark.parametrize("sampling", COMPUTED_AGAIN.values(), ids=COMPUTED_AGAIN)
@played(Stage, units=2)
async def test_what_comes_out_the_same_is_computed_again_and_what_was_shown_is_not_repeated(
    stage: Stage, sampling: dict[str, Any], name: str
) -> None:
    visits = await when_a_dies(stage, **NOT_CONTINUABLE[name], **sampling)
    assert all(visit.is_answered for visit in visits)
    assert stage.continuations() == {"continued": len(on("a", visits))} == {"continued": 4}


@played(Stage, units=2)
async def test_text_shown_under_tools_is_continued_as_text(stage: Stage) -> None:
    assert all(visit.is_answered for visit in await when_a_dies(stage, tools=TOOLS, tool_choice="auto"))
    assert any(asked.get("tools") == TOOLS for asked in stage.engines["b"].counted)
    assert stage.continuations() == {"continued": 4}


TEMPLATES: dict[str, Callable[[str], str]] = {
    CHAT: lambda text: text.replace("<assistant> ", "<assistant>"),
    MESSAGES: lambda text: text + " more",
    RESPONSES: lambda text: text + " more",
}


@pytest.mark.parametrize("path", TEMPLATES)
@pytest.mark.parametrize(("sampling", "result"), [({"temperature": 0}, "continued"), ({}, "refused")])
@played(Stage, units=2)
async def test_what_a_template_does_not_give_back_is_computed_again_if_it_comes_out_the_same(
    stage: Stage, sampling: dict[str, Any], result: str, path: str
) -> None:
    for engine in stage.engines.values():
        engine.behaviour = Behaviour(template=TEMPLATES[path])
    for visit in on("a", await when_a_dies(stage, path, **sampling)):
        assert visit.is_answered is (result == "continued")
        if not visit.is_answered:
            assert (visit.code, visit.reply.end) == ("truncated", End.TRUNCATED)
            assert path != CHAT or "does not reproduce the text" in (visit.reply.error or {})["message"]
    assert stage.continuations() == {result: 4}


@played(Stage, units=1)
async def test_without_another_unit_a_stream_ends_in_an_error_and_says_so(stage: Stage) -> None:
    stage.engines["a"].behaviour = Behaviour(breaks=Break.ERROR, breaks_after_events=7)
    visit = await stage.ask(**LONG)
    assert visit.code == "stream_error"
    assert "no other unit could take it" in (visit.reply.error or {})["message"]
    assert stage.continuations() == {"no_unit": 1}


def test_a_unit_that_goes_on_with_something_else_has_not_continued_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def differs(self: StreamJoiner, events: bytes) -> bytes:
        raise MismatchError("a text that differs from what was sent before")

    monkeypatch.setattr(StreamJoiner, "feed", differs)
    stage = Stage(units=2)

    async def scenario() -> None:
        crowd = stage.crowd(8, **LONG)
        await asyncio.sleep(0.5)
        stage.engines["a"].die()
        broken = on("a", await crowd)
        assert {visit.code for visit in broken} == {"not_continued"}

    stage.play(scenario())
    assert stage.gate.metrics.continuations[ResumeKind.TEXT, ResumeResult.NO_UNIT] == 4
    assert stage.gate.metrics.tallies["a"].broken == 4
    assert stage.continuations() == {"no_unit": 4}
    assert not any(record.resumed for record in stage.gate.records)


@played(Stage, units=2, timeouts=Timeouts(head_hold_s=0.2))
async def test_a_stream_waits_for_a_unit_that_comes_up_and_its_client_is_kept_warm(stage: Stage) -> None:
    stage.engines["b"].die()
    await stage.until(lambda: not stage.gate.board.units["b"].is_usable(), BACK_S)
    crowd = stage.crowd(4, max_tokens=200)
    await asyncio.sleep(1.0)
    stage.engines["b"].restart()
    stage.engines["a"].die()
    visits = await crowd
    assert all(visit.is_answered for visit in visits)
    assert all(visit.reply.comments for visit in visits)
    assert stage.continuations() == {"continued": 4}


@played(Stage, units=2)
async def test_a_client_that_leaves_meanwhile_leaves_nothing_behind(stage: Stage) -> None:
    stage.engines["b"].die()
    await stage.until(lambda: not stage.gate.board.units["b"].is_usable(), BACK_S)
    crowd = stage.crowd(4, max_tokens=200, manner=Manner(leave_after_s=3.0))
    await asyncio.sleep(1.0)
    stage.engines["a"].die()
    await crowd
    await stage.until(lambda: stage.continuations() == {"client_left": 4}, LATENCY_S)


@played(Stage, units=2)
async def test_slow_clients_are_not_written_to_faster_by_the_unit_that_goes_on(stage: Stage) -> None:
    crowd = stage.crowd(8, max_tokens=600, manner=Manner(read_every_s=0.1))
    await asyncio.sleep(4.0)
    stage.engines["a"].die()
    assert all(visit.is_answered for visit in await crowd)
    assert stage.continuations()["continued"] > 0


@played(Stage, units=2)
async def test_a_stream_that_its_unit_has_forgotten_is_continued_long_before_the_last_resort(
    stage: Stage,
) -> None:
    stage.engines["a"].behaviour = Behaviour(breaks=Break.LOSE, breaks_after_events=7)
    crowd = stage.crowd(8, **LONG)
    await asyncio.sleep(2.0)
    stage.engines["a"].behaviour = Behaviour()
    users = Users(stage, 8)
    begun = stage.now
    assert all(visit.is_answered for visit in await crowd)
    assert 25.0 < stage.now - begun < 35.0
    await users.leave()
    assert stage.flips("a")[-1] == "up"
    assert "down" not in stage.flips("a")


def test_a_stream_that_goes_on_with_events_without_a_token_is_continued_elsewhere() -> None:
    stage = Stage(units=2)

    async def scenario() -> None:
        stage.engines["a"].behaviour = Behaviour(breaks=Break.IDLE, breaks_after_events=7)
        begun, visits = stage.now, await stage.crowd(4, max_tokens=40)
        for visit in visits:
            assert visit.is_answered
            assert b"".join(visit.reply.events).count(b'"content":" ') == 40
        assert stage.now - begun < 6.0

    # Their answers have events without a word between the words of both.
    stage.liars.update(stage.engines)
    stage.play(scenario())
    assert stage.continuations()["continued"] > 0


@pytest.mark.parametrize(
    "behaviour",
    [
        *(
            Behaviour(answers=kind, spares_canaries=True)
            for kind in ("done_at_once", "nothing_said", "empty_deltas")
        ),
        *(Behaviour(error_rate=1.0, error_status=status) for status in (400, 401, 404)),
    ],
    ids=lambda each: each.answers or str(each.error_status),
)
@played(Stage, units=3)
async def test_a_unit_that_refuses_to_resume_a_stream_or_says_nothing_is_not_the_last_word(
    stage: Stage, behaviour: Behaviour
) -> None:
    crowd = stage.crowd(9, **LONG)
    await asyncio.sleep(0.5)
    stage.engines["b"].behaviour = behaviour
    stage.engines["a"].die()
    assert all(visit.is_answered and visit.dishonesty() is None for visit in await crowd)
    assert stage.continuations()["continued"] > 0


@played(Stage, units=3)
async def test_a_unit_that_dies_of_the_check_before_it_may_go_on_is_not_the_last_word(stage: Stage) -> None:
    crowd = stage.crowd(9, **LONG)
    await asyncio.sleep(0.5)
    b = stage.engines["b"]

    def die(text: str) -> str:
        b.die()
        return text

    b.behaviour = Behaviour(template=die)
    stage.engines["a"].die()
    assert all(visit.is_answered and visit.dishonesty() is None for visit in await crowd)
    assert "down" in stage.flips("b")
    assert stage.continuations()["continued"] > 0


@pytest.mark.parametrize("by", ["header", "model", "all"])
@played(
    lambda by: Stage(units=2, no_continuation={"model": ("tiny",), "all": ("*",)}.get(by, ())), given=("by",)
)
async def test_it_can_be_switched_off(stage: Stage, by: str) -> None:
    headers = {"x-cellgate-continue": "off"} if by == "header" else {}
    crowd = stage.crowd(8, headers=headers, **LONG)
    await asyncio.sleep(0.5)
    stage.engines["a"].die()
    assert {visit.code for visit in on("a", await crowd)} == {"truncated"}
    assert stage.continuations() == {"not_continuable": 4}


@pytest.mark.parametrize("seed", seeds(range(300, 308)))
def test_whatever_strikes_one_unit_after_the_other_every_stream_comes_whole(seed: int) -> None:
    rng = Random(seed)
    stage = Stage(seed, 3, followers=1, agents=rng.random() < 0.5, max_in_flight=64)

    async def scenario() -> None:
        chaos = Chaos(
            stage.world, list(stage.engines.values()), 1, STRIKES, pause_s=(2.0, 10.0), lasting_s=(1.0, 10.0)
        )
        users = Users(stage, 12, lambda rng: {"max_tokens": rng.randrange(10, 150)})
        await asyncio.sleep(40.0)
        chaos.stop()
        await users.leave()
        lost = [visit for visit in users.visits if not visit.is_answered]
        assert [(visit.request_id, visit.code, visit.reply.error) for visit in lost] == []
        await stage.until(stage.all_up, BACK_S + RULES.slow_start_s)

    stage.play(scenario())


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@played(Stage, units=1)
async def test_errors_have_the_shape_of_their_api(stage: Stage, path: str) -> None:
    crowd = stage.crowd(2, max_tokens=40, path=path)
    await asyncio.sleep(0.5)
    stage.engines["a"].die()
    for visit in await crowd:
        last = orjson.loads(visit.reply.events[-1])
        numbers = [orjson.loads(event).get("sequence_number") for event in visit.reply.events]
        assert (last["type"], last["error"]["code"]) == ("error", "truncated")
        if path == RESPONSES:
            assert numbers == list(range(len(numbers)))
            assert (last["code"], last["param"]) == ("truncated", None)
        else:
            assert last["error"]["type"] == "api_error"
    refused = await stage.ask(path=path)
    assert refused.reply.status in (502, 503, 504)
    assert refused.reply.json.get("type") == ("error" if path == MESSAGES else None)


AGENTS: dict[str, dict[str, Any]] = {
    "tools": {"tools": TOOLS, "tool_choice": "auto"},
    "tools, greedy": {"tools": TOOLS, "temperature": 0},
    "reasoning": {"reasoning_effort": "low"},
    "reasoning, greedy": {"temperature": 0},
}


@pytest.mark.parametrize("after", [1, 2, 4, 6, 9, 12])
@pytest.mark.parametrize("kind", AGENTS)
@played(Stage, units=3, version="0.32.0")
async def test_reasoning_and_tool_calls_are_continued_wherever_they_break(
    stage: Stage, kind: str, after: int
) -> None:
    # By then all versions are known.
    await asyncio.sleep(3.0)
    stage.engines["a"].behaviour = Behaviour(breaks=Break.TRUNCATE, breaks_after_events=after)
    fields = LONG | {"max_tokens": 400} | AGENTS[kind]
    visits = await asyncio.gather(
        *(
            stage.ask(messages=[{"role": "user", "content": f"{AGENT} {number}"}], **fields)
            for number in range(12)
        )
    )
    assert [(visit.code, visit.reply.error) for visit in visits if not visit.is_answered] == []
    # Behind the first event nothing is shown yet: another unit answers from the beginning.
    assert stage.continuations()["continued"] > 0 or after == 1
