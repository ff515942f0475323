"""What units can do wrong short of being lost: errors, broken streams, garbage, connections that fail."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from itertools import count

import pytest

from proxy.failure import Kind
from proxy.settings import Timeouts
from proxy.wire.downstream import ClientConnection
from router.nouns import Outcome, Verdict
from tests.scenarios.harness import BACK_S, PROMISE_S, Stage
from tests.sim.behaviour import Behaviour, Break
from tests.sim.conversation import End
from tests.sim.engine import PORT, Timing
from tests.sim.tcp import Link

# -- streams that break ------------------------------------------------------------------------------------


@pytest.mark.parametrize("breaks", [Break.ERROR, Break.TRUNCATE])
def test_a_stream_that_breaks_before_its_first_token_is_tried_elsewhere(breaks: Break) -> None:
    stage = Stage()

    async def scenario() -> None:
        stage.engines["a"].behaviour = Behaviour(breaks=breaks, breaks_after_events=0)
        for _ in range(10):
            assert all(visit.is_answered for visit in await stage.crowd(4))
            await asyncio.sleep(1.0)

    stage.play(scenario())
    assert stage.gate.metrics.tallies["a"].retries > 0


@pytest.mark.parametrize("breaks", [Break.ERROR, Break.TRUNCATE])
@pytest.mark.parametrize("torn", [False, True])
def test_a_stream_that_breaks_later_ends_honestly_and_is_held_against_the_unit(
    breaks: Break, torn: bool
) -> None:
    stage = Stage(units=1)

    async def scenario() -> None:
        stage.engines["a"].behaviour = Behaviour(breaks=breaks, breaks_after_events=3, torn=torn)
        for _ in range(40):
            visit = await stage.ask()
            assert len(visit.reply.events) >= 4
            assert visit.reply.error is not None
            # The unit's own error event ends its stream well-formed; a cut is the gate's to report.
            whole = breaks is Break.ERROR
            assert visit.reply.end is (End.COMPLETE if whole else End.TRUNCATED)
            assert visit.code == ("500" if whole else "truncated")
            await asyncio.sleep(1.0)

    stage.play(scenario())
    broken = Outcome.STREAM_ERROR if breaks is Break.ERROR else Outcome.TRUNCATED
    assert stage.gate.outcomes == {broken: 40}
    assert "suspect" in stage.flips("a")


def test_a_stream_that_stalls_while_others_go_on_ends_at_the_last_resort() -> None:
    stage = Stage(units=1, timeouts=Timeouts(answer_s=20.0))

    async def scenario() -> None:
        stage.engines["a"].behaviour = Behaviour(breaks=Break.STALL, breaks_after_events=3)
        stalled = stage.crowd(4)
        await asyncio.sleep(0.5)
        for visit in await stalled:
            assert visit.code == "truncated"
            assert visit.reply.end is End.TRUNCATED
            assert 20.0 < visit.reply.ended_s - visit.reply.event_times_s[-2] < 21.0

    stage.play(scenario())
    assert "down" not in stage.flips("a")


@pytest.mark.parametrize("fault", [Behaviour(torn=True), Behaviour(close_delimited=True)])
def test_odd_framing_reaches_the_client_as_good_streams(fault: Behaviour) -> None:
    stage = Stage(units=1)

    async def scenario() -> None:
        stage.engines["a"].behaviour = fault
        assert all(visit.is_answered for visit in await stage.crowd(40, max_tokens=40))

    stage.play(scenario())
    assert stage.flips("a") == ["up"]


# -- replies that fail -------------------------------------------------------------------------------------


def test_a_unit_that_answers_500_goes_down_and_costs_no_request() -> None:
    stage = Stage()

    async def scenario() -> None:
        stage.engines["a"].behaviour = Behaviour(error_rate=1.0)
        for _ in range(20):
            assert all(visit.is_answered for visit in await stage.crowd(4))
            await asyncio.sleep(0.5)
        assert stage.verdict("a") is Verdict.DOWN
        stage.engines["a"].behaviour = Behaviour()
        await stage.until(stage.all_up, BACK_S)

    stage.play(scenario())
    assert stage.flips("b") == ["up"]


def test_a_unit_that_answers_500_to_every_other_request_costs_no_request() -> None:
    stage = Stage()

    async def scenario() -> None:
        stage.engines["a"].behaviour = Behaviour(error_rate=0.5)
        for _ in range(100):
            assert all(visit.is_answered for visit in await stage.crowd(2))
            await asyncio.sleep(0.2)

    stage.play(scenario())
    assert stage.flips("b") == ["up"]


def test_when_every_unit_answers_500_the_client_gets_a_unit_s_own_words_and_retries_stay_bounded() -> None:
    stage = Stage(units=4)

    async def scenario() -> None:
        for engine in stage.engines.values():
            engine.behaviour = Behaviour(error_rate=1.0)
        visits = await stage.crowd(100)
        assert any(visit.reply.status == 500 and visit.unit for visit in visits)
        assert {visit.reply.status for visit in visits} <= {500, 502, 503}

    stage.play(scenario())
    assert max(record.attempts for record in stage.gate.records) <= 4


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_unit_is_passed_over_and_a_busy_fleet_says_so_without_any_change_of_verdict(
    status: int,
) -> None:
    stage = Stage()

    async def scenario() -> None:
        stage.engines["a"].behaviour = Behaviour(busy_status=status)
        for _ in range(10):
            assert all(visit.is_answered for visit in await stage.crowd(4))
            await asyncio.sleep(0.5)
        stage.engines["b"].behaviour = Behaviour(busy_status=status)
        for _ in range(50):
            assert all(visit.reply.status == status and visit.unit for visit in await stage.crowd(4))
            await asyncio.sleep(0.5)

    stage.play(scenario())
    assert stage.flips("a") == stage.flips("b") == ["up"]


def test_garbage_is_tried_elsewhere_and_never_reaches_a_client() -> None:
    stage = Stage()

    async def scenario() -> None:
        stage.engines["a"].behaviour = Behaviour(garbage=True)
        for _ in range(10):
            assert all(visit.is_answered for visit in await stage.crowd(4))
            await asyncio.sleep(0.5)

    stage.play(scenario())
    assert "down" in stage.flips("a")


def test_garbage_from_the_only_unit_is_a_502() -> None:
    stage = Stage(units=1)

    async def scenario() -> None:
        stage.engines["a"].behaviour = Behaviour(garbage=True)
        visit = await stage.ask()
        assert (visit.reply.status, visit.code) == (502, "garbage")

    stage.play(scenario())


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


def test_an_error_that_never_ends_does_not_keep_its_connection() -> None:
    stage = Stage(units=1)
    net = stage.world.net
    net.listen(HalfAnswers, net.add_host("half"), 8000, is_outside=True)

    async def scenario() -> None:
        half = replace(stage.gate.settings.fleet.units[0], name="half", url="http://half:8000")
        fleet = stage.fleet("a")
        stage.gate.configure(replace(fleet, units=(*fleet.units, half)))
        await stage.until(stage.all_up, BACK_S)
        assert all(visit.is_answered for visit in await stage.crowd(8))
        assert stage.gate.metrics.tallies["half"].retries > 0
        await asyncio.sleep(10.0)
        kept = [transport for transport in net.transports if transport.sock.remote[0] == net.names["half"][0]]
        # A probe's every second, and each stays for a few.
        assert len(kept) <= 20

    stage.play(scenario())


# -- connections that fail ---------------------------------------------------------------------------------


def test_a_refused_connection_moves_the_request_and_takes_the_unit_out() -> None:
    stage = Stage()

    async def scenario() -> None:
        stage.world.net.refuse(stage.engines["a"].address)
        assert all(visit.is_answered for visit in await stage.crowd(16))
        assert stage.verdict("a") is Verdict.DOWN
        await asyncio.sleep(30.0)
        stage.world.net.heal()
        await stage.until(stage.all_up, BACK_S)

    stage.play(scenario())
    assert stage.gate.failures[Kind.REFUSED] > 0
    assert stage.flips("a").count("up") == 2


def test_connects_that_are_never_answered_move_on_after_their_timeout() -> None:
    stage = Stage()

    async def scenario() -> None:
        stage.world.net.blackhole(stage.engines["a"].address)
        for _ in range(5):
            visits = await stage.crowd(20)
            assert all(visit.is_answered for visit in visits)
            assert all(visit.reply.ttft_s < stage.gate.settings.timeouts.connect_s + 1.0 for visit in visits)
            await asyncio.sleep(3.0)
        assert stage.verdict("a") is Verdict.DOWN
        assert all(visit.reply.ttft_s < 1.0 for visit in visits)
        stage.world.net.heal()
        await stage.until(stage.all_up, BACK_S)

    stage.play(scenario())
    assert stage.gate.failures[Kind.CONNECT_TIMEOUT] > 0
    assert stage.flips("a") == ["up", "suspect", "down", "probation", "up"]


def test_a_partition_is_found_out_and_ends_when_it_heals() -> None:
    stage = Stage(timing=Timing(prefill_s=1.0))

    async def scenario() -> None:
        crowd = stage.crowd(16)
        await asyncio.sleep(0.5)
        stage.world.net.partition(stage.engines["a"].address)
        assert all(visit.is_answered for visit in await crowd)
        await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, PROMISE_S)
        await asyncio.sleep(30.0)
        stage.world.net.heal()
        await stage.until(stage.all_up, BACK_S)

    stage.play(scenario())
    assert stage.flips("b") == ["up"]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EADDRNOTAVAIL])
def test_what_the_gate_itself_runs_out_of_is_not_held_against_units(code: int) -> None:
    stage = Stage()
    net = stage.world.net

    async def scenario() -> None:
        if code == errno.EMFILE:
            net.exhaust_files("gate")
        else:
            net.fail_connects("a", code)
            net.fail_connects("b", code)
        visits = await stage.crowd(20)
        refused = [visit for visit in visits if not visit.is_answered]
        assert refused
        assert all((visit.reply.status, visit.code) == (503, "no_resources") for visit in refused)
        await asyncio.sleep(20.0)
        net.heal()
        assert all(visit.is_answered for visit in await stage.crowd(20))

    stage.play(scenario())
    assert stage.flips("a") == stage.flips("b") == ["up"]


def test_a_resolver_that_fails_is_not_held_against_the_unit() -> None:
    stage = Stage()

    async def scenario() -> None:
        stage.world.net.fail_resolver("a")
        for _ in range(10):
            assert all(visit.is_answered for visit in await stage.crowd(20))
            await asyncio.sleep(3.0)
        stage.world.net.fail_resolver("b")
        await asyncio.sleep(10.0)
        refused = [visit for visit in await stage.crowd(20) if not visit.is_answered]
        assert refused
        assert all((visit.reply.status, visit.code) == (503, "no_resources") for visit in refused)

    stage.play(scenario())
    assert stage.flips("a") == stage.flips("b") == ["up"]


def test_a_kept_connection_that_closes_under_a_request_is_tried_once_more_for_free() -> None:
    stage = Stage(units=1)
    net, engine = stage.world.net, stage.engines["a"]

    async def scenario() -> None:
        await stage.crowd(8)
        # The end of the connections travels for 50 ms; the requests are on their way before it arrives.
        net.set_link(engine.address, Link((0.05, 0.05), split=0.0, hiccup=0.0))
        for transport in list(net.transports):
            if transport.sock.local == (engine.host, PORT):
                transport.close()
        assert all(visit.is_answered for visit in await stage.crowd(8))

    stage.play(scenario())
    assert stage.gate.failures == {Kind.STALE_CONNECTION: 8}
    assert stage.gate.outcomes == {Outcome.OK: 16}
    assert {record.attempts for record in stage.gate.records} == {1}
    assert stage.flips("a") == ["up"]


# -- the gate's own faults ---------------------------------------------------------------------------------


def test_a_defect_of_the_gate_s_own_is_loud_and_not_held_against_the_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(units=1)
    send, calls = ClientConnection.send, count(1)

    def defective(client: ClientConnection, data: bytes) -> None:
        if next(calls) == 3:
            raise LookupError("a defect")
        send(client, data)

    async def scenario() -> None:
        monkeypatch.setattr(ClientConnection, "send", defective)
        visit = await stage.ask()
        assert visit.code == "internal"
        (problem,) = stage.world.loop.problems
        assert isinstance(problem["exception"], LookupError)
        stage.world.loop.forgive()
        assert (await stage.ask()).is_answered

    stage.play(scenario())
    assert stage.flips("a") == ["up"]


@pytest.mark.parametrize("busy", [False, True])
def test_a_gate_that_stood_still_does_not_hold_it_against_its_units(busy: bool) -> None:
    stage = Stage(timing=Timing(prefill_s=0.5))

    async def scenario() -> None:
        for _ in range(20):
            crowd = stage.crowd(8 if busy else 0, max_tokens=4)
            await asyncio.sleep(stage.rng.uniform(0.0, 3.0))
            stage.stand_still(5.0)
            assert all(visit.is_answered for visit in await crowd)

    stage.play(scenario())
    assert stage.flips("a") == stage.flips("b") == ["up"]
