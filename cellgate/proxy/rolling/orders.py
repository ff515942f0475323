"""What an operator asks of a roll: start, pause, resume, stop, undo. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import orjson

from cellgate.proxy.config.roll_policy import RollPolicy
from cellgate.proxy.rolling.nouns import ACTIVE, Phase, Roll, RollStatus, UnitRoll
from cellgate.proxy.rolling.roll_planner import undone

Verb = Literal["start", "pause", "resume", "stop", "undo"]
VERBS: tuple[Verb, ...] = get_args(Verb)


_NOT_BACK = (*ACTIVE, Phase.FAILED)
_BY_HAND = (
    "groups of a set go back from the highest down only; give the set its old image by hand, then undrain"
)


class OrderError(Exception):
    """It cannot be done now; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Order:
    """To start: `cells` in this order (none: all), and the `version` that each unit must say that it is. `id`
    tells an order from the same one asked again.
    """

    verb: Verb
    by: str
    cells: tuple[str, ...] = ()
    version: str = ""
    dry_run: bool = False
    id: str = ""


def order_document(order: Order) -> bytes:
    """For those who conduct."""
    return orjson.dumps(order)


def read_order(text: bytes) -> Order:
    """The order in a document. Raises ValueError."""
    try:
        found = orjson.loads(text)
        order = Order(**{**found, "cells": tuple(map(str, found.get("cells", ())))})
    except (TypeError, AttributeError) as error:
        raise ValueError(f"no order: {error!r}") from error
    if order.verb not in VERBS:
        raise ValueError(f"no order: {order.verb!r}")
    return order


def why_not_now(
    order: Order,
    roll: Roll | None,
    policy: RollPolicy,
    known: Sequence[tuple[str, str]],
    failed: Collection[UnitRoll],
) -> str:
    """Why an order cannot be carried out; empty: it can. `known`: the units and their cells; `failed`: those
    that failed in the roll and are still out.
    """
    is_on = roll is not None and not roll.is_over()
    cells = {cell for _, cell in known}
    if order.verb == "start":
        if is_on:
            return "a roll is under way: wait for it, or stop it first (cellgate roll stop)"
        if unknown := [cell for cell in order.cells if cell not in cells]:
            return f"there is no cell {unknown[0]!r}; the cells are: {', '.join(sorted(cells))}"
        if policy.highest_first and failed:
            first = min(each.unit for each in failed)
            return f"unit {first} failed in the last roll and is still out: {_BY_HAND}"
        return "" if known else "there are no units"
    if roll is None:
        return "there is no roll: start one (cellgate roll start)"
    if order.verb == "undo":
        if policy.highest_first and (left := [each for each in roll.units if each.phase in _NOT_BACK]):
            return f"unit {left[0].unit} is {left[0].phase.value}: {_BY_HAND}"
        return "" if any(not each.back and each.since_ms for each in roll.units) else "nothing was rolled yet"
    if roll.status in (RollStatus.DONE, RollStatus.STOPPED):
        return f"the roll is {roll.status.value}"
    return ""


def carried_out(
    order: Order,
    roll: Roll | None,
    policy: RollPolicy,
    known: Sequence[tuple[str, str]],
    failed: Collection[UnitRoll],
    roll_id: str,
    now_ms: int,
) -> Roll:
    """The roll after an order. Raises OrderError."""
    if why := why_not_now(order, roll, policy, known, failed):
        raise OrderError(why)
    if order.verb == "start":
        units = _started(order, known, failed, now_ms)
        return Roll(
            roll_id, order.by, now_ms, units, version=order.version, dry_run=order.dry_run, order=order.id
        )
    roll = replace(cast(Roll, roll), order=order.id)
    match order.verb:
        case "pause":
            return replace(roll, status=RollStatus.PAUSED, reason=f"paused by {order.by}")
        case "resume":
            return replace(roll, status=RollStatus.RUNNING, reason="")
        case "stop":
            return replace(roll, status=RollStatus.STOPPED, reason=f"stopped by {order.by}")
    return undone(roll, policy, now_ms)


def _started(
    order: Order, known: Sequence[tuple[str, str]], failed: Collection[UnitRoll], now_ms: int
) -> tuple[UnitRoll, ...]:
    """The units of a new roll. One that failed in the last roll gets no requests by the start of this one: it
    is begun at once, and stays out where it is not rolled.
    """
    cells = order.cells or tuple(dict.fromkeys(cell for _, cell in known))
    rolled = [(unit, cell) for wanted in cells for unit, cell in known if cell == wanted]
    out = {each.unit: each for each in failed}
    if order.dry_run:
        rolled = [(unit, cell) for unit, cell in rolled if unit not in out]
    units = [
        UnitRoll(unit, cell, Phase.DRAINING, now_ms, was_drained=out.pop(unit).was_drained)
        if unit in out
        else UnitRoll(unit, cell)
        for unit, cell in rolled
    ]
    return *units, *out.values()
