"""A router and the gates that it sends requests to."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from unittest.mock import Mock

from cellgate.extras.redis.fleet import FleetRouter
from cellgate.extras.redis.reports import Seen, UnitReport
from cellgate.extras.redis.roster import Roster
from cellgate.proxy.control.dispatcher import LocalDispatcher
from cellgate.proxy.discovery.base import Feed
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.request.body import read_ask
from cellgate.proxy.request.ports import PickRequest
from cellgate.router.nouns import Ask, Evidence, Fleet, Outcome, Sign, Strength, Verdict
from tests.unit.extras.redis.told import answered
from tests.wire.client import chat
from tests.wire.stage import stage
from tests.wire.unit import STREAM


async def test_a_request_that_comes_while_all_units_change_their_gate_waits_for_that() -> None:
    """A killed gate had them all, so that all are DOWN in one turn; another gate has told of them too."""
    async with stage(STREAM) as here, here.client() as client:
        plane, feed, roster = here.plane, Feed(), Roster("router")
        router = FleetRouter(plane, roster, feed)
        plane.on_flip.append(router.flipped)

        async def follow() -> None:
            async for found in feed.follow():
                plane.configure(Fleet(found.cells, found.units))

        following = asyncio.create_task(follow())
        reports = [
            UnitReport(
                unit, "c", "killed", Verdict.UP, f"http://{unit}", gate_url="http://[::1]:1", models=("tiny",)
            )
            for unit in ("u1", "u2")
        ]
        others = [replace(r, gate="other", gate_url=f"http://127.0.0.1:{here.unit.port}") for r in reports]
        answered(roster, {(r.unit, r.gate): Seen(r, 0.0) for r in reports}, plane.now())
        router.tick(plane.now())
        await here.until(lambda: len(plane.board.units) == 2 and all(s.is_usable() for s in plane.board))
        answered(roster, {(r.unit, r.gate): Seen(r, 0.0) for r in (*reports, *others)}, plane.now())
        ask = read_ask(b'{"model": "tiny", "messages": [], "stream": true}')
        assert isinstance(ask, Ask)
        waiter, dispatcher = Mock(), LocalDispatcher(plane)
        for unit in ("u1", "u2"):
            plane.prober.observe(
                Evidence(unit, Sign.BAD, Strength.FATAL, "request", "it refused", plane.now())
            )
        assert not isinstance(dispatcher.acquire(PickRequest(ask, 0), waiter), Failure)
        await here.until(lambda: waiter.on_result.called)
        (lease,) = waiter.on_result.call_args.args
        assert lease.unit_state.unit.url == others[0].gate_url
        dispatcher.released(lease, Outcome.OK)
        assert (await client.ask(chat())).status == 200
        following.cancel()
