"""A real Envoy with the project's configuration: it understands every report and every word about health."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellgate.router.nouns import Sign, Strength
from tests.real.asking import asked_on, post, steadily, until
from tests.real.envoy import Envoy, envoy
from tests.real.tiny_gate import TinyGate, listening
from tests.wire.stage import live

FORMATS = {"endpoint-load-metrics-bin": b"", "TEXT": b"text", "JSON": b"json"}


async def until_healthy(here: Envoy, count: int = 2) -> None:
    """Wait until so many gates are in rotation."""

    async def is_so() -> bool:
        return sum(host.healthy for host in (await here.hosts()).values()) == count

    await until(is_so)


@pytest.mark.parametrize("carrier", FORMATS)
@live
async def test_envoy_weighs_gates_by_their_reports(tmp_path: Path, carrier: str) -> None:
    """The one whose answers take twice as long gets half, while both are far from busy."""
    fast, slow = (TinyGate(answer_s, asks_for=FORMATS[carrier]) for answer_s in (0.15, 0.3))
    async with listening(fast, slow):
        with envoy(tmp_path, [fast.port, slow.port]) as here:
            await until_healthy(here)
            assert {host.weight for host in (await here.hosts()).values()} == {1}

            async def is_weighed() -> bool:
                hosts = await here.hosts()
                return 0.3 < hosts[slow.port].weight / hosts[fast.port].weight < 0.7

            async with asked_on(here.port, rps=30.0) as statuses:
                await until(is_weighed)
    assert statuses.keys() == {200}


@live
async def test_a_gate_whose_unit_is_suspected_comes_after_the_others_and_without_units_it_is_not_ready(
    tmp_path: Path,
) -> None:
    well, doubtful = TinyGate(), TinyGate()
    async with listening(well, doubtful):
        with envoy(tmp_path, [well.port, doubtful.port]) as here:
            await until_healthy(here)
            doubtful.tell(Sign.BAD)

            async def is_degraded() -> bool:
                return (await here.hosts())[doubtful.port].degraded

            await until(is_degraded)
            hosts = await here.hosts()
            assert hosts[doubtful.port].healthy
            assert not hosts[well.port].degraded
            statuses = await steadily(here.port, rps=250.0, seconds=2.0)
            assert set(statuses) == {200}
            # One healthy gate of two is 70 % healthy by Envoy's factor of 1.4; equal shares would be 50.
            # Envoy draws lots for each request: of 500 the standard deviation is 2 %.
            assert well.served / len(statuses) == pytest.approx(0.7, abs=0.1)
            doubtful.tell(Sign.BAD, Strength.FATAL)
            await until_healthy(here, 1)
            # Its units may be back in a moment: it counts among those that should be there.
            assert "excluded_via_immediate_hc_fail" not in (await here.hosts())[doubtful.port].status
            for _ in range(3):
                doubtful.tell(Sign.GOOD)
            await until_healthy(here)


@live
async def test_a_stopping_gate_is_left_with_its_next_answer_not_with_its_next_check(tmp_path: Path) -> None:
    staying, stopping = TinyGate(), TinyGate()
    async with listening(staying, stopping):
        with envoy(tmp_path, [staying.port, stopping.port]) as here:
            await until_healthy(here)
            stopping.stopping = True
            statuses = [await post(here.port) for _ in range(20)]
            last = stopping.served
            statuses += [await post(here.port) for _ in range(20)]
            host = (await here.hosts())[stopping.port]
    assert set(statuses) == {200}
    # A check may have come first. After the first answer or check nothing goes there any more.
    assert last <= 1
    assert stopping.served == last
    assert not host.healthy
    assert host.status["excluded_via_immediate_hc_fail"] is True
