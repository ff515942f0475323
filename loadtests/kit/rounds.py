"""One unit is hurt, found out, and healed; and what came of every request meanwhile.

What must stay true: all times come from outside the unit. DOWN and UP are the gate's events, by the wall
clock; waits are those of clients.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from loadtests.kit.gate import GateProcess
from loadtests.kit.questions import Answer, End
from loadtests.kit.sent import Sent
from loadtests.kit.waiting import until

MUST_NOT = (End.UNANSWERED, End.CUT_SILENTLY, End.HUNG, End.WRONG)
FIND_PATIENCE_S = 20.0
HEAL_PATIENCE_S = 60.0
LINGER_S = 2.0
"""How long a unit stays hurt once it is DOWN: it must not come back, and who waited must have been served."""

_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Moments:
    """One round as it passed. `fault_at` is of `time.monotonic`; all else is in seconds after the fault, but
    `up_s`: after the unit was whole again. None: never. `trouble`: what the gate must not have done;
    `story`: the unit's flips, each with its time after the fault.
    """

    fault_at: float
    down_s: float | None
    last_sent_s: float
    up_s: float | None
    is_healed: bool
    trouble: list[str]
    story: list[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One round, accounted for. `waited_s`: the longest wait beyond DOWN of a request that had shown no token
    then; `broken` streams are those that ended in an error event; `bad` says what must not be.
    """

    down_s: float | None
    last_sent_s: float | None
    without_token: int
    waited_s: float
    broken: int
    up_s: float | None
    bad: list[str]
    story: list[str]


async def hurt_and_heal(
    gate: GateProcess, unit: str, sent: Sent, hurt: Callable[[], object], heal: Callable[[], object] | None
) -> Moments:
    """Do it, and look on until the unit is UP again or patience ends. What cannot be healed is left DOWN."""
    fault_at, fault_time = time.monotonic(), time.time()
    await asyncio.to_thread(hurt)
    down = await _flipped(gate, unit, "down", fault_time, FIND_PATIENCE_S)
    await asyncio.sleep(LINGER_S)
    last_sent_s, before_heal = sent.last_at - fault_at, time.time()
    up_s: float | None = None
    if heal is not None:
        await asyncio.to_thread(heal)
        healed = time.time()
        up = await _flipped(gate, unit, "up", before_heal, HEAL_PATIENCE_S)
        up_s = None if up is None else max(0.0, up - healed)
    flips = await asyncio.to_thread(gate.flips, fault_time)
    return Moments(
        fault_at=fault_at,
        down_s=None if down is None else down - fault_time,
        last_sent_s=last_sent_s,
        up_s=up_s,
        is_healed=heal is not None,
        trouble=_trouble(flips, unit, before_heal),
        story=[f"{f['at'] - fault_time:.2f} s {f['line']}" for f in flips if f["unit"] == unit],
    )


async def _flipped(gate: GateProcess, unit: str, after: str, since: float, patience_s: float) -> float | None:
    return await until(lambda: gate.flipped(unit, after, since), patience_s, _LOOK_S)


def _trouble(flips: Sequence[Mapping[str, Any]], unit: str, before_heal: float) -> list[str]:
    """Flips that must not be: a healthy unit shot, a hurt one trusted again."""
    wrong = [f for f in flips if f["unit"] != unit and f["after"] == "down"]
    down_at = next((f["at"] for f in flips if f["unit"] == unit and f["after"] == "down"), before_heal)
    wrong += [
        f for f in flips if f["unit"] == unit and f["after"] == "up" and down_at < f["at"] < before_heal
    ]
    return [f"must not have been: {flip['line']}" for flip in wrong]


def account(moments: Sequence[Moments], answers: Iterable[Answer]) -> list[Outcome]:
    """Each round with the answers that its fault met; all of them must have ended by now."""
    answers = list(answers)
    begins = [0.0, *(each.fault_at for each in moments[1:])]
    return [
        _outcome(each, [a for a in answers if begin < a.ended_at <= end])
        for each, begin, end in zip(moments, begins, [*begins[1:], float("inf")], strict=True)
    ]


def _outcome(moments: Moments, answers: Sequence[Answer]) -> Outcome:
    bad = list(moments.trouble)
    down_at = moments.fault_at + (moments.down_s or 0.0)
    late = [answer for answer in answers if answer.sent_at > down_at]
    bad += [f"sent after detection: {answer.why()}" for answer in late if answer.end() is not End.WHOLE]
    bad += [a.why() for a in answers if a.end() in MUST_NOT and a.sent_at <= down_at]
    if moments.down_s is None:
        bad.append("the unit never came to be DOWN")
    if moments.is_healed and moments.up_s is None:
        bad.append("healed, the unit never came to be UP")
    waits_s = _waits_s(down_at, answers)
    return Outcome(
        down_s=moments.down_s,
        last_sent_s=moments.last_sent_s if answers else None,
        without_token=len(waits_s),
        waited_s=max(waits_s, default=0.0),
        broken=sum(answer.end() is End.BROKEN for answer in answers),
        up_s=moments.up_s,
        bad=bad,
        story=moments.story,
    )


def _waits_s(down_at: float, answers: Iterable[Answer]) -> list[float]:
    """How long each request that had shown no token when the unit came to be DOWN waited on for one."""
    shown = [(answer.sent_at, answer.first_at or answer.ended_at) for answer in answers]
    return [at - down_at for sent_at, at in shown if sent_at < down_at < at]


def seconds(values: Sequence[float | None]) -> str:
    """The median and the worst of some rounds' figures, for people."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"never in {len(values) - len(known)}"
    return f"{median(known):.2f} / {max(known):.2f}" if known else "-"
