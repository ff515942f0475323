"""Many split requests at once, with workers, and with faults at random: each client gets its own answer."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.scenarios.crew import CrewStage
from tests.scenarios.harness import Stage
from tests.scenarios.seeds import seeds
from tests.scenarios.splits import LONG, NARROW, SLOW, busy, fill_decoder, hurt, transfers
from tests.sim.transfer import HELD_S, LinkFault
from tests.sim.world import played

ROUNDS, CLIENTS = 62, 16
ROUNDS_A_CROWD = 6
"""Long answers are over after so many rounds; then others begin."""


@pytest.mark.nightly
@played(Stage, units=4, timing=SLOW, roles="ppdd")
async def test_a_thousand_requests_of_16_clients_are_not_mixed_up(stage: Stage) -> None:
    answers = []
    for number in range(ROUNDS):
        if number % ROUNDS_A_CROWD == 0:
            answers.append(await busy(stage, users=16))
        visits = await stage.crowd(CLIENTS, prompt_tokens=LONG // 4, stream=True, max_tokens=4)
        assert all(visit.is_answered for visit in visits)
    await asyncio.gather(*answers)
    assert transfers(stage) >= 50


@played(CrewStage, units=3, timing=SLOW, roles="pdd")
async def test_workers_split_requests_as_one_process_does(stage: CrewStage) -> None:
    answers = await busy(stage, users=16)
    stage.world.transfers.faults["a", "b"] = LinkFault.CUT
    for _ in range(4):
        visits = await stage.crowd(8, prompt_tokens=LONG, stream=True, max_tokens=4)
        assert all(visit.is_answered for visit in visits)
    await answers
    assert transfers(stage) > 4


def test_workers_do_not_take_a_full_decoder_for_a_link_that_hangs() -> None:
    stage = CrewStage(units=2, timing=NARROW, roles="pd")
    stage.play(fill_decoder(stage, stream=True))


@pytest.mark.parametrize("seed", seeds(range(6)))
def test_whatever_breaks_at_random_each_client_gets_its_own_answer(seed: int) -> None:
    stage = Stage(seed=seed, units=5, timing=SLOW, roles="ppddb")

    async def scenario() -> None:
        rng, crowd = Random(seed), []
        for _ in range(20):
            prompt = rng.choice([50, LONG // 4, LONG])
            size = rng.randrange(1, 9)
            stream = rng.random() < 0.7
            tokens = rng.randrange(1, 200)
            crowd.append(stage.crowd(size, prompt_tokens=prompt, stream=stream, max_tokens=tokens))
            await asyncio.sleep(rng.uniform(0.0, 0.6))
            hurt(stage, rng)
        await asyncio.gather(*crowd)
        await asyncio.sleep(HELD_S)
        assert stage.gate.plane.link_watch.orphans() == 0
        assert stage.world.transfers.held() == 0

    # The stage checks each answer: one from another's blocks would be found.
    stage.play(scenario())
