"""Signals for autoscalers, of each pool of units: how full it is, who waits, and what one unit more or fewer
would change (demand.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

from prometheus_client import Metric

from cellgate.extras.scaling.demand import (
    AnsweredRequest,
    Valued,
    Waits,
    demand_of,
    desired_units,
    least_valued,
    saturation,
    waits_in_parts,
)
from cellgate.proxy.control.last_requests import LastRequests
from cellgate.proxy.observe.families import gauge
from cellgate.router.board import Board
from cellgate.router.queue import Queue
from cellgate.router.unit_state import UnitState

SCALING_LOOK_S, SCALING_LOOK_OF_MANY_S = 10.0, 60.0
"""How often each pool is computed, and in a large fleet; a part of one in a tick."""
PREFILL = "prefill"


class PoolUnits(NamedTuple):
    """The units of one pool that answer requests and are not drained, and those of them that are usable."""

    name: str
    all: list[UnitState]
    usable: list[UnitState]

    @property
    def models(self) -> list[str]:
        return sorted({model for state in self.all for model in state.base_models()})


class Scaling:
    """The signals of one gate; `lately` has the last requests."""

    def __init__(self, board: Board, queue: Queue, lately: LastRequests) -> None:
        self._lately = lately
        self._board = board
        self._queue = queue
        self._waits: dict[str, tuple[int, Waits]] = {}
        """By pool: with how many usable units they were computed."""
        self._due: list[PoolUnits] = []
        self._replaying: Iterator[None] = iter(())
        self._look_at = 0.0

    def tick(self, now: float) -> None:
        """Compute the pools that are due: a part of one in each tick."""
        if now >= self._look_at:
            is_large = self._board.attention.is_large
            self._look_at = now + (SCALING_LOOK_OF_MANY_S if is_large else SCALING_LOOK_S)
            self._due = self.pools()
            self._waits = {
                pool.name: self._waits[pool.name] for pool in self._due if pool.name in self._waits
            }
        elif next(self._replaying, self) is self and self._due:
            self._replaying = self._replay(self._due.pop(), now)

    def _replay(self, pool: PoolUnits, now: float) -> Iterator[None]:
        """Compute the waits of a pool, one replay at a time: all of them hold the loop for 13 ms."""
        demand, found = demand_of(self._requests(), pool.usable, now), Waits()
        yield
        for each in waits_in_parts(demand):
            found = each
            yield
        self._waits[pool.name] = len(pool.usable), found

    def _requests(self) -> Iterator[AnsweredRequest]:
        waited_s = dict(self._lately.waited)
        for opened_at, first_at, ended_at, tokens, unit in self._lately.answered:
            wait_s = waited_s.get((unit, opened_at), 0.0)
            yield AnsweredRequest(opened_at, first_at, ended_at, tokens, unit, wait_s)

    def _waits_of(self, pool: PoolUnits) -> Waits:
        """The waits of a pool. With another number of units than they were computed with, only how long
        requests wait now is known.
        """
        units, found = self._waits.get(pool.name, (0, Waits()))
        return found if units == len(pool.usable) else Waits(now=found.now)

    def pools(self, model: str | None = None) -> list[PoolUnits]:
        """All pools; with a model, that of its requests."""
        board = self._board
        groups: dict[str, list[UnitState]] = {}
        for name, state in board.units.items():
            if not state.drained and state.unit.role != PREFILL:
                groups.setdefault(board.pools.of_unit(name), []).append(state)
        wanted = board.pools.of(model) if model is not None else None
        return [
            PoolUnits(name, states, [state for state in states if state.is_usable()])
            for name, states in groups.items()
            if wanted is None or name == wanted
        ]

    async def view(self, goal_s: float, model: str | None = None) -> dict[str, Any]:
        """For JSON. `goal_s`: the 90th percentile of waits to stay below. The loop turns between pools."""
        pools = []
        for pool in self.pools(model):
            pools.append(self._pool_view(pool, goal_s))
            await asyncio.sleep(0)
        return {"desired_units": sum(pool["desired_units"] for pool in pools), "pools": pools}

    def collect(self) -> Iterator[Metric]:
        """All families. The label is the first model of a pool; empty where none is known."""
        pools = [(next(iter(pool.models), ""), pool) for pool in self.pools()]
        yield gauge(
            "scaling_saturation",
            "Share of the seats in use, or of the time in which prompts are computed, whichever is more.",
            "model",
            ((model, saturation(pool.usable)) for model, pool in pools),
        )
        yield gauge(
            "scaling_wait_p90_seconds",
            "90th percentile of the time to a first token, with one unit fewer, as many as now, one more.",
            ("model", "units"),
            (
                ((model, units), wait_s)
                for model, pool in pools
                for units, wait_s in self._waits_of(pool)._asdict().items()
                if wait_s is not None
            ),
        )

    def _pool_view(self, pool: PoolUnits, goal_s: float) -> dict[str, Any]:
        found = self._waits_of(pool)
        least, saturated = least_valued(pool.all), saturation(pool.usable)
        return {
            "models": pool.models,
            "units": len(pool.all),
            "usable": len(pool.usable),
            "waiting": len(self._queue.pool(pool.name).entries),
            "queue_s": round(self._queue_s(pool), 3),
            "saturation": round(saturated, 3),
            "wait_p90_s": {units: _rounded(wait_s) for units, wait_s in found._asdict().items()},
            "desired_units": desired_units(found, len(pool.usable), len(pool.all), goal_s, saturated),
            "least_valued": None if least is None else _valued(least),
        }

    def _queue_s(self, pool: PoolUnits) -> float:
        fair = self._queue.pool(pool.name).fair_queue
        return fair.drain_s(self._board.tokens_s(pool.name)) if len(fair) else 0.0


def _valued(least: Valued) -> dict[str, Any]:
    return {"unit": least.unit, "value_s": _rounded(least.value_s)}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
