"""The simulated engine, seen by the simulated client: what it says when well, and when hurt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import orjson
import pytest

from tests.sim.behaviour import Behaviour, Break
from tests.sim.client import Client, Manner
from tests.sim.conversation import End, Reply
from tests.sim.engine import Engine
from tests.sim.hurt import go_on, kill, stop
from tests.sim.loop import START_S
from tests.sim.node import AGENT_PORT
from tests.sim.speech import answer, chat_text
from tests.sim.timing import USUAL, Timing
from tests.sim.world import World, played, run

SOON = Manner(timeout_s=20.0)
LONG_TOKENS = 10_000


class Scene:
    """A unit of two nodes and its client."""

    def __init__(self, timing: Timing = USUAL) -> None:
        self.world = World(1)
        self.engine = Engine(self.world, "a", timing, followers=1)
        self.client = Client(self.world, self.engine.address)

    def play(self, main: Coroutine[object, object, None]) -> None:
        run(self.world, main)

    async def metric(self, name: str) -> float:
        lines = (await self.client.get("/metrics")).body.decode().splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    async def steps(self) -> float:
        return await self.metric("vllm:iteration_tokens_total_count")


@played(Scene)
async def test_a_stream_is_the_text_that_follows_the_prompt(scene: Scene) -> None:
    reply = await scene.client.chat("hello", max_tokens=5, headers={"x-request-id": "r1"})
    assert (reply.end, reply.status, reply.is_done) == (End.COMPLETE, 200, True)
    assert reply.text == answer(chat_text("hello"), 5)
    assert len(reply.events) == 1 + 5 + 1 + 1  # role, words, finish, [DONE]
    served = scene.engine.served["r1"]
    assert [(one.tokens, one.outcome) for one in served] == [(5, "finished")]


@played(Scene)
async def test_a_whole_answer_has_the_same_text_and_counts_it(scene: Scene) -> None:
    reply = await scene.client.chat("hello you", stream=False, max_tokens=3)
    assert reply.text == answer(chat_text("hello you"), 3)
    assert reply.json["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    counted = await scene.client.chat("hello you", max_tokens=3, stream_options={"include_usage": True})
    assert orjson.loads(counted.events[-2])["usage"] == reply.json["usage"]


@played(Scene)
async def test_a_continued_chat_says_exactly_what_would_have_come_next(scene: Scene) -> None:
    whole = await scene.client.chat("go", max_tokens=6)
    first = await scene.client.chat("go", max_tokens=2)
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": first.text}]
    flags: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    rest = await scene.client.chat("", max_tokens=4, messages=messages, **flags)
    assert first.text + rest.text == whole.text


@played(Scene, timing=Timing(prefill_s=2.0, step_s=0.1))
async def test_the_head_comes_before_prefill_and_the_tokens_in_steps(scene: Scene) -> None:
    reply = await scene.client.chat("x", max_tokens=11)
    assert reply.head_s - reply.sent_s < 0.2
    assert reply.ttft_s == pytest.approx(2.0, abs=0.2)
    assert reply.ended_s - reply.sent_s == pytest.approx(3.0, abs=0.3)


@played(Scene, timing=Timing(prefill_s=0.0, step_s=0.1, max_running=2))
async def test_a_full_engine_lets_requests_wait(scene: Scene) -> None:
    chats = [asyncio.ensure_future(scene.client.chat(str(i), max_tokens=10)) for i in range(3)]
    await asyncio.sleep(0.5)
    assert await scene.metric("vllm:num_requests_running") == 2
    assert await scene.metric("vllm:num_requests_waiting") == 1
    replies = await asyncio.gather(*chats)
    assert sorted(reply.ended_s > START_S + 1.5 for reply in replies) == [False, False, True]


@pytest.mark.parametrize("field", ["wedged", "spinning"])
@played(Scene)
async def test_a_stuck_engine_looks_healthy_and_gives_no_token_until_it_wakes(
    scene: Scene, field: str
) -> None:
    setattr(scene.engine.behaviour, field, True)
    given_up = await scene.client.chat("x", manner=SOON)
    assert (given_up.end, given_up.status, given_up.events) == (End.TIMEOUT, 200, [])
    assert (await scene.client.get("/health")).status == 200
    steps = await scene.metric("vllm:iteration_tokens_total_count")
    chat = asyncio.ensure_future(scene.client.chat("y"))
    await asyncio.sleep(10.0)
    running = await scene.metric("vllm:num_requests_waiting") + await scene.metric(
        "vllm:num_requests_running"
    )
    assert running == (0 if field == "spinning" else 1)
    assert await scene.metric("vllm:iteration_tokens_total_count") == steps
    scene.engine.behaviour = Behaviour()
    assert (await chat).text == answer(chat_text("y"), 8)


def _is_error_event(reply: Reply) -> bool:
    return reply.status == 200 and reply.error is not None and reply.is_whole


CASES: dict[str, tuple[Behaviour, Callable[[Reply], bool]]] = {
    "error status": (Behaviour(error_rate=1.0, error_status=502), lambda reply: reply.status == 502),
    "busy": (Behaviour(busy_status=429), lambda reply: reply.headers["retry-after"] == "1"),
    "garbage": (Behaviour(garbage=True), lambda reply: reply.end is End.GARBAGE),
    "silent": (Behaviour(silent=True), lambda reply: (reply.end, reply.has_begun) == (End.TIMEOUT, False)),
    "error event": (Behaviour(breaks=Break.ERROR, breaks_after_events=2), _is_error_event),
    "truncated": (Behaviour(breaks=Break.TRUNCATE), lambda reply: reply.end is End.TRUNCATED),
    "stalled": (Behaviour(breaks=Break.STALL), lambda reply: reply.end is End.TIMEOUT),
    "slow": (Behaviour(slow=20.0), lambda reply: reply.is_whole and reply.ttft_s > 1.0),
    "torn": (Behaviour(torn=True), lambda reply: reply.is_whole and reply.is_done),
    "to the close": (Behaviour(close_delimited=True), lambda reply: reply.is_whole and reply.is_done),
    "comments": (
        Behaviour(wedged=True, keepalive_s=2.0),
        lambda reply: (reply.end, reply.comments, reply.events) == (End.TIMEOUT, 9, []),
    ),
}


@pytest.mark.parametrize("case", CASES)
@played(Scene)
async def test_each_misbehaviour_shows_in_a_stream(scene: Scene, case: str) -> None:
    behaviour, is_as_expected = CASES[case]
    scene.engine.behaviour = behaviour
    reply = await scene.client.chat("x", manner=SOON)
    assert is_as_expected(reply), reply


@played(Scene)
async def test_an_agent_tells_what_becomes_of_its_process_and_beats(scene: Scene) -> None:
    agent = Client(scene.world, f"a-1:{AGENT_PORT}")
    watching = asyncio.ensure_future(agent.get("/watch", Manner(timeout_s=4.1)))
    await asyncio.sleep(1.0)
    stop(scene.engine, 1)
    await asyncio.sleep(1.0)
    go_on(scene.engine)
    await asyncio.sleep(1.0)
    kill(scene.engine, 1)
    lines = [orjson.loads(line) for line in (await watching).body.splitlines()]
    assert [line["state"] for line in lines if "state" in line] == ["ok", "stopped", "ok", "gone"]
    assert sum("state" not in line for line in lines) in (15, 16)


@pytest.mark.parametrize(("chunk_tokens", "longest_s"), [(500, 0.3), (0, 2.5)])
def test_a_long_prompt_slows_the_others_down_or_stops_them(chunk_tokens: int, longest_s: float) -> None:
    scene = Scene(Timing(prefill_tokens_per_s=5_000.0, chunk_tokens=chunk_tokens))

    async def main() -> None:
        streaming = asyncio.ensure_future(scene.client.chat("x", max_tokens=150))
        await asyncio.sleep(0.5)
        steps = await scene.steps()
        long = await scene.client.chat("x" * 4 * LONG_TOKENS, max_tokens=1)
        assert long.ttft_s > LONG_TOKENS / 5_000.0
        # The counters move as the steps do.
        assert (await scene.steps() - steps > 20) == bool(chunk_tokens)
        longest = max(b - a for a, b in pairwise((await streaming).event_times_s))
        assert longest_s / 3 < longest < longest_s

    scene.play(main())


@played(Scene)
async def test_a_unit_busy_with_other_people_s_work_goes_on_counting_steps(scene: Scene) -> None:
    scene.engine.behaviour = Behaviour(busy_status=429)
    assert (await scene.client.chat("x")).status == 429
    steps = await scene.steps()
    await asyncio.sleep(1.0)
    assert await scene.steps() > steps + 40


@played(Scene)
async def test_the_exit_after_a_lost_follower_does_not_hit_the_process_that_came_next(scene: Scene) -> None:
    kill(scene.engine, 1)
    await scene.client.chat("x")
    scene.engine.restart()
    await asyncio.sleep(1.0)
    assert not scene.engine.is_dead
    assert (await scene.client.chat("x")).is_done
