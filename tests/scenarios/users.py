"""Users who ask again as soon as they have been answered, as many as there are, until they leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from tests.scenarios.harness import Stage
from tests.scenarios.visit import Visit

REFUSED_S = 0.5
"""Who was refused asks again after so long."""


def streams(rng: Random) -> dict[str, Any]:
    """What an ordinary user asks for."""
    return {"prompt_tokens": rng.randrange(20, 400), "max_tokens": rng.randrange(8, 40)}


class Users:
    """`size` users; each asks for what `draw` says."""

    def __init__(self, stage: Stage, size: int, draw: Callable[[Random], dict[str, Any]] = streams) -> None:
        self.visits: list[Visit] = []
        self._stage = stage
        self._draw = draw
        self._are_here = True
        self._tasks = [asyncio.ensure_future(self._use()) for _ in range(size)]

    async def leave(self) -> None:
        """Ask nothing more, and wait for the answers that are on their way."""
        self._are_here = False
        await asyncio.gather(*self._tasks)

    async def _use(self) -> None:
        # They do not all come in the same instant.
        await asyncio.sleep(self._stage.rng.uniform(0.0, 0.5))
        while self._are_here:
            visit = await self._stage.ask(**self._draw(self._stage.rng))
            self.visits.append(visit)
            if not visit.is_answered:
                await asyncio.sleep(REFUSED_S)
