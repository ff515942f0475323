"""What units can do wrong short of being lost: errors, broken streams, garbage."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cellgate.proxy.config.settings import Timeouts
from cellgate.router.nouns import Outcome, Rules, Verdict
from tests.scenarios.harness import BACK_S, Stage
from tests.scenarios.seeds import seeds
from tests.scenarios.users import Users
from tests.sim.behaviour import Behaviour, Break
from tests.sim.conversation import End
from tests.sim.timing import Timing
from tests.sim.world import played

# -- streams that break ------------------------------------------------------------------------------------


@pytest.mark.parametrize("breaks", [Break.ERROR, Break.TRUNCATE])
@pytest.mark.parametrize("torn", [False, True])
@played(Stage, units=1)
async def test_a_stream_that_breaks_later_ends_honestly_and_is_held_against_the_unit(
    stage: Stage, breaks: Break, torn: bool
) -> None:
    stage.engines["a"].behaviour = Behaviour(breaks=breaks, breaks_after_events=3, torn=torn)
    for _ in range(40):
        visit = await stage.ask()
        assert len(visit.reply.events) >= 4
        assert visit.reply.error is not None
        assert visit.reply.end is End.TRUNCATED
        assert visit.code == ("stream_error" if breaks is Break.ERROR else "truncated")
        await asyncio.sleep(1.0)
    broken = Outcome.STREAM_ERROR if breaks is Break.ERROR else Outcome.TRUNCATED
    assert stage.gate.outcomes == {broken: 40}
    assert "suspect" in stage.flips("a")


@played(Stage, units=1, timeouts=Timeouts(answer_s=20.0))
async def test_a_stream_that_stalls_while_others_go_on_ends_at_the_last_resort(stage: Stage) -> None:
    stage.engines["a"].behaviour = Behaviour(breaks=Break.STALL, breaks_after_events=3)
    stalled = stage.crowd(4)
    await asyncio.sleep(0.5)
    for visit in await stalled:
        assert visit.code == "truncated"
        assert visit.reply.end is End.TRUNCATED
        assert 20.0 < visit.reply.ended_s - visit.reply.event_times_s[-2] < 21.0
    assert "down" not in stage.flips("a")


@pytest.mark.parametrize("fault", [Behaviour(torn=True), Behaviour(close_delimited=True)])
@played(Stage, units=1)
async def test_odd_framing_reaches_the_client_as_good_streams(stage: Stage, fault: Behaviour) -> None:
    stage.engines["a"].behaviour = fault
    assert all(visit.is_answered for visit in await stage.crowd(40, max_tokens=40))
    assert stage.flips("a") == ["up"]


# -- replies that fail -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "goes_down"),
    [
        (Behaviour(error_rate=1.0), True),
        (Behaviour(error_rate=0.5), False),
        (Behaviour(garbage=True), True),
        (Behaviour(breaks=Break.ERROR), False),
        (Behaviour(breaks=Break.TRUNCATE), False),
    ],
    ids=["500", "500 to every other request", "garbage", "an error before a token", "cut before a token"],
)
@played(Stage)
async def test_a_unit_that_fails_before_a_token_costs_no_request(
    stage: Stage, fault: Behaviour, goes_down: bool
) -> None:
    stage.engines["a"].behaviour = fault
    for _ in range(20):
        assert all(visit.is_answered for visit in await stage.crowd(4))
        await asyncio.sleep(0.5)
    assert stage.gate.metrics.tallies["a"].retries > 0
    assert not goes_down or stage.verdict("a") is Verdict.DOWN
    stage.engines["a"].behaviour = Behaviour()
    await stage.until(stage.all_up, BACK_S)
    assert stage.flips("b") == ["up"]


@played(Stage)
async def test_one_500_of_an_idle_unit_is_looked_into_at_once_and_told_in_the_engine_s_words(
    stage: Stage,
) -> None:
    await asyncio.sleep(20.0)
    stage.engines["a"].behaviour = stage.engines["b"].behaviour = Behaviour(error_rate=1.0)
    visit = await stage.ask()
    await asyncio.sleep(0.5)
    picked = [name for name in "ab" if stage.verdict(name) is not Verdict.UP]
    assert picked == ["a", "b"], visit.code
    for name in picked:
        flip = next(
            event for event in stage.told("flip") if event["unit"] == name and event["before"] == "up"
        )
        assert "500 'simulated'" in flip["reason"] or "500: 'simulated'" in flip["reason"], flip
    reasons = [evidence.reason for evidence in stage.gate.board.units["a"].case.window]
    assert any(reason == "unit a answered 500: 'simulated'" for reason in reasons), reasons


@played(Stage)
async def test_a_unit_whose_engine_has_just_died_costs_no_request_however_many_come_at_once(
    stage: Stage,
) -> None:
    """More get its 500 than the budget has retries for: after the second one they are no longer paid for."""
    stage.engines["a"].behaviour = Behaviour(error_rate=1.0)
    assert all(visit.is_answered for visit in await stage.crowd(24))
    assert stage.flips("a")[:2] == ["up", "suspect"]
    assert stage.flips("b") == ["up"]


@pytest.mark.parametrize("seed", seeds(range(12)))
@played(Stage, given=("seed",), units=4)
async def test_when_every_unit_answers_500_the_client_gets_an_error_and_retries_stay_bounded(
    stage: Stage,
) -> None:
    """A unit's own words, where there is no other unit left to try; the gate's, for who waited for one."""
    for engine in stage.engines.values():
        engine.behaviour = Behaviour(error_rate=1.0)
    visits = await stage.crowd(100)
    assert {visit.reply.status for visit in visits} <= {500, 502, 503}
    assert all(visit.unit for visit in visits if visit.reply.status == 500)
    assert max(record.attempts for record in stage.gate.records) <= 4


@pytest.mark.parametrize("status", [429, 503])
@played(Stage)
async def test_a_busy_unit_is_passed_over_and_a_busy_fleet_says_so_without_any_change_of_verdict(
    stage: Stage, status: int
) -> None:
    stage.engines["a"].behaviour = Behaviour(busy_status=status)
    for _ in range(10):
        assert all(visit.is_answered for visit in await stage.crowd(4))
        await asyncio.sleep(0.5)
    stage.engines["b"].behaviour = Behaviour(busy_status=status)
    for _ in range(20):
        assert all(visit.reply.status == status and visit.unit for visit in await stage.crowd(4))
        await asyncio.sleep(0.5)
    assert stage.flips("a") == stage.flips("b") == ["up"]


class HalfAnswers(asyncio.Protocol):
    """In the place of an engine: well to every probe, but what users get is the beginning of a 500."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if b"cellgate-canary" in data:
            self._transport.write(b'HTTP/1.1 200 OK\r\ncontent-length: 18\r\n\r\n{"choices":[true]}')
        elif data.startswith(b"GET "):
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        else:
            self._transport.write(b"HTTP/1.1 500 Oops\r\ncontent-length: 100\r\n\r\nthe beginning")


