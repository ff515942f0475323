"""One try of one abuse: a control before, the abuse, what is left of it, a control after."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from loadtests.abuse import usage
from loadtests.abuse.neighbour import PER_S, Neighbour, p99_wait_s, worst_wait_s
from loadtests.abuse.nouns import Abuse, Got
from loadtests.abuse.stage import SIM, Stage
from loadtests.abuse.verdict import MEMORY_LIMIT_MB, Try

if TYPE_CHECKING:
    from loadtests.kit.gate import GateProcess

CONTROL_FOR_S = 1.5
CALM_S = 0.05
CALM_TRIES = 4
"""A machine that others keep busy is looked at so often, for a moment in which a neighbour waits for less."""
LINGER_S = 0.5
"""What an abuse has put off counts as well: the neighbour is looked at for so much longer, at least."""
SETTLE_S = 6.0
"""In which memory must come back."""
ABUSER_NICE = 10
ACT_LIMIT_S = 90.0
"""An abuse that is not through by then is given up; its client hung."""


async def attempt(stage: Stage, abuse: Abuse) -> Try:
    """Do it once, on a gate that is well."""
    await stage.ready(abuse.surroundings)
    pid, neighbour = stage.place.gate.pid, stage.neighbour
    for _ in range(CALM_TRIES):
        begin_at, begin_cpu_s = time.monotonic(), usage.cpu_s(pid)
        await asyncio.sleep(CONTROL_FOR_S)
        if worst_wait_s(await neighbour.between(begin_at, time.monotonic())) <= CALM_S:
            break
    before_mb = usage.resident_mb(pid)
    act_at, act_cpu_s, act_queued_s = time.monotonic(), usage.cpu_s(pid), usage.queued_s(pid)
    idle_share = (act_cpu_s - begin_cpu_s) / (act_at - begin_at)
    with usage.Peak(pid) as peak:
        got = await _act(stage, abuse)
        acted_at = time.monotonic()
        await asyncio.sleep(LINGER_S)
        over_at, queued_s = time.monotonic(), usage.queued_s(pid) - act_queued_s
        asked = await neighbour.between(act_at, over_at)
        after_mb = await _settled_mb(pid, before_mb)
    settled_at = time.monotonic()
    cpu_s = usage.cpu_s(pid) - act_cpu_s - idle_share * (settled_at - act_at)
    await asyncio.sleep(CONTROL_FOR_S)
    ended_at = time.monotonic()
    control = await neighbour.between(begin_at, act_at) + await neighbour.between(settled_at, ended_at)
    late_s = max((each.late_s for each in asked), default=0.0)
    missing = max(0, int((over_at - act_at) * PER_S) - 1 - len(asked))
    return Try(
        abuse=abuse,
        got=got,
        cpu_s=max(0.0, cpu_s),
        wait_s=worst_wait_s(asked),
        p99_s=p99_wait_s(asked),
        undisturbed_p99_s=p99_wait_s(control),
        control_s=max(late_s, worst_wait_s(control)),
        late_s=late_s,
        queued_s=queued_s,
        lost=missing + sum(each.status != 200 for each in asked),
        before_mb=before_mb,
        peak_mb=peak.most_mb,
        after_mb=after_mb,
        took_s=acted_at - act_at,
    )


async def p99_without_gate_s(stage: Stage, abuse: Abuse) -> float:
    """The p99 of a neighbour's TTFT at a unit that is attacked in the place of the gate: what is no better
    there is not the gate's doing.
    """
    unit = stage.place.units[0]
    neighbour = await Neighbour.start(unit.port, SIM)
    try:
        await asyncio.sleep(CONTROL_FOR_S)
        since = time.monotonic()
        with _stepping_back():
            await asyncio.wait_for(
                abuse.act(replace(stage.place, gate=cast("GateProcess", unit))), ACT_LIMIT_S
            )
        return p99_wait_s(await neighbour.between(since, time.monotonic()))
    finally:
        await neighbour.stop()


async def _act(stage: Stage, abuse: Abuse) -> Got:
    try:
        # Evil units live in this process: whose neighbour asks them would wait for the abuser's processor.
        beside_evil = abuse.surroundings.beside_evil
        with nullcontext() if beside_evil else _stepping_back():
            return await asyncio.wait_for(abuse.act(stage.place), ACT_LIMIT_S)
    except TimeoutError:
        return Counter({"hang": 1})
    except OSError as error:
        return Counter({f"refused: {error}": 1})


@contextmanager
def _stepping_back() -> Iterator[None]:
    """Abusers have machines of their own: the work of sending is not to take the gate's processor, as far as
    the system lets it be given back afterwards.
    """
    if os.geteuid() != 0:
        yield
        return
    thread, usual = threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, thread, usual + ABUSER_NICE)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, thread, usual)


async def _settled_mb(pid: int, before_mb: float) -> float:
    """Memory once it is back, or when time is up."""
    give_up_at = time.monotonic() + SETTLE_S
    while True:
        now_mb = usage.resident_mb(pid)
        if now_mb - before_mb <= MEMORY_LIMIT_MB or time.monotonic() > give_up_at:
            return now_mb
        await asyncio.sleep(0.1)
