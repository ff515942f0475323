"""A day of traffic with churn, in virtual time: users by day and few by night, faults, operators at work.

    .venv/bin/python -m tests.scenarios.day --seed 1

All that a calm plan promises holds (plans.py), and nothing grows: at quiet moments, with as many units as in
the beginning, a gate that ran all day keeps what it kept then.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

from tests.scenarios.day_acts import ACTS, LOOKED_AT_S, tidy
from tests.scenarios.day_sizes import Mark, grown, mark, table
from tests.scenarios.day_stage import DayStage
from tests.scenarios.harness import BACK_S, RULES
from tests.scenarios.plans import KINDS, STRIKES, wrong_with
from tests.scenarios.visit import Visit
from tests.sim.chaos import Chaos, Strike
from tests.sim.engine import Engine
from tests.sim.world import World

HOUR_S = 3600.0
USERS = 12
"""At noon; at midnight there is one."""
THINK_S = 25.0
QUIET_S = 300.0
"""Longer than anything is kept that nobody uses: connections (75 s), gates that are gone (240 beats)."""
FAULTS_S = (60.0, 240.0)
FIRST_S = 60.0
"""Of traffic before the first look: what is made once is made then."""
MARK_H = 2.0
"""Of traffic, from one quiet moment to the next; or half a shorter day."""


class Day:
    """One day, played. `wrong` is what must not be; `marks` are from the quiet moments, first to last."""

    def __init__(self, seed: int, hours: float, tell: Callable[[str], None] = lambda _line: None) -> None:
        self.rng = Random(seed)
        self.hours = hours
        self.stage = DayStage(seed, limit_s=(2.0 * hours + 2.0) * HOUR_S)
        self.counts: Counter[str] = Counter()
        self.dealt: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.marks: list[Mark] = []
        self._tell = tell
        self._is_open = False
        self._open_s = 0.0
        """Of traffic, before the part that is being played; that began at `_part_at`."""
        self._part_at = 0.0
        self.stage.play(self._scenario())
        self.wrong += grown(self.marks[len(self.marks) // 2], self.marks[-1])

    # -- the hours -----------------------------------------------------------------------------------------

    async def _scenario(self) -> None:
        parts = max(2, round(self.hours / MARK_H))
        await self._part(FIRST_S)
        for _ in range(parts):
            await self._take_stock()
            await self._part(self.hours * HOUR_S / parts)
        await self._take_stock()

    async def _part(self, seconds: float) -> None:
        """Traffic, faults and acts for so long."""
        self._part_at, self._is_open = self.stage.now, True
        ends_at = self._part_at + seconds
        users = [asyncio.ensure_future(self._use(number)) for number in range(USERS)]
        while self.stage.now < ends_at:
            await self._hurt(min(self.rng.uniform(*FAULTS_S), ends_at - self.stage.now))
            name = self.rng.choice(list(ACTS))
            self.dealt[name] += 1
            await ACTS[name](self.stage, self.rng)
            self.wrong += await self.stage.scrape()
        self._is_open = False
        self._open_s += seconds
        await asyncio.gather(*users)

    async def _hurt(self, seconds: float) -> None:
        """One unit at a time falls ill. All are well in the end."""
        strikes: dict[str, Strike] = {name: partial(self._strike, name) for name in STRIKES}
        engines = [self.stage.engines[name] for name in self.stage.units if name in self.stage.engines]
        chaos = Chaos(self.stage.world, engines, 1, strikes, pause_s=(5.0, 60.0), lasting_s=(1.0, 20.0))
        await asyncio.sleep(seconds)
        chaos.stop()
        await asyncio.sleep(LOOKED_AT_S)
        await self.stage.until(self.stage.all_up, BACK_S + RULES.slow_start_s)

    def _strike(self, name: str, world: World, engine: Engine) -> None:
        self.dealt[name] += 1
        STRIKES[name](world, engine)

    async def _take_stock(self) -> None:
        """Let everything come to rest, look at what is left of it, and forget it."""
        await tidy(self.stage)
        await asyncio.sleep(QUIET_S)
        self.wrong += await self.stage.scrape()
        self.stage.judge()
        self.marks.append(mark(self.stage.world, *self.stage.oldest()))
        hour, alive = self._open_s / HOUR_S, self.marks[-1].blocks
        self._tell(f"{hour:5.2f} h: {self.counts.total()} requests, {alive} objects alive")

    # -- who asks ------------------------------------------------------------------------------------------

    def _share(self) -> float:
        """The part of all users who are awake: 1 at noon."""
        turn = (self._open_s + self.stage.now - self._part_at) / (self.hours * HOUR_S)
        return 0.5 - 0.5 * math.cos(2.0 * math.pi * turn)

    async def _use(self, number: int) -> None:
        stage, rng = self.stage, self.rng
        while self._is_open:
            await asyncio.sleep(rng.expovariate(1.0 / THINK_S))
            if not self._is_open or number > self._share() * USERS:
                continue
            kind = rng.choices(list(KINDS), [share for share, _ in KINDS.values()])[0]
            visit = await stage.ask(
                headers={"x-gateway-inference-fairness-id": f"tenant-{rng.getrandbits(32)}"},
                prompt_tokens=rng.randrange(10, 2000),
                max_tokens=rng.randrange(4, 40),
                **KINDS[kind][1](rng),
            )
            self._note(kind, visit)

    def _note(self, kind: str, visit: Visit) -> None:
        self.counts["whole" if visit.is_answered else "left" if kind == "leaves" else "not whole"] += 1
        if kind != "leaves" and (sentence := wrong_with(kind, visit, is_calm=True)):
            self.wrong.append(f"{self.stage.now:.1f} {visit.request_id} ({kind}, {visit.unit}): {sentence}")


def lines(day: Day) -> Iterator[str]:
    """What came of it, for people."""
    quarter = max(1, len(day.marks) // 4)
    yield from table(day.marks[::quarter])
    yield f"{day.counts.total()} requests: {_listed(day.counts)}"
    yield f"befell: {_listed(day.dealt)}"
    yield f"{len(day.wrong)} things are wrong" + "".join(f"\n  {each}" for each in day.wrong[:20])


def main() -> int:
    """Play a day and print what came of it; 1 when anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.day", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hours", type=float, default=24.0, help="of virtual time")
    asked = parser.parse_args()
    began_s = time.process_time()
    day = Day(asked.seed, asked.hours, partial(print, flush=True))
    print(*lines(day), f"took {time.process_time() - began_s:.0f} s of CPU", sep="\n")
    return 1 if day.wrong else 0


def _listed(counts: Counter[Any]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())
