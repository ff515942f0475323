"""Prompts that one unit computes and another one answers: nothing is lost, and nothing is mixed up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cellgate.router.nouns import LINK_FAILED, PREFILLED
from tests.scenarios.harness import COMPLETIONS, Stage
from tests.scenarios.seeds import crossed
from tests.scenarios.splits import (
    FAULTS,
    LONG,
    NARROW,
    busy,
    cut_link,
    fill_decoder,
    legs_kept,
    stage_of,
    transfers,
)
from tests.sim.transfer import HELD_S, LinkFault
from tests.sim.world import played


@pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETIONS])
@pytest.mark.parametrize("stream", [True, False])
@played(stage_of, "pd")
async def test_a_long_prompt_is_computed_by_the_prefiller_and_answered_by_the_decoder(
    stage: Stage, path: str, stream: bool
) -> None:
    answers = await busy(stage)
    visit = await stage.ask(path=path, prompt_tokens=LONG, stream=stream, max_tokens=8)
    await answers
    assert visit.reply.status == 200
    assert visit.unit == "b"
    assert stage.world.transfers.fetched == {("a", "b"): 1}
    assert stage.world.transfers.held() == 0


@pytest.mark.parametrize("fault", [None, LinkFault.CUT, LinkFault.EMPTY])
@played(stage_of, "pd")
async def test_a_leg_is_not_kept_as_long_as_the_stream(stage: Stage, fault: LinkFault | None) -> None:
    answers = await busy(stage)
    if fault is not None:
        stage.world.transfers.faults["a", "b"] = fault
    asked = stage.crowd(2, prompt_tokens=LONG, stream=True, max_tokens=2000)
    await asyncio.sleep(5.0)
    assert stage.gate.plane.link_watch.steps["a", "b", PREFILLED if fault is None else LINK_FAILED]
    assert not asked.done()
    assert legs_kept(stage) == 0
    await asked
    await answers


@played(stage_of, "pd")
async def test_short_prompts_go_straight_to_a_decoder(stage: Stage) -> None:
    answers = await busy(stage)
    await stage.crowd(8, prompt_tokens=20, stream=True, max_tokens=8)
    await answers
    assert transfers(stage) == 0
    assert not stage.engines["a"].served


@played(stage_of, "ppdd")
async def test_no_answer_is_computed_from_the_blocks_of_another(stage: Stage) -> None:
    answers = await busy(stage, users=16)
    for _ in range(10):
        # Stage checks that each client got the answer to its own prompt.
        await stage.crowd(24, prompt_tokens=LONG, stream=True, max_tokens=4)
    await answers
    assert transfers(stage) > 40
    assert stage.world.transfers.held() == 0


@pytest.mark.parametrize(
    ("fault", "after_s", "stream"), crossed(FAULTS, [0.0, 0.02, 0.5, 1.5], [True, False])
)
@played(stage_of, "ppdd")
async def test_nothing_is_lost_whatever_breaks(
    stage: Stage, fault: Callable[[Stage], None], after_s: float, stream: bool
) -> None:
    answers = await busy(stage, users=16)
    asked = stage.crowd(8, prompt_tokens=LONG, stream=stream, max_tokens=16)
    await asyncio.sleep(after_s)
    fault(stage)
    visits = await asked + await answers
    assert all(visit.is_answered for visit in visits)
    await asyncio.sleep(HELD_S)
    assert stage.gate.plane.link_watch.orphans() == 0
    assert stage.world.transfers.held() == 0


@played(stage_of, "ppdd")
async def test_only_the_pair_of_a_cut_link_is_avoided(stage: Stage) -> None:
    answers = await busy(stage, users=32, tokens=1000)
    cut_link(stage)
    for _ in range(6):
        await stage.crowd(4, prompt_tokens=LONG, stream=True, max_tokens=4)
    links = stage.gate.board.pairs.links
    assert links["a", "c"].failures >= 1
    assert not [pair for pair, link in links.items() if link.failures and pair != ("a", "c")]
    assert {pair for pair, count in stage.world.transfers.fetched.items() if count} > {("a", "d")}
    assert stage.flips("a") == stage.flips("b") == ["up"]
    assert stage.flips("c") == stage.flips("d") == ["up"]
    await answers


@pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETIONS])
@pytest.mark.parametrize("stream", [True, False])
@played(stage_of, "pd")
async def test_an_answer_without_a_token_is_a_failed_transfer(stage: Stage, path: str, stream: bool) -> None:
    answers = await busy(stage)
    stage.world.transfers.faults["a", "b"] = LinkFault.EMPTY
    visit = await stage.ask(path=path, prompt_tokens=LONG, stream=stream, max_tokens=4)
    # The stage checks that the answer has its text.
    assert visit.is_answered
    assert stage.gate.board.pairs.link("a", "b").last_failure == "its answer has no token"
    assert stage.flips("b") == ["up"]
    await answers


@played(stage_of, "pd")
async def test_a_link_that_works_again_is_used_again(stage: Stage) -> None:
    answers = await busy(stage, tokens=3000)
    stage.world.transfers.faults["a", "b"] = LinkFault.CUT
    await stage.ask(prompt_tokens=LONG, stream=True, max_tokens=4)
    assert not stage.gate.board.pairs.link("a", "b").is_open(stage.now)
    stage.world.transfers.faults.clear()
    await asyncio.sleep(6.0)
    await stage.ask(prompt_tokens=LONG, stream=True, max_tokens=4)
    assert stage.gate.board.pairs.link("a", "b").failures == 0
    assert transfers(stage) == 1
    await answers


@played(stage_of, "pd")
async def test_a_client_that_leaves_leaves_no_blocks_behind(stage: Stage) -> None:
    answers = await busy(stage)
    stage.world.transfers.slow["a", "b"] = 1000.0
    asked = asyncio.ensure_future(stage.ask(prompt_tokens=LONG, stream=True, max_tokens=4))
    await asyncio.sleep(1.5)
    asked.cancel()
    await answers
    await asyncio.sleep(HELD_S)
    assert stage.gate.plane.link_watch.orphans() == 0


@played(stage_of, "pd")
async def test_parameters_of_clients_reach_no_unit(stage: Stage) -> None:
    stolen = stage.world.transfers.hold("a", "somebody", "a secret")
    visit = await stage.ask(stream=True, max_tokens=4, kv_transfer_params=stolen)
    assert visit.reply.status == 200
    assert transfers(stage) == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_decoder_without_a_free_slot_is_not_taken_for_a_link_that_hangs(stream: bool) -> None:
    stage = Stage(units=2, timing=NARROW, roles="pd")
    stage.play(fill_decoder(stage, stream=stream))


@pytest.mark.parametrize(("ends", "found_s"), [(True, 6.0), (False, 16.0)])
@played(Stage, units=2, timing=NARROW, roles="pd")
async def test_a_link_that_hangs_is_found_as_soon_as_its_decoder_begins_with_others(
    stage: Stage, ends: bool, found_s: float
) -> None:
    """And after FULL_S where it begins with nobody."""
    answers = await busy(stage, tokens=100)
    assert (await stage.ask(prompt_tokens=LONG, stream=True, max_tokens=4)).is_answered
    await answers
    stage.world.transfers.faults["a", "b"] = LinkFault.HANG
    asked_at, answers = stage.now, await busy(stage, tokens=100 if ends else 2000)
    asked = stage.crowd(1, prompt_tokens=LONG, stream=True, max_tokens=4)
    await asyncio.sleep(1.5)
    later = stage.crowd(8, prompt_tokens=50, stream=True, max_tokens=400)
    assert all(visit.is_answered for visit in await asked + await later + await answers)
    assert 0.0 < stage.gate.board.pairs.link("a", "b").last_failure_at - asked_at < found_s
