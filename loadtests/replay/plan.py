"""Which cells of the gym the replay runs when nobody names any, and which it can run at all."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loadtests.gym.cells import Cell, rate_of
from loadtests.gym.fleets import FLEETS
from loadtests.gym.loads import LOADS, missing
from loadtests.gym.loads_traces import Mooncake
from loadtests.gym.nouns import Fleet, Request
from loadtests.gym.plan import ISSUE
from loadtests.replay.client import bodies_of
from loadtests.replay.plays import Play

MODEL_NAMES = frozenset({"m"})


class Timed(NamedTuple):
    """A cell, and how many times as fast as in the world time runs: sparse loads take too long otherwise."""

    cell: Cell
    speed_up: float = 1.0


CELLS = (
    Timed(ISSUE),
    Timed(Cell("rag", "slow_unit", 0.5), 4.0),
    Timed(Cell("bursts", "equal", 0.5)),
    Timed(Cell("zipf", "equal", 0.8)),
    Timed(ISSUE._replace(utilisation=-8.0)),
    Timed(Cell("mooncake", "equal", 0.8), 5.0),
    Timed(Cell("agents", "equal", 0.8), 4.0),
)
"""The commonest chat load, and those beside it that have once been worse through the gate, or much better."""


class PlanError(Exception):
    """A cell that cannot be replayed; says why."""


def plays(timed: Timed, *, seeds: int, span_s: float, trace: Path, gate: dict[str, Any]) -> Iterator[Play]:
    """A cell as it is replayed, once for each seed: as many requests as come in `span_s` real seconds.
    Raises PlanError, DatasetError.
    """
    cell = timed.cell
    LOADS["mooncake"] = Mooncake(trace)
    if why := missing(cell.load) or _unfit(FLEETS[cell.fleet]):
        raise PlanError(f"{cell}: {why}")
    rate = rate_of(cell)
    for seed in range(1, seeds + 1):
        rng = random.Random(f"{cell.load} {seed}")
        requests = LOADS[cell.load].make(rng, rate, max(int(rate * span_s * timed.speed_up), 1))
        if why := asks_for_more(requests):
            raise PlanError(f"{cell}: {why}")
        yield Play(
            f"{cell}, {rate:.3g}/s",
            cell.fleet,
            seed,
            requests,
            bodies_of(requests),
            timed.speed_up,
            gate=gate,
        )


def _unfit(fleet: Fleet) -> str:
    """Why a fleet cannot be replayed; empty when it can."""
    if len(fleet.cells) > 1 or fleet.gates > 1 or fleet.changes:
        return "a fleet of several cells or gates, or one that changes, is for the gym alone"
    if any(place.unit.models or place.unit.weight != 1.0 for place in fleet.places):
        return "units with models or weights of their own are for the gym alone"
    return ""


def asks_for_more(requests: Sequence[Request]) -> str:
    """Why a load cannot be replayed; empty when it can."""
    if any(each.tenant or each.priority or each.model not in MODEL_NAMES for each in requests):
        return "tenants, priorities and several models are for the gym alone"
    if any(each.deadline_s < float("inf") for each in requests):
        return "deadlines are for the gym alone"
    return ""
