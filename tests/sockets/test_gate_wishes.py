"""Header lines that say how a request is to be routed, from the socket to the router and on to the unit."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from cellgate.router.nouns import Ask, Refusal
from cellgate.router.unit_state import Lease
from tests.wire.client import chat
from tests.wire.stage import Stage, live, stage
from tests.wire.unit import STREAM

WISHES = {
    "x-session-id": "s-1",
    "x-gateway-inference-fairness-id": "team",
    "x-priority": "-3",
    "x-slo-ttft-ms": "60000",
}


@live
async def test_they_reach_the_router_and_cross_to_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage(STREAM) as here, here.client() as client:
        asks = _noted(here, monkeypatch)
        head = "".join(f"{name.title()}: {value}\r\n" for name, value in WISHES.items())
        assert (await client.ask(chat(head=head))).status == 200
        (ask,) = asks
        assert (ask.session, ask.tenant, ask.priority) == ("s-1", "team", -3)
        assert 59.0 < ask.deadline_at - here.gateway.now() <= 60.0
        (received,) = here.unit.requests
        assert {name: received.get(name) for name in WISHES} == WISHES


@live
async def test_credentials_tell_whose_a_request_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage(STREAM) as here, here.client() as client:
        asks = _noted(here, monkeypatch)
        for key in ("a", "b", "a"):
            await client.ask(chat(head=f"Authorization: Bearer {key}\r\n"))
        one, other, same = (ask.tenant for ask in asks)
        assert one == same != other
        crossed = [received.get("authorization") for received in here.unit.requests]
        assert crossed == ["Bearer a", "Bearer b", "Bearer a"]


@live
async def test_one_that_makes_no_sense_is_named_and_reaches_no_unit() -> None:
    async with stage(STREAM) as here, here.client() as client:
        reply = await client.ask(chat(head="x-slo-ttft-ms: soon\r\n"))
        error = orjson.loads(reply.body)["error"]
        assert (reply.status, error["param"], here.received) == (400, "x-slo-ttft-ms", 0)
        assert error["message"] == "x-slo-ttft-ms: expected milliseconds above 0, found 'soon'"


def _noted(here: Stage, monkeypatch: pytest.MonkeyPatch) -> list[Ask]:
    """The asks that the router gets from now on."""
    asks: list[Ask] = []
    pick = here.plane.router.pick

    def noting(ask: Ask, *args: Any, **kwargs: Any) -> Lease | Refusal:
        asks.append(ask)
        return pick(ask, *args, **kwargs)

    monkeypatch.setattr(here.plane.router, "pick", noting)
    return asks
