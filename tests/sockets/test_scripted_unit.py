"""The unit of the tests themselves: whatever it accepts is closed with it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.wire.stage import live
from tests.wire.unit import STREAM, ScriptedUnit, listening


@pytest.mark.parametrize("turns", range(5))
@live
async def test_who_connects_at_the_last_moment_is_let_go_as_well(turns: int) -> None:
    unit = ScriptedUnit(STREAM)
    async with listening(unit):
        # Of this the loop knows nothing yet: it accepts in a turn, and tells in the next.
        stranger = socket.create_connection(("127.0.0.1", unit.port))
        for _ in range(turns):
            await asyncio.sleep(0)
    stranger.close()
