"""What tests of split requests share: units with roles, their load, and the faults of their links."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from random import Random

from cellgate.proxy.request.prefill_decode import PrefillLeg
from tests.scenarios.harness import Stage
from tests.scenarios.visit import Visit
from tests.sim.timing import Timing
from tests.sim.transfer import LinkFault

SLOW = Timing(prefill_tokens_per_s=4_000.0)
"""Prompts that are worth to be computed elsewhere."""
NARROW = replace(SLOW, max_running=8)
"""A decoder that is full with the answers of `busy`."""
LONG = 4000


def stage_of(roles: str, seed: int = 1) -> Stage:
    return Stage(seed=seed, units=len(roles), timing=SLOW, roles=roles)


async def busy(stage: Stage, *, users: int = 8, tokens: int = 400) -> asyncio.Future[list[Visit]]:
    """Long answers, so that prompts computed beside them would delay many."""
    answers = stage.crowd(users, max_tokens=tokens, stream=True)
    await asyncio.sleep(0.5)
    return answers


def transfers(stage: Stage) -> int:
    return sum(stage.world.transfers.fetched.values())


def legs_kept(stage: Stage) -> int:
    """Legs that anything still holds, with their copies of a prompt."""
    gc.collect()
    units = [*stage.gate.board.units.values()]
    legs = [each for each in gc.get_objects() if isinstance(each, PrefillLeg)]
    return sum(leg.decoder.unit_state in units for leg in legs)


async def fill_decoder(stage: Stage, *, stream: bool) -> None:
    """Split prompts whose decoder, `b`, has no free slot: all are answered, and no link is blamed."""
    for _ in range(3):
        answers = await busy(stage)
        visits = await stage.crowd(4, prompt_tokens=LONG, stream=stream, max_tokens=4)
        assert all(visit.is_answered for visit in visits + await answers)
    assert transfers(stage) > 4
    assert not stage.gate.board.pairs.link("a", "b").failed


def kill_prefiller(stage: Stage) -> None:
    stage.engines["a"].die()


def kill_decoder(stage: Stage) -> None:
    stage.engines["c"].die()


def cut_link(stage: Stage) -> None:
    stage.world.transfers.faults["a", "c"] = LinkFault.CUT


def hang_link(stage: Stage) -> None:
    stage.world.transfers.faults["a", "c"] = LinkFault.HANG


def empty_link(stage: Stage) -> None:
    stage.world.transfers.faults["a", "c"] = LinkFault.EMPTY


FAULTS = [kill_prefiller, kill_decoder, cut_link, hang_link, empty_link]


def hurt(stage: Stage, rng: Random) -> None:
    """One fault at a time; what was broken before is mended."""
    names = list(stage.engines)
    for name in names:
        if stage.engines[name].is_dead:
            stage.engines[name].restart()
    stage.world.transfers.faults.clear()
    one, other = rng.sample(names, 2)
    match rng.randrange(4):
        case 0:
            stage.engines[one].die()
        case 1:
            stage.world.transfers.faults[one, other] = LinkFault.CUT
        case 2:
            stage.world.transfers.faults[one, other] = LinkFault.HANG
