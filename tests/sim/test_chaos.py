"""Random faults: everything is undone, nothing is left, and the seed decides it all."""

from __future__ import annotations

import asyncio

from tests.sim.chaos import STRIKES, Chaos
from tests.sim.client import Client, Manner
from tests.sim.conversation import End, Reply
from tests.sim.engine import Engine
from tests.sim.loop import START_S
from tests.sim.speech import answer, chat_text
from tests.sim.world import World, run

IMPATIENT = Manner(timeout_s=10.0)


def play(seed: int, lasting_s: float) -> tuple[World, list[Reply]]:
    """Two engines under faults, one client that asks each in turn, without a gate between them."""
    world = World(seed)
    engines = [Engine(world, name) for name in "ab"]
    clients = [Client(world, engine.address) for engine in engines]
    replies: list[Reply] = []

    async def main() -> None:
        chaos = Chaos(world, engines)
        while world.loop.time() < START_S + lasting_s:
            for client in clients:
                replies.append(await client.chat(f"prompt {len(replies)}", manner=IMPATIENT))
            await asyncio.sleep(2.0)
        chaos.stop()
        await asyncio.sleep(60.0)
        for client in clients:
            assert (await client.chat("after")).is_whole

    run(world, main())
    return world, replies


def test_an_hour_of_faults_hurts_in_every_way_and_never_makes_an_engine_lie() -> None:
    _, replies = play(1, lasting_s=3600.0)
    assert {reply.end for reply in replies} == set(End) - {End.LEFT, End.CLOSED}
    assert sum(reply.is_done for reply in replies) > len(replies) / 2
    for number, reply in enumerate(replies):
        text = answer(chat_text(f"prompt {number}"), 8)
        assert reply.text == text if reply.is_done and not reply.error else text.startswith(reply.text)


def test_every_strike_strikes_somewhere() -> None:
    struck: set[str] = set()
    for seed in range(4):
        world = World(seed)
        Chaos(world, [Engine(world, "a")], pause_s=(0.1, 0.2), lasting_s=(0.1, 0.2))
        run(world, asyncio.sleep(30.0))
        struck |= {line.split(" ", 3)[3].strip("'") for line in world.trace.last if " strike " in line}
    assert struck == set(STRIKES)


def test_the_seed_decides_it_all() -> None:
    digests = [play(seed, lasting_s=300.0)[0].trace.digest for seed in (2, 2, 3)]
    assert digests[0] == digests[1] != digests[2]