@played(Stage, units=1, rules=Rules(slow_start_s=0.001))
async def test_an_error_that_never_ends_does_not_keep_its_connection(stage: Stage) -> None:
    net = stage.world.net
    net.listen(HalfAnswers, net.add_host("half"), 8000, is_outside=True)
    half = replace(stage.gate.settings.fleet.units[0], name="half", url="http://half:8000")
    fleet = stage.fleet("a")
    stage.gate.plane.configure(replace(fleet, units=(*fleet.units, half)))
    await stage.until(stage.all_up, BACK_S)
    assert all(visit.is_answered for visit in await stage.crowd(32))
    assert stage.gate.metrics.tallies["half"].retries > 0
    await asyncio.sleep(10.0)
    kept = [transport for transport in net.transports if transport.sock.remote[0] == net.names["half"][0]]
    # A probe's every second, and each stays for a few.
    assert len(kept) <= 20


@played(Stage, units=3)
async def test_a_unit_that_fails_at_once_gets_no_more_requests_than_canaries(stage: Stage) -> None:
    users = Users(stage, 6)
    await asyncio.sleep(10.0)
    stage.engines["a"].behaviour = Behaviour(error_rate=1.0)
    await asyncio.sleep(5.0)
    since = stage.now
    await asyncio.sleep(60.0)
    # A unit that shows no life gets a canary every 2 s.
    assert len(stage.picks("a", since)) <= 60.0 / 2.0
    assert len(stage.picks("b", since)) > 100
    await users.leave()
    assert all(visit.is_answered for visit in users.visits)


@played(Stage, 1, timing=Timing(step_s=0.05), timeouts=Timeouts(answer_s=60.0))
async def test_streams_that_a_unit_has_lost_are_held_against_it_now_and_then(stage: Stage) -> None:
    """It passes every canary: to suspect it every second would say nothing new."""
    stage.engines["a"].behaviour = Behaviour(breaks=Break.LOSE, breaks_after_events=3)
    users = Users(stage, 8)
    await asyncio.sleep(120.0)
    stage.engines["a"].behaviour = Behaviour()
    await users.leave()
    assert "down" not in stage.flips("a")
    # It was 168 when it could be suspected of the same streams again and again.
    assert len(stage.flips("a")) < 60
    assert stage.flips("b") == ["up"]
