"""Prompts that one unit computes and another one answers: nothing is lost, nothing is mixed up, and nobody
waits for a prefiller that is gone.

With `nixl` the prefiller goes first, and only long prompts beside other work are worth it; with `sglang` both
units get each request at the same time.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from cellgate.proxy.request.prefill_decode import PrefillLeg
from cellgate.router.nouns import LINK_FAILED, PREFILLED, Transfer
from tests.scenarios.harness import CHAT, COMPLETIONS, MESSAGES, Stage
from tests.scenarios.kinds import HAS_WORKERS, crew
from tests.scenarios.seeds import crossed, seeds
from tests.scenarios.visit import Visit
from tests.sim.timing import Timing
from tests.sim.transfer import HELD_S, LinkFault
from tests.sim.world import played

SLOW = Timing(prefill_tokens_per_s=4_000.0)
"""Prompts that are worth to be computed elsewhere."""
NARROW = replace(SLOW, max_running=8)
"""A decoder that is full with the answers of `busy`."""
LONG = 4000
AT_ONCE_S = 3.0
"""From the death of a prefiller to the answer of another pair, prompt included; engines wait for 300 s."""

both = pytest.mark.parametrize("transfer", ["nixl", "sglang"])


def stage_of(roles: str, seed: int = 1, transfer: Transfer = "nixl") -> Stage:
    return Stage(seed=seed, units=len(roles), timing=SLOW, roles=roles, transfer=transfer)


async def busy(stage: Stage, *, users: int = 8, tokens: int = 200) -> asyncio.Future[list[Visit]]:
    """Long answers, so that prompts computed beside them would delay many."""
    answers = stage.crowd(users, max_tokens=tokens, stream=True)
    await asyncio.sleep(0.5)
    return answers


def transfers(stage: Stage) -> int:
    return sum(stage.world.transfers.fetched.values())


def rooms_are_for_one_attempt(stage: Stage) -> bool:
    return set(stage.world.rooms.entered.values()) <= {1}


async def nothing_is_kept(stage: Stage) -> None:
    """Neither blocks nor anybody who waits for them."""
    await asyncio.sleep(HELD_S)
    assert stage.gate.plane.link_watch.unclaimed() == 0
    assert stage.world.transfers.held() == 0
    assert stage.world.rooms.waiting() == 0
    assert rooms_are_for_one_attempt(stage)
    assert not any(state.leases for state in stage.gate.board)


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


# -- both ways ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("transfer", "tokens"), [("nixl", LONG), ("sglang", 10), ("sglang", LONG)])
@played(stage_of, "pd", given=("transfer",))
async def test_the_prefiller_computes_the_prompt_and_the_decoder_answers(
    stage: Stage, transfer: Transfer, path: str, stream: bool, tokens: int
) -> None:
    answers = await busy(stage, users=8 if transfer == "nixl" else 0)
    visit = await stage.ask(path=path, prompt_tokens=tokens, stream=stream, max_tokens=8)
    await answers
    assert (visit.reply.status, visit.unit) == (200, "b")
    assert stage.world.transfers.fetched == {("a", "b"): 1}
    assert stage.world.transfers.held() == 0
    assert not stage.gate.board.units["a"].leases


@pytest.mark.parametrize(
    ("transfer", "fault", "after_s", "stream"),
    crossed(["nixl", "sglang"], FAULTS, [0.0, 0.02, 0.5, 1.5], [True, False]),
)
@played(stage_of, "ppdd", given=("transfer",))
async def test_nothing_is_lost_whatever_breaks(
    stage: Stage, transfer: Transfer, fault: Callable[[Stage], None], after_s: float, stream: bool
) -> None:
    answers = await busy(stage, users=16 if transfer == "nixl" else 4)
    tokens = LONG if transfer == "nixl" else LONG // 4
    asked = stage.crowd(8, prompt_tokens=tokens, stream=stream, max_tokens=16)
    await asyncio.sleep(after_s)
    fault(stage)
    visits = await asked + await answers
    assert all(visit.is_answered for visit in visits)
    await nothing_is_kept(stage)


@both
@played(stage_of, "ppdd", given=("transfer",))
async def test_only_the_pair_of_a_cut_link_is_avoided(stage: Stage, transfer: Transfer) -> None:
    size, tokens, users = (4, LONG, 16) if transfer == "nixl" else (16, LONG // 8, 0)
    answers = await busy(stage, users=users, tokens=800)
    cut_link(stage)
    for _ in range(6):
        visits = await stage.crowd(size, prompt_tokens=tokens, stream=True, max_tokens=4)
        assert all(visit.is_answered for visit in visits)
    links = stage.gate.board.pairs.links
    assert [pair for pair, link in links.items() if link.failures] == [("a", "c")]
    assert {pair for pair, count in stage.world.transfers.fetched.items() if count} > {("a", "d")}
    assert all(stage.flips(name) == ["up"] for name in "abcd")
    await answers


@both
@played(stage_of, "pd", given=("transfer",))
async def test_a_client_that_leaves_leaves_no_blocks_and_nobody_waiting(stage: Stage) -> None:
    answers = await busy(stage)
    stage.world.transfers.slow["a", "b"] = 1000.0
    asked = asyncio.ensure_future(stage.ask(prompt_tokens=LONG, stream=True, max_tokens=4))
    await asyncio.sleep(1.5)
    asked.cancel()
    await answers
    await nothing_is_kept(stage)


@HAS_WORKERS
@both
@played(crew, given=("transfer",), units=3, timing=SLOW, roles="pdd")
async def test_workers_split_requests_as_one_process_does(stage: Stage, transfer: Transfer) -> None:
    answers = await busy(stage, users=16 if transfer == "nixl" else 0, tokens=400)
    stage.world.transfers.faults["a", "b"] = LinkFault.CUT
    for _ in range(4):
        visits = await stage.crowd(8, prompt_tokens=LONG, stream=True, max_tokens=4)
        assert all(visit.is_answered for visit in visits)
    await answers
    assert transfers(stage) == 32 if transfer == "sglang" else transfers(stage) > 4


@both
@pytest.mark.parametrize("seed", seeds(range(6)))
@played(stage_of, "ppddb", given=("seed", "transfer"))
async def test_whatever_breaks_at_random_each_client_gets_its_own_answer(stage: Stage, seed: int) -> None:
    """The stage checks each answer: one from another's blocks would be found."""
    rng, crowd = Random(seed), []
    for _ in range(20):
        prompt = rng.choice([50, LONG // 4, LONG])
        size, tokens = rng.randrange(1, 9), rng.randrange(1, 200)
        stream = rng.random() < 0.7
        crowd.append(stage.crowd(size, prompt_tokens=prompt, stream=stream, max_tokens=tokens))
        await asyncio.sleep(rng.uniform(0.0, 0.6))
        _hurt(stage, rng)
    await asyncio.gather(*crowd)
    await nothing_is_kept(stage)


def _hurt(stage: Stage, rng: Random) -> None:
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


# -- nixl --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [None, LinkFault.CUT, LinkFault.EMPTY])
@played(stage_of, "pd")
async def test_a_leg_is_not_kept_as_long_as_the_stream(stage: Stage, fault: LinkFault | None) -> None:
    answers = await busy(stage, tokens=400)
    if fault is not None:
        stage.world.transfers.faults["a", "b"] = fault
    asked = stage.crowd(2, prompt_tokens=LONG, stream=True, max_tokens=500)
    await asyncio.sleep(5.0)
    assert stage.gate.plane.link_watch.steps["a", "b", PREFILLED if fault is None else LINK_FAILED]
    assert not asked.done()
    assert _legs_kept(stage) == 0
    await asked
    await answers


def _legs_kept(stage: Stage) -> int:
    """Legs that anything still holds, with their copies of a prompt."""
    gc.collect()
    units = [*stage.gate.board.units.values()]
    legs = [each for each in gc.get_objects() if isinstance(each, PrefillLeg)]
    return sum(leg.decoder.unit_state in units for leg in legs)


@played(stage_of, "pd")
async def test_short_prompts_go_straight_to_a_decoder(stage: Stage) -> None:
    answers = await busy(stage)
    await stage.crowd(8, prompt_tokens=20, stream=True, max_tokens=8)
    await answers
    assert transfers(stage) == 0
    assert not stage.engines["a"].served


@pytest.mark.parametrize("rounds", [5, pytest.param(62, marks=pytest.mark.nightly)])
@played(stage_of, "ppdd")
async def test_no_answer_is_computed_from_the_blocks_of_another(stage: Stage, rounds: int) -> None:
    answers = []
    for number in range(rounds):
        if number % 6 == 0:
            # Those before are over, or nearly.
            answers.append(await busy(stage, users=16, tokens=400))
        # Stage checks that each client got the answer to its own prompt.
        await stage.crowd(24, prompt_tokens=LONG, stream=True, max_tokens=4)
    await asyncio.gather(*answers)
    assert transfers(stage) > 4 * rounds
    assert stage.world.transfers.held() == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
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
    answers = await busy(stage, tokens=800)
    stage.world.transfers.faults["a", "b"] = LinkFault.CUT
    await stage.ask(prompt_tokens=LONG, stream=True, max_tokens=4)
    assert not stage.gate.board.pairs.link("a", "b").is_open(stage.now)
    stage.world.transfers.faults.clear()
    await asyncio.sleep(6.0)
    await stage.ask(prompt_tokens=LONG, stream=True, max_tokens=4)
    assert stage.gate.board.pairs.link("a", "b").failures == 0
    assert transfers(stage) == 1
    await answers


@pytest.mark.parametrize(
    ("kind", "stream"), [(Stage, True), (Stage, False), pytest.param(crew, True, marks=HAS_WORKERS)]
)
@played(lambda kind: kind(units=2, timing=NARROW, roles="pd"), given=("kind",))
async def test_a_decoder_without_a_free_slot_is_not_taken_for_a_link_that_hangs(
    stage: Stage, stream: bool
) -> None:
    for _ in range(3):
        answers = await busy(stage, tokens=400)
        visits = await stage.crowd(4, prompt_tokens=LONG, stream=stream, max_tokens=4)
        assert all(visit.is_answered for visit in visits + await answers)
    assert transfers(stage) > 4
    assert not stage.gate.board.pairs.link("a", "b").failed


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
    asked_at, answers = stage.now, await busy(stage, tokens=100 if ends else 1000)
    asked = stage.crowd(1, prompt_tokens=LONG, stream=True, max_tokens=4)
    await asyncio.sleep(1.5)
    later = stage.crowd(8, prompt_tokens=50, stream=True, max_tokens=400)
    assert all(visit.is_answered for visit in await asked + await later + await answers)
    assert 0.0 < stage.gate.board.pairs.link("a", "b").last_failure_at - asked_at < found_s


# -- sglang ------------------------------------------------------------------------------------------------


@played(Stage, units=2, timing=Timing(prefill_tokens_per_s=1_000_000.0), roles="pd", transfer="sglang")
async def test_a_large_body_is_sent_to_a_pair_as_well(stage: Stage) -> None:
    visit = await stage.ask(prompt_tokens=300_000, stream=True, max_tokens=4)
    assert visit.is_answered
    assert transfers(stage) == 1


@played(stage_of, "ppdd", transfer="sglang")
async def test_many_at_once_are_not_mixed_up(stage: Stage) -> None:
    for _ in range(10):
        # Stage checks that each client got the answer to its own prompt.
        visits = await stage.crowd(16, prompt_tokens=LONG // 8, stream=True, max_tokens=4)
        assert all(visit.is_answered for visit in visits)
    assert transfers(stage) == 160
    assert rooms_are_for_one_attempt(stage)


@played(stage_of, "ppd", transfer="sglang")
async def test_a_decoder_does_not_wait_for_a_prefiller_that_has_died(stage: Stage) -> None:
    asked = asyncio.ensure_future(stage.ask(prompt_tokens=LONG, stream=True, max_tokens=4))
    await asyncio.sleep(0.5)
    died_at = stage.now
    next(engine for engine in (stage.engines["a"], stage.engines["b"]) if engine.running).die()
    visit = await asked
    assert visit.is_answered
    assert stage.now - died_at < AT_ONCE_S
    assert stage.flips("c") == ["up"]


@played(stage_of, "ppd", transfer="sglang")
async def test_nor_for_one_that_stands_still(stage: Stage) -> None:
    await stage.crowd(4, prompt_tokens=LONG // 8, stream=True, max_tokens=4)
    stage.engines["a"].behaviour.silent = True
    visits = await stage.crowd(4, prompt_tokens=LONG // 8, stream=True, max_tokens=4)
    assert all(visit.is_answered for visit in visits)
    assert "down" in stage.flips("a")
    assert stage.flips("c") == ["up"]


@played(stage_of, "pdb", transfer="sglang")
async def test_a_unit_for_whole_requests_answers_what_cannot_be_split_and_when_no_prefiller_is_left(
    stage: Stage,
) -> None:
    visit = await stage.ask(path=MESSAGES, stream=True, max_tokens=4)
    assert (visit.reply.status, visit.unit) == (200, "c")
    asked = stage.crowd(4, prompt_tokens=LONG // 4, stream=True, max_tokens=4)
    await asyncio.sleep(0.1)
    stage.engines["a"].die()
    visits = await asked + await stage.crowd(4, stream=True, max_tokens=4)
    assert all(visit.is_answered for visit in visits)
    assert {visit.unit for visit in visits[4:]} == {"c"}


@played(stage_of, "pd", transfer="sglang")
async def test_without_a_prefiller_clients_are_told_so(stage: Stage) -> None:
    stage.engines["a"].die()
    await stage.until(lambda: "down" in stage.flips("a"), 10.0)
    visit = await stage.ask(stream=True, max_tokens=4)
    assert visit.code == "no_unit"
