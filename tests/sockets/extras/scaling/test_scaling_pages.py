"""Signals for autoscalers on the admin port, over real sockets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellgate.extras.scaling.pool_signals import Scaling
from cellgate.extras.scaling.scaling_pages import scaling_pages
from cellgate.proxy.control.last_requests import LastRequests
from cellgate.router.nouns import Sign, Strength
from tests.sockets.admin_stage import admin_port


def pages(plane: Any) -> Mapping[str, Any]:
    return scaling_pages(plane, Scaling(plane.board, plane.router.queue, LastRequests()))


async def test_a_scaler_reads_how_many_units_there_should_be() -> None:
    async with admin_port(pages=pages) as port:
        status, found = await port.get("/scaling?p90_s=1.5&model=tiny")
        assert status == 200
        assert found["desired_units"] == 2
        assert found["pools"][0]["units"] == 2
        for goal in ("0", "-1", "nan", "inf", "soon"):
            assert (await port.get(f"/scaling?p90_s={goal}"))[0] == 400


async def test_the_unit_that_is_missed_least_is_drained_and_never_the_last_one() -> None:
    async with admin_port(pages=pages) as port:
        for unit in ("a1", "a2"):
            port.observe(unit, Sign.GOOD, Strength.STRONG, "canary", "a token")
        port.board.units["a1"].costs.prefixes.record([1, 2, 3])
        status, unit = await port.post("/scaling/drain")
        assert (status, unit["name"], unit["drained"]) == (200, "a2", True)
        assert [event["kind"] for event in port.events.last()][-1] == "drain"
        status, said = await port.post("/scaling/drain?model=tiny")
        assert status == 409
        assert "no unit to spare" in said["error"]["message"]
