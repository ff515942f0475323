"""Connections to units that fail, and what is the gate's own fault and no unit's."""

from __future__ import annotations

import asyncio
import errno
from itertools import count

import pytest

from cellgate.proxy.config.settings import TICK_S
from cellgate.proxy.http.errors import FailureKind
from cellgate.proxy.http.unit import EARLY_S
from cellgate.proxy.request.response import Response
from cellgate.router.nouns import Outcome, Verdict
from tests.scenarios.harness import BACK_S, PROMISE_S, Stage
from tests.sim.engine import PORT
from tests.sim.tcp import Link
from tests.sim.world import played

# -- connections that fail ---------------------------------------------------------------------------------


def test_a_refused_connection_moves_the_request_and_takes_the_unit_out() -> None:
    """In some worlds a probe is refused a moment before the first request, which then goes elsewhere."""
    assert sum(_refused(seed) for seed in range(1, 5)) > 0


def _refused(seed: int) -> int:
    """How many connections for requests were refused."""
    stage = Stage(seed=seed)

    async def scenario() -> None:
        stage.world.net.refuse(stage.engines["a"].address)
        assert all(visit.is_answered for visit in await stage.crowd(16))
        assert stage.verdict("a") is Verdict.DOWN
        await asyncio.sleep(30.0)
        stage.world.net.heal()
        await stage.until(stage.all_up, BACK_S)

    stage.play(scenario())
    assert stage.flips("a").count("up") == 2
    return stage.gate.failures[FailureKind.REFUSED]


@played(Stage)
async def test_connects_that_are_never_answered_move_on_once_the_unit_is_found_out(stage: Stage) -> None:
    stage.world.net.blackhole(stage.engines["a"].address)
    for _ in range(5):
        visits = await stage.crowd(20)
        assert all(visit.is_answered for visit in visits)
        assert all(visit.reply.ttft_s < PROMISE_S for visit in visits)
        await asyncio.sleep(3.0)
    assert stage.verdict("a") is Verdict.DOWN
    assert all(visit.reply.ttft_s < 1.0 for visit in visits)
    stage.world.net.heal()
    await stage.until(stage.all_up, BACK_S)
    assert stage.flips("a") == ["up", "suspect", "down", "probation", "up"]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EADDRNOTAVAIL])
@played(Stage)
async def test_what_the_gate_itself_runs_out_of_is_not_held_against_units(stage: Stage, code: int) -> None:
    net = stage.world.net
    if code == errno.EMFILE:
        net.exhaust_files("gate")
    else:
        net.fail_connects("a", code)
        net.fail_connects("b", code)
    # So long that no connection gets free while the others wait for the gate.
    visits = await stage.crowd(20, max_tokens=200)
    refused = [visit for visit in visits if not visit.is_answered]
    assert refused
    assert all((visit.reply.status, visit.code) == (503, "no_resources") for visit in refused)
    await asyncio.sleep(20.0)
    net.heal()
    assert all(visit.is_answered for visit in await stage.crowd(20))
    assert stage.flips("a") == stage.flips("b") == ["up"]


@pytest.mark.parametrize("units", [1, 2])
@played(Stage, given=("units",))
async def test_who_has_no_other_unit_waits_a_moment_for_the_gate(stage: Stage, units: int) -> None:
    net = stage.world.net
    if units == 2:
        stage.engines["b"].die()
        await stage.until(lambda: stage.verdict("b") is Verdict.DOWN, PROMISE_S)
    net.exhaust_files("gate")
    crowd = stage.crowd(20, stream=True)
    await asyncio.sleep(0.2)
    net.heal()
    assert all(visit.is_answered for visit in await crowd)
    assert stage.flips("a") == ["up"]


@played(Stage, units=1)
async def test_nobody_waits_for_the_gate_for_long(stage: Stage) -> None:
    waited_s = []

    async def ask() -> None:
        asked_at = stage.now
        visit = await stage.ask(max_tokens=200)
        if not visit.is_answered:
            assert visit.code == "no_resources"
            waited_s.append(stage.now - asked_at)

    stage.world.net.exhaust_files("gate")
    await asyncio.gather(*(ask() for _ in range(20)))
    assert waited_s
    assert max(waited_s) < stage.gate.board.rules.attempts * TICK_S


