"""What an operator does while requests are in flight: drain, reload, stop; and a fleet that is full."""

from __future__ import annotations

import asyncio

from cellgate.proxy.gateway import GATEWAY_LINGER_S
from cellgate.router.nouns import Fleet, Verdict
from cellgate.router.queue import FairRules
from tests.scenarios.harness import BACK_S, LATENCY_S, Stage
from tests.scenarios.visit import chat
from tests.sim.conversation import End
from tests.sim.timing import Timing
from tests.sim.world import played

SLOW_TO_START = Timing(prefill_s=1.0)


# -- room --------------------------------------------------------------------------------------------------


@played(Stage, max_in_flight=2, queue=FairRules(limit=0))
async def test_when_all_usable_units_are_full_the_answer_is_429_with_a_time_to_come_back(
    stage: Stage,
) -> None:
    crowd = stage.crowd(4, max_tokens=50)
    await asyncio.sleep(0.5)
    visit = await stage.ask()
    assert (visit.reply.status, visit.code) == (429, "full")
    assert visit.reply.headers["retry-after"] == "1"
    assert all(visit.is_answered for visit in await crowd)
    assert (await stage.ask()).is_answered
    assert stage.flips("a") == stage.flips("b") == ["up"]


@played(Stage, max_in_flight=8, timing=SLOW_TO_START)
async def test_requests_that_lost_their_unit_may_overfill_the_other_by_a_quarter_and_wait_for_the_rest(
    stage: Stage,
) -> None:
    most = 0
    crowd = stage.crowd(16, max_tokens=20)
    await asyncio.sleep(0.5)
    stage.engines["a"].die()
    while not crowd.done():
        most = max(most, stage.gate.board.units["b"].in_flight)
        await asyncio.sleep(0.01)
    assert all(visit.is_answered for visit in await crowd)
    assert most == 10


# -- drain -------------------------------------------------------------------------------------------------


@played(Stage)
async def test_with_every_unit_drained_there_is_no_unit(stage: Stage) -> None:
    for name in "ab":
        stage.gate.set_drain(name, drained=True)
    visit = await stage.ask()
    assert (visit.reply.status, visit.code) == (503, "no_unit")
    assert "a is drained, b is drained" in visit.reply.json["error"]["message"]
    assert visit.reply.headers["retry-after"] == "1"
    assert (await stage.send("GET", "/readyz")).reply.status == 503


# -- reload ------------------------------------------------------------------------------------------------


@played(Stage, timing=SLOW_TO_START)
async def test_a_reload_that_exchanges_units_drops_no_request(stage: Stage) -> None:
    stage.add_engine("c")
    crowds = []
    for fleet in (("a", "b"), ("b", "c"), ("c",), ("a", "c"), ("a", "b", "c")):
        stage.reload(stage.fleet(*fleet))
        crowds += [stage.crowd(8, max_tokens=60)]
        await asyncio.sleep(0.3)
        crowds += [stage.crowd(8, max_tokens=5)]
        await asyncio.sleep(1.5)
    for crowd in crowds:
        assert all(visit.is_answered for visit in await crowd)
    await stage.until(stage.all_up, BACK_S)


@played(Stage)
async def test_a_unit_removed_while_connections_to_it_are_made_gives_its_requests_back(stage: Stage) -> None:
    stage.world.net.blackhole("a")
    crowd = stage.crowd(20)
    await asyncio.sleep(0.5)
    stage.reload(stage.fleet("b"))
    visits = await crowd
    assert all(visit.is_answered for visit in visits)
    assert all(visit.reply.ttft_s < 1.0 for visit in visits)


@played(Stage, timing=SLOW_TO_START)
async def test_what_happens_at_a_unit_s_old_address_is_not_held_against_its_new_one(stage: Stage) -> None:
    stage.add_engine("c")
    running = stage.crowd(8, max_tokens=300)
    await asyncio.sleep(1.5)
    waiting = stage.crowd(8)
    await asyncio.sleep(0.5)
    moved, other = stage.fleet("a", url=stage.engines["c"].url), stage.fleet("b")
    stage.reload(Fleet(moved.cells, moved.units + other.units))
    await stage.until(stage.all_up, BACK_S)
    stage.engines["a"].die()
    await asyncio.sleep(LATENCY_S)
    assert stage.verdict("a") is Verdict.UP
    assert all(visit.is_answered for visit in await waiting)
    await running
    assert stage.flips("a") == ["up", "up"]


