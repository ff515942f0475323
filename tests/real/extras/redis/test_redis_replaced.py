"""Gates on a real Redis whose servers are replaced: a failover by Sentinels, moved slots, a lost node."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from cellgate.extras.redis.link import LinkState
from cellgate.router.nouns import Verdict
from loadtests.kit.waiting import until as waits_until
from tests.real.extras.redis.test_redis import Gate, faults, linked, until
from tests.real.redis_server import cluster, sentinels
from tests.wire.stage import live_for

LIMIT_S = 60.0
PATIENCE_S = 20.0
SECRET = "open-sesame"


def hears(*gates: Gate) -> bool:
    return all(gate.others() == 5 and gate.link.state is LinkState.WELL for gate in gates)


@pytest.mark.parametrize("sentinel_password", ["", SECRET])
@live_for(LIMIT_S)
async def test_gates_find_the_primary_that_sentinels_have_chosen(
    tmp_path: Path, sentinel_password: str
) -> None:
    with ExitStack() as stack:
        group = await asyncio.to_thread(
            sentinels, tmp_path, stack, password=SECRET, sentinel_password=sentinel_password
        )
        one, other = (Gate(name, group.url, password=SECRET) for name in ("g1", "g2"))
        async with linked(one, other):
            await until(lambda: hears(one, other), PATIENCE_S)
            group.primary.kill()
            await until(lambda: one.link.state is LinkState.AWAY)
            while not await asyncio.to_thread(group.failed_over):
                assert one.roster.units() == {"u1", "u2"}
                await asyncio.sleep(0.01)
            await until(lambda: hears(one, other), PATIENCE_S)
            one.flip(Verdict.DOWN)
            await until(lambda: other.flips[-1][1].report.verdict is Verdict.DOWN, PATIENCE_S)


@live_for(LIMIT_S)
async def test_moved_slots_of_a_cluster_disturb_nobody_and_a_lost_node_heals(tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = await asyncio.to_thread(cluster, tmp_path, stack)
        one, other = (Gate(name, nodes.url) for name in ("g1", "g2"))
        async with linked(one, other):
            await until(lambda: hears(one, other), PATIENCE_S)
            await asyncio.to_thread(nodes.move_slots, 500)
            one.flip(Verdict.DOWN)
            await until(lambda: other.flips[-1][1].report.verdict is Verdict.DOWN)
            assert hears(one, other)
            assert faults(one, other) == []
            node = nodes.nodes[1]
            node.kill()
            assert await waits_until(lambda: nodes.serves_without(node), PATIENCE_S)
            await until(lambda: hears(one, other), PATIENCE_S)
