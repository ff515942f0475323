"""The simulated engine, seen by the simulated client: what it says when well, and when hurt."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
import pytest

from tests.sim.behaviour import Behaviour, Break
from tests.sim.client import Client, Manner
from tests.sim.conversation import End, Reply
from tests.sim.engine import Engine
from tests.sim.loop import START_S
from tests.sim.speech import answer, chat_text
from tests.sim.timing import Timing
from tests.sim.world import World, played, run

SOON = Manner(timeout_s=20.0)


class Scene:
    """One engine and its client."""

    def __init__(self, seed: int = 1, timing: Timing = Timing()) -> None:  # noqa: B008
        self.world = World(seed)
        self.engine = Engine(self.world, "a", timing)
        self.client = Client(self.world, self.engine.address)

    def play(self, main: Coroutine[object, object, None]) -> None:
        run(self.world, main)

    async def metric(self, name: str) -> float:
        lines = (await self.client.get("/metrics")).body.decode().splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.fixture
def scene() -> Scene:
    return Scene()


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


@played(Scene)
async def test_a_completion_continues_its_prompt(scene: Scene) -> None:
    body = orjson.dumps({"prompt": "once", "max_tokens": 2, "stream": True})
    reply = await scene.client.request("POST", "/v1/completions", body)
    assert reply.text == answer("once", 2)


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


@played(Scene)
async def test_the_plain_endpoints_answer(scene: Scene) -> None:
    assert (await scene.client.get("/health")).status == 200
    assert (await scene.client.request("HEAD", "/health")).end is End.COMPLETE
    assert (await scene.client.get("/v1/models")).json["data"][0]["id"] == "tiny"
    assert (await scene.client.get("/nowhere")).status == 404
    assert (await scene.client.chat("x", model="other")).status == 404
    assert (await scene.client.request("POST", "/v1/chat/completions", b"{")).status == 400
    assert (await scene.client.exchange([b"\0\r\n\r\n"]))[0].status == 400
    assert await scene.metric("process_start_time_seconds") == START_S


@played(Scene)
async def test_pipelined_requests_are_answered_in_order(scene: Scene) -> None:
    bodies = [orjson.dumps({"prompt": str(i), "max_tokens": 2}) for i in range(3)]
    requests = [scene.client.encode("POST", "/v1/completions", body) for body in bodies]
    replies = await scene.client.exchange(requests)
    assert [reply.text for reply in replies] == [answer(str(i), 2) for i in range(3)]


@played(Scene)
async def test_an_idle_connection_is_closed_after_five_seconds(scene: Scene) -> None:
    conversation = await scene.client.connect()
    reply = conversation.expect("GET")
    conversation.transport.write(scene.client.encode("GET", "/health"))
    await conversation.all_ended
    late = conversation.expect("GET")
    await asyncio.sleep(4.0)
    assert (reply.end, late.end) == (End.COMPLETE, None)
    await asyncio.sleep(2.0)
    assert late.end is End.CLOSED


@played(Scene)
async def test_a_client_that_leaves_is_forgotten(scene: Scene) -> None:
    by_events = await scene.client.chat("x", max_tokens=100, manner=Manner(leave_after_events=3))
    by_time = await scene.client.chat("x", max_tokens=100, manner=Manner(leave_after_s=0.5))
    assert (by_events.end, len(by_events.events), by_time.end) == (End.LEFT, 3, End.LEFT)
    await asyncio.sleep(1.0)
    assert [one.outcome for one in scene.engine.served[""]] == ["aborted", "aborted"]
    assert await scene.metric("vllm:num_requests_running") == 0


@played(Scene)
async def test_a_client_that_reads_slowly_or_never_holds_the_engines_bytes_back(scene: Scene) -> None:
    slowly = Manner(read_every_s=1.0, timeout_s=1000.0)
    reply = await scene.client.chat("x", max_tokens=500, manner=slowly)
    assert reply.text == answer(chat_text("x"), 500)
    never = await scene.client.chat("x", manner=Manner(read_every_s=math.inf, timeout_s=60.0))
    assert (never.end, never.raw) == (End.TIMEOUT, b"")


@played(Scene)
async def test_canaries_are_recorded_apart(scene: Scene) -> None:
    await scene.client.chat("x", max_tokens=1, headers={"x-request-id": "cellgate-canary-7"})
    assert ([one.tokens for one in scene.engine.canaries], scene.engine.served) == ([1], {})


@played(Scene, timing=Timing(warm_up_s=3.0))
async def test_death_resets_and_refuses_and_a_restart_begins_anew(scene: Scene) -> None:
    chat = asyncio.ensure_future(scene.client.chat("x", max_tokens=1000))
    await asyncio.sleep(5.0)
    assert await scene.metric("vllm:generation_tokens_total") > 0
    scene.engine.die()
    assert (await chat).end is End.RESET
    assert (await scene.client.get("/health")).end is End.REFUSED
    scene.engine.restart()
    assert await scene.metric("process_start_time_seconds") > START_S + 4
    assert await scene.metric("vllm:generation_tokens_total") == 0
    assert (await scene.client.chat("x")).ttft_s > 3.0
    assert (await scene.client.chat("x")).ttft_s < 1.0
    assert [one.outcome for one in scene.engine.served[""]] == ["died", "finished", "finished"]


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


@played(Scene)
async def test_a_stopped_leader_answers_when_it_goes_on(scene: Scene) -> None:
    scene.engine.behaviour.silent = True
    left = await scene.client.chat("left", manner=SOON)
    chat = asyncio.ensure_future(scene.client.chat("x"))
    await asyncio.sleep(10.0)
    scene.engine.behaviour.silent = False
    assert ((await chat).is_whole, left.end) == (True, End.TIMEOUT)
    assert len(scene.engine.served[""]) == 1


@played(Scene)
async def test_a_lost_follower_fails_what_comes_next_and_then_the_leader_exits(scene: Scene) -> None:
    scene.engine.behaviour.follower_lost = True
    assert (await scene.client.get("/health")).status == 200
    stream, whole = await asyncio.gather(scene.client.chat("x"), scene.client.chat("x", stream=False))
    assert (stream.status, stream.error and stream.error["code"]) == (200, 500)
    assert whole.status == 500
    await asyncio.sleep(1.0)
    assert (await scene.client.get("/health")).end is End.REFUSED


def _is_error_event(reply: Reply) -> bool:
    return reply.status == 200 and reply.error is not None and reply.is_whole


CASES: dict[str, tuple[Behaviour, Callable[[Reply], bool]]] = {
    "error status": (Behaviour(error_rate=1.0, error_status=502), lambda reply: reply.status == 502),
    "busy": (Behaviour(busy_status=429), lambda reply: reply.headers["retry-after"] == "1"),
    "garbage": (Behaviour(garbage=True), lambda reply: reply.end is End.GARBAGE),
    "silent": (Behaviour(silent=True), lambda reply: (reply.end, reply.raw) == (End.TIMEOUT, b"")),
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


@pytest.mark.parametrize("breaks", [Break.ERROR, Break.TRUNCATE, Break.STALL])
@played(Scene)
async def test_a_stream_breaks_after_its_events(scene: Scene, breaks: Break) -> None:
    scene.engine.behaviour = Behaviour(breaks=breaks, breaks_after_events=3)
    reply = await scene.client.chat("x", manner=SOON)
    assert reply.text == answer(chat_text("x"), 3)


def test_an_hour_of_load_takes_seconds() -> None:
    scene = Scene(timing=Timing(prefill_s=0.1, step_s=0.05))

    async def main() -> None:
        for _ in range(360):
            await scene.client.chat("x", max_tokens=4)
            await asyncio.sleep(9.0)

    scene.play(main())
    assert len(scene.engine.served[""]) == 360


@played(Scene)
async def test_an_engine_answers_each_kind_of_nonsense_at_once_and_spares_canaries(scene: Scene) -> None:
    behaviour = scene.engine.behaviour = Behaviour(answers="status_401", spares_canaries=True)
    canary = {"x-request-id": "cellgate-canary-1"}
    assert (await scene.client.chat("hello")).status == 401
    assert (await scene.client.chat("hello", headers=canary)).is_done
    behaviour.answers = "html"
    assert b"<html>" in (await scene.client.chat("hello", stream=False)).body
    behaviour.answers = "comments_only"
    reply = await scene.client.chat("hello", manner=Manner(timeout_s=1.0))
    assert (reply.end, reply.events) == (End.TIMEOUT, [])
    assert reply.comments > 20


@played(Scene)
async def test_an_engine_refuses_what_it_lacks(scene: Scene) -> None:
    scene.engine.behaviour = Behaviour(lacks=b"image_url", max_prompt=400)
    assert (await scene.client.chat("an image_url")).status == 400
    assert (await scene.client.chat("long " * 100)).status == 400
    assert (await scene.client.chat("hello")).is_done