@played(Stage)
async def test_a_resolver_that_fails_is_not_held_against_the_unit(stage: Stage) -> None:
    for name in ("a", "b"):
        stage.world.net.fail_resolver(name)
    await asyncio.sleep(10.0)
    for _ in range(10):
        refused = [visit for visit in await stage.crowd(20) if not visit.is_answered]
        assert all((visit.reply.status, visit.code) == (503, "no_resources") for visit in refused)
        await asyncio.sleep(3.0)
    assert refused
    assert stage.flips("a") == stage.flips("b") == ["up"]


@played(Stage)
async def test_a_unit_whose_name_alone_is_not_found_is_suspect_and_never_more(stage: Stage) -> None:
    """Neither is it a fault of its engine that a restart could heal."""
    stage.world.net.fail_resolver("a")
    for _ in range(20):
        assert all(visit.is_answered for visit in await stage.crowd(20))
        await asyncio.sleep(3.0)
    assert stage.flips("a") == ["up", "suspect"]
    assert "DNS does not find a " in stage.told("flip")[-1]["reason"]
    stage.world.net.heal()
    await asyncio.sleep(5.0)
    assert stage.flips("a") == ["up", "suspect", "up"]
    assert stage.flips("b") == ["up"]


@played(Stage, units=1)
async def test_a_kept_connection_that_closes_under_a_request_is_tried_once_more_for_free(
    stage: Stage,
) -> None:
    net, engine = stage.world.net, stage.engines["a"]
    await stage.crowd(8)
    await asyncio.sleep(EARLY_S)
    # The end of the connections travels for 50 ms; the requests are on their way before it arrives.
    net.set_link(engine.address, Link((0.05, 0.05), split=0.0, hiccup=0.0))
    for transport in list(net.transports):
        if transport.sock.local == (engine.host, PORT):
            transport.close()
    assert all(visit.is_answered for visit in await stage.crowd(8))
    assert stage.gate.failures == {FailureKind.STALE_CONNECTION: 8}
    # Those that met the connection of a probe, which had hardly been idle, had to wait for a canary.
    assert stage.gate.outcomes.keys() <= {Outcome.OK, Outcome.EVICTED}
    assert stage.gate.outcomes[Outcome.OK] == 16 > 2 * stage.gate.outcomes[Outcome.EVICTED]
    assert stage.flips("a") == ["up"]


@played(Stage, units=1)
async def test_connections_that_all_close_out_of_turn_let_nothing_through_until_a_canary_has_passed(
    stage: Stage,
) -> None:
    """The process behind them may have been replaced."""
    engine = stage.engines["a"]
    await stage.crowd(8)
    before, closed_at = len(engine.canaries), stage.now
    for transport in list(stage.world.net.transports):
        if transport.sock.local == (engine.host, PORT):
            transport.close()
    await asyncio.sleep(0.01)
    assert stage.gate.board.units["a"].is_restart_suspected()
    assert all(visit.is_answered for visit in await stage.crowd(8))
    assert len(engine.canaries) > before
    assert min(stage.picks("a", closed_at)) > engine.canaries[before].arrived_s
    assert stage.flips("a") == ["up"]


# -- the gate's own faults ---------------------------------------------------------------------------------


@played(Stage, units=1)
async def test_a_defect_of_the_gate_s_own_is_loud_and_not_held_against_the_unit(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_token, calls = Response.on_token, count(1)

    def defective(response: Response, chunk: bytes) -> None:
        if next(calls) == 3:
            raise LookupError("a defect")
        on_token(response, chunk)

    monkeypatch.setattr(Response, "on_token", defective)
    visit = await stage.ask()
    assert visit.code == "internal"
    (problem,) = stage.world.loop.problems
    assert isinstance(problem["exception"], LookupError)
    stage.world.loop.forgive()
    assert (await stage.ask()).is_answered
    assert stage.flips("a") == ["up"]


@played(Stage, units=1)
async def test_requests_on_kept_connections_whose_packets_vanish_are_asked_again_on_new_ones(
    stage: Stage,
) -> None:
    """New connections work, and so does the unit: nothing but the request itself shows it."""
    engine, net = stage.engines["a"], stage.world.net
    assert all(visit.is_answered for visit in await stage.crowd(4))
    kept = {transport.sock.remote for transport in net._at(engine.address)}
    for host, port in kept:
        net.partition(f"{host}:{port}", engine.address)
    visits = await stage.crowd(8, max_tokens=400)
    assert all(visit.is_answered for visit in visits)
    assert sum(visit.reply.ttft_s > 2.0 for visit in visits) >= 1, "some were on kept connections"
    assert all(visit.reply.ttft_s < 6.0 for visit in visits)
    assert "down" not in stage.flips("a")
