"""The simulated unit with its nodes: what agents and pages say, how prompts are computed, how queues fill."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any

import orjson
import pytest

from tests.sim.behaviour import Behaviour
from tests.sim.client import Client, Manner
from tests.sim.conversation import End
from tests.sim.engine import Engine
from tests.sim.hurt import go_on, kill, stop, stop_core
from tests.sim.node import AGENT_PORT, PAGE_PORT
from tests.sim.timing import USUAL, Timing
from tests.sim.world import World, played, run

LONG_TOKENS = 10_000


class Scene:
    """A unit of three nodes, and what can be asked of it."""

    def __init__(self, timing: Timing = USUAL, **options: Any) -> None:
        self.world = World(1)
        self.unit = Engine(self.world, "a", timing, followers=2, **options)
        self.client = Client(self.world, self.unit.address)

    def play(self, main: Coroutine[Any, Any, None]) -> None:
        run(self.world, main)

    async def steps(self) -> float:
        page = (await self.client.get("/metrics")).body
        return float(re.findall(rb"(?m)^vllm:iteration_tokens_total_count\S* (\S+)", page)[0])

    async def watch(self, node: str, seconds: float) -> tuple[list[str], int]:
        """The states that an agent tells in so many seconds, and its beats."""
        reply = await Client(self.world, f"{node}:{AGENT_PORT}").get("/watch", Manner(timeout_s=seconds))
        lines = [orjson.loads(line) for line in reply.body.splitlines()]
        return [line["state"] for line in lines if "state" in line], sum(
            "state" not in line for line in lines
        )

    async def page(self, node: str) -> object:
        client = Client(self.world, f"{node}:{PAGE_PORT}")
        reply = await client.get("/healthz", Manner(timeout_s=1.0))
        return reply.status or reply.end


@played(Scene)
async def test_an_agent_tells_what_becomes_of_its_process_and_beats(scene: Scene) -> None:
    watching = asyncio.ensure_future(scene.watch("a-1", 4.1))
    await asyncio.sleep(1.0)
    stop(scene.unit, 1)
    await asyncio.sleep(1.0)
    go_on(scene.unit)
    await asyncio.sleep(1.0)
    kill(scene.unit, 1)
    states, beats = await watching
    assert states == ["ok", "stopped", "ok", "gone"]
    assert beats in (15, 16)


@played(Scene)
async def test_the_page_of_a_node_is_its_process_s_own(scene: Scene) -> None:
    assert await scene.page("a-1") == 200
    stop(scene.unit, 1)
    assert await scene.page("a-1") is End.TIMEOUT
    kill(scene.unit, 2)
    assert await scene.page("a-2") is End.REFUSED
    assert await scene.page("a") == 200


@played(Scene)
async def test_a_stopped_engine_behind_a_front_end_that_answers_is_seen_by_the_leader_s_agent_alone(
    scene: Scene,
) -> None:
    stop_core(scene.unit)
    assert (await scene.client.get("/health")).status == 200
    assert (await scene.client.chat("x", manner=Manner(timeout_s=2.0))).end is End.TIMEOUT
    assert (await scene.watch("a", 0.5))[0] == ["stopped"]
    go_on(scene.unit)
    assert (await scene.client.chat("x")).is_done


@played(Scene)
async def test_a_restart_starts_the_processes_of_all_nodes_and_their_epochs_tell(scene: Scene) -> None:
    before = [node.epoch for node in scene.unit.nodes]
    kill(scene.unit, 0)
    kill(scene.unit, 2)
    await asyncio.sleep(0.1)
    scene.unit.restart()
    assert [node.state for node in scene.unit.nodes] == ["ok"] * 3
    assert not {node.epoch for node in scene.unit.nodes} & set(before)


@played(Scene)
async def test_the_exit_after_a_lost_follower_does_not_hit_the_process_that_came_next(scene: Scene) -> None:
    kill(scene.unit, 1)
    await scene.client.chat("x")
    scene.unit.restart()
    await asyncio.sleep(1.0)
    assert not scene.unit.is_dead
    assert (await scene.client.chat("x")).is_done


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
        times_s = (await streaming).event_times_s
        longest = max(b - a for a, b in pairwise(times_s))
        assert longest_s / 3 < longest < longest_s

    scene.play(main())


def test_a_full_queue_refuses() -> None:
    scene = Scene(Timing(step_s=0.1, max_running=2))
    scene.unit.max_waiting = 3

    async def main() -> None:
        first = [asyncio.ensure_future(scene.client.chat("x")) for _ in range(2)]
        await asyncio.sleep(0.3)
        replies = await asyncio.gather(*(scene.client.chat("x") for _ in range(8)))
        assert sorted(reply.status or 0 for reply in replies) == [200] * 3 + [503] * 5
        assert all(reply.is_done for reply in await asyncio.gather(*first))

    scene.play(main())


def test_a_unit_busy_with_other_people_s_work_goes_on_counting_steps() -> None:
    scene = Scene()
    scene.unit.behaviour = Behaviour(busy_status=429)

    async def main() -> None:
        assert (await scene.client.chat("x")).status == 429
        steps = await scene.steps()
        await asyncio.sleep(1.0)
        assert await scene.steps() > steps + 40

    scene.play(main())


def test_late_probes_leave_generation_alone() -> None:
    scene = Scene()
    scene.unit.behaviour = Behaviour(late_s=5.0)

    async def main() -> None:
        reply = await scene.client.get("/health")
        assert reply.head_s - reply.sent_s == pytest.approx(5.0, abs=0.2)
        assert (await scene.client.chat("x")).ttft_s < 0.5

    scene.play(main())


@played(Scene, is_blind=True)
async def test_a_blind_engine_has_no_metrics(scene: Scene) -> None:
    assert (await scene.client.get("/metrics")).status == 404
