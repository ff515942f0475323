"""Pairs of SGLang, where both units get a request at the same time: nothing is lost, and nobody waits for a
prefiller that is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from tests.scenarios.crew import CrewStage
from tests.scenarios.harness import CHAT, COMPLETIONS, MESSAGES, Stage
from tests.scenarios.seeds import crossed, seeds
from tests.scenarios.splits import FAULTS, LONG, SLOW, busy, cut_link, hurt, transfers
from tests.sim.timing import Timing
from tests.sim.transfer import LinkFault
from tests.sim.world import played

AT_ONCE_S = 3.0
"""From the death of a prefiller to the answer of another pair, prompt included; engines wait for 300 s."""


def stage_of(roles: str, seed: int = 1) -> Stage:
    return Stage(seed=seed, units=len(roles), timing=SLOW, roles=roles, transfer="sglang")


def rooms_are_for_one_attempt(stage: Stage) -> bool:
    return set(stage.world.rooms.entered.values()) <= {1}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [10, LONG])
@played(stage_of, "pd")
async def test_the_prefiller_computes_the_prompt_and_the_decoder_answers(
    stage: Stage, path: str, stream: bool, tokens: int
) -> None:
    visit = await stage.ask(path=path, prompt_tokens=tokens, stream=stream, max_tokens=8)
    assert visit.reply.status == 200
    assert visit.unit == "b"
    assert stage.world.transfers.fetched == {("a", "b"): 1}
    assert not stage.gate.board.units["a"].leases


def test_a_large_body_is_sent_to_a_pair_as_well() -> None:
    fast = Timing(prefill_tokens_per_s=1_000_000.0)
    stage = Stage(units=2, timing=fast, roles="pd", transfer="sglang")

    async def scenario() -> None:
        visit = await stage.ask(prompt_tokens=300_000, stream=True, max_tokens=4)
        assert visit.is_answered
        assert transfers(stage) == 1

    stage.play(scenario())


@played(stage_of, "ppdd")
async def test_many_at_once_are_not_mixed_up(stage: Stage) -> None:
    for _ in range(10):
        # Stage checks that each client got the answer to its own prompt.
        visits = await stage.crowd(16, prompt_tokens=LONG // 8, stream=True, max_tokens=4)
        assert all(visit.is_answered for visit in visits)
    assert transfers(stage) == 160
    assert rooms_are_for_one_attempt(stage)


@pytest.mark.parametrize(
    ("fault", "after_s", "stream"), crossed(FAULTS, [0.0, 0.02, 0.5, 1.5], [True, False])
)
@played(stage_of, "ppdd")
async def test_nothing_is_lost_whatever_breaks(
    stage: Stage, fault: Callable[[Stage], None], after_s: float, stream: bool
) -> None:
    answers = await busy(stage, users=8)
    asked = stage.crowd(8, prompt_tokens=LONG // 4, stream=stream, max_tokens=16)
    await asyncio.sleep(after_s)
    fault(stage)
    visits = await asked + await answers
    assert all(visit.is_answered for visit in visits)
    assert rooms_are_for_one_attempt(stage)
    assert stage.world.rooms.waiting() == 0


@played(stage_of, "ppd")
async def test_a_decoder_does_not_wait_for_a_prefiller_that_has_died(stage: Stage) -> None:
    asked = asyncio.ensure_future(stage.ask(prompt_tokens=LONG, stream=True, max_tokens=4))
    await asyncio.sleep(0.5)
    died_at = stage.now
    next(engine for engine in (stage.engines["a"], stage.engines["b"]) if engine.running).die()
    visit = await asked
    assert visit.is_answered
    assert stage.now - died_at < AT_ONCE_S
    assert stage.flips("c") == ["up"]


@played(stage_of, "ppd")
async def test_nor_for_one_that_stands_still(stage: Stage) -> None:
    await stage.crowd(4, prompt_tokens=LONG // 8, stream=True, max_tokens=4)
    stage.engines["a"].behaviour.silent = True
    visits = await stage.crowd(4, prompt_tokens=LONG // 8, stream=True, max_tokens=4)
    assert all(visit.is_answered for visit in visits)
    assert "down" in stage.flips("a")
    assert stage.flips("c") == ["up"]


@played(stage_of, "ppdd")
async def test_only_the_pair_of_a_cut_link_is_avoided(stage: Stage) -> None:
    cut_link(stage)
    for _ in range(6):
        visits = await stage.crowd(16, prompt_tokens=LONG // 8, stream=True, max_tokens=4)
        assert all(visit.is_answered for visit in visits)
    links = stage.gate.board.pairs.links
    assert [pair for pair, link in links.items() if link.failures] == [("a", "c")]
    assert all(stage.flips(name) == ["up"] for name in "abcd")


@played(stage_of, "pdb")
async def test_a_unit_for_whole_requests_answers_when_no_prefiller_is_left(stage: Stage) -> None:
    asked = stage.crowd(4, prompt_tokens=LONG // 4, stream=True, max_tokens=4)
    await asyncio.sleep(0.1)
    stage.engines["a"].die()
    visits = await asked + await stage.crowd(4, stream=True, max_tokens=4)
    assert all(visit.is_answered for visit in visits)
    assert {visit.unit for visit in visits[4:]} == {"c"}


@played(stage_of, "pd")
async def test_without_a_prefiller_clients_are_told_so(stage: Stage) -> None:
    stage.engines["a"].die()
    await stage.until(lambda: "down" in stage.flips("a"), 10.0)
    visit = await stage.ask(stream=True, max_tokens=4)
    assert visit.code == "no_unit"


@played(stage_of, "pdb")
async def test_a_path_that_cannot_be_split_goes_to_a_unit_for_whole_requests(stage: Stage) -> None:
    visit = await stage.ask(path=MESSAGES, stream=True, max_tokens=4)
    assert (visit.reply.status, visit.unit) == (200, "c")


@played(stage_of, "pd")
async def test_a_client_that_leaves_leaves_nobody_waiting(stage: Stage) -> None:
    asked = asyncio.ensure_future(stage.ask(prompt_tokens=LONG, stream=True, max_tokens=4))
    await asyncio.sleep(0.5)
    asked.cancel()
    await asyncio.sleep(1.0)
    assert stage.world.rooms.waiting() == 0
    assert not any(state.leases for state in stage.gate.board)


@played(stage_of, "pd")
async def test_a_room_of_a_client_is_not_used(stage: Stage) -> None:
    visit = await stage.ask(
        stream=True,
        max_tokens=4,
        bootstrap_room=7,
        bootstrap_host="a",
        headers={"x-override-bootstrap-room": "7"},
    )
    assert visit.is_answered
    assert 7 not in {room for room, _ in stage.world.rooms.entered}


@played(CrewStage, units=3, timing=SLOW, roles="pdd", transfer="sglang")
async def test_workers_split_requests_as_one_process_does(stage: CrewStage) -> None:
    stage.world.transfers.faults["a", "b"] = LinkFault.CUT
    for _ in range(4):
        visits = await stage.crowd(8, prompt_tokens=LONG // 4, stream=True, max_tokens=4)
        assert all(visit.is_answered for visit in visits)
    assert transfers(stage) == 32


@pytest.mark.parametrize("seed", seeds(range(6)))
def test_whatever_breaks_at_random_each_client_gets_its_own_answer(seed: int) -> None:
    stage = stage_of("ppddb", seed)

    async def scenario() -> None:
        rng, crowd = Random(seed), []
        for _ in range(20):
            prompt = rng.choice([50, LONG // 8, LONG // 2])
            size, tokens = rng.randrange(1, 9), rng.randrange(1, 200)
            stream = rng.random() < 0.7
            crowd.append(stage.crowd(size, prompt_tokens=prompt, stream=stream, max_tokens=tokens))
            await asyncio.sleep(rng.uniform(0.0, 0.6))
            hurt(stage, rng)
        await asyncio.gather(*crowd)
        assert rooms_are_for_one_attempt(stage)
        assert stage.world.rooms.waiting() == 0

    stage.play(scenario())