@played(Stage, queue=FairRules(limit=0))
async def test_changed_limits_and_models_hold_from_the_next_request_on(stage: Stage) -> None:
    crowd = stage.crowd(8, max_tokens=50)
    await asyncio.sleep(0.3)
    stage.reload(stage.fleet("a", "b", max_in_flight=2, models=("tiny", "also")))
    assert (await stage.ask()).code == "full"
    assert all(visit.is_answered for visit in await crowd)
    visit = await stage.ask(model="also")
    assert (visit.reply.status, bool(visit.unit)) == (404, True)
    assert stage.flips("a") == ["up"]


# -- stop --------------------------------------------------------------------------------------------------


@played(Stage)
async def test_a_stop_in_good_order_loses_nothing(stage: Stage) -> None:
    idle = await stage.client.connect()
    early = stage.crowd(8, max_tokens=200)
    await asyncio.sleep(0.5)
    stopping = asyncio.ensure_future(stage.gate.stop(delay_s=2.0, drain_s=60.0))
    await asyncio.sleep(0.5)
    assert (await stage.send("GET", "/readyz")).reply.status == 503
    # It is still taking requests: whoever balances load has yet to notice.
    for visit in await stage.crowd(4, max_tokens=4):
        assert visit.is_answered
        assert visit.reply.headers["connection"] == "close"
    await asyncio.sleep(2.0 + GATEWAY_LINGER_S)
    assert idle.transport.is_closing()
    assert (await stage.client.get("/readyz")).end is End.REFUSED
    assert all(visit.is_answered for visit in await early)
    ended_at = stage.now
    await stopping
    assert stage.now - ended_at < 1.0


@played(Stage, timing=SLOW_TO_START)
async def test_a_stop_whose_time_is_up_cuts_what_is_left_and_leaves_nothing(stage: Stage) -> None:
    running = stage.crowd(8, max_tokens=1000)
    await asyncio.sleep(2.0)
    waiting = stage.crowd(8)
    await asyncio.sleep(0.1)
    await stage.gate.stop(delay_s=0.0, drain_s=0.5)
    for visit in await running:
        assert visit.reply.end in (End.TRUNCATED, End.RESET)
    for visit in await waiting:
        assert visit.reply.status is None
        assert visit.reply.end in (End.CLOSED, End.RESET)


@played(Stage)
async def test_a_stop_while_a_client_pipelines_ends_with_an_answer_that_says_so(stage: Stage) -> None:
    bodies = [chat("first", max_tokens=100), chat("second"), chat("third")]
    pipelining = asyncio.ensure_future(stage.pipeline(bodies))
    await asyncio.sleep(0.5)
    await stage.gate.stop(delay_s=0.0, drain_s=30.0)
    first, second, third = await pipelining
    # The head of the first was sent before there was a stop to tell of.
    assert first.is_answered
    assert second.is_answered
    assert second.reply.headers["connection"] == "close"
    assert third.reply.end is End.CLOSED


# -- paths that are not listed -----------------------------------------------------------------------------


@played(Stage, pass_unlisted=True)
async def test_a_request_on_a_path_that_is_not_listed_is_sent_once_and_no_more(stage: Stage) -> None:
    stage.gate.set_drain("b", drained=True)
    stage.engines["a"].behaviour.silent = True
    asking = asyncio.ensure_future(stage.send("POST", "/v1/batches", b"{}"))
    await asyncio.sleep(0.5)
    stage.gate.set_drain("b", drained=False)
    visit = await asking
    assert (visit.reply.status, visit.code) == (503, "evicted")
    assert (await stage.send("POST", "/v1/batches", b"{}")).unit == "b"
    assert [pick.unit for pick in stage.gate.router.picks] == ["a", "b"]
