"""Units that answer fast and wrong: a load of good and of bad requests, and what came of it."""

from __future__ import annotations

import asyncio
from typing import Any

from cellgate.router.nouns import Verdict
from tests.scenarios.harness import Stage
from tests.scenarios.visit import Visit
from tests.sim.behaviour import Behaviour
from tests.sim.client import Manner

CLIENTS = 6
FIRST_S, LATER_S = 20.0, 10.0
OUT_S = BACK_S = 5.0
PATIENCE_S = 2.5
"""A client gives up on an answer after this: then it was not served."""


def is_served(visit: Visit) -> bool:
    """Whether the answer is the one that any healthy unit gives."""
    return visit.is_answered and visit.dishonesty() is None


class Load:
    """Closed-loop clients, each with one request at a time; what they got, by when they asked."""

    def __init__(self, stage: Stage, clients: int = CLIENTS, **fields: Any) -> None:
        self.stage = stage
        self.visits: list[tuple[float, Visit]] = []
        self._fields = fields
        self._goes_on = True
        self._clients = [asyncio.ensure_future(self._use()) for _ in range(clients)]

    async def _use(self) -> None:
        while self._goes_on:
            begun = self.stage.now
            patient = Manner(timeout_s=PATIENCE_S)
            visit = await self.stage.ask(**{"max_tokens": 8, "manner": patient, **self._fields})
            self.visits.append((begun, visit))
            if not is_served(visit):
                # As SDKs do: they wait a moment before they ask again.
                await asyncio.sleep(0.05)

    async def end(self) -> None:
        """No more requests; those that are open are awaited."""
        self._goes_on = False
        await asyncio.gather(*self._clients)

    def share(self, since: float, until: float) -> float:
        """The share of the requests of that time that were served."""
        found = [is_served(visit) for at, visit in self.visits if since <= at < until]
        assert found
        return sum(found) / len(found)


def hurt(stage: Stage, names: str, kind: str, *, spares_canaries: bool = True) -> None:
    """These units answer with nonsense from now on."""
    stage.liars.update(names)
    for name in names:
        stage.engines[name].behaviour = Behaviour(answers=kind, spares_canaries=spares_canaries)


def mend(stage: Stage, names: str) -> None:
    for name in names:
        stage.engines[name].behaviour = Behaviour()


def reasons(stage: Stage, name: str) -> list[str]:
    """Why a unit went down, each time."""
    return [
        e["reason"] for e in stage.gate.events.last() if e.get("unit") == name and e.get("after") == "down"
    ]


def are_out(stage: Stage, names: str) -> list[str]:
    """Which of these units are out. Of several, some may get no requests that they could refuse."""
    return [name for name in names if stage.verdict(name) is Verdict.DOWN]


def are_up(stage: Stage, names: str) -> bool:
    return all(stage.verdict(name) is Verdict.UP for name in names)
