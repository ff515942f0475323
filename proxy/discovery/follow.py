"""Follows all sources at once and keeps the gate's fleet to what is configured and what they find.

1. What a source told last stays until it tells otherwise, or another takes its place and has told its own.
2. What is held against a unit reaches the judge before the unit changes or goes, so that its requests move.
3. A change of state (lost, back) is one event with its line in the log, however often it is tried.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from proxy.discovery.base import Doubt, Found, LostError, Source
from proxy.discovery.merge import merge
from proxy.report.events import Action, ActionKind
from router.nouns import Evidence, Fleet, Sign, Strength

PAUSE_S = 1.0
PAUSE_MAX_S = 5.0
"""How long to wait before a world that was lost is looked for again: doubled with each failure in a row."""


class World(Protocol):
    """The gate, as far as discovery needs it."""

    def now(self) -> float:
        """The loop's time."""
        ...

    def configure(self, fleet: Fleet) -> str:
        """Take over a fleet, and say what changed."""
        ...

    def observe(self, evidence: Evidence) -> None:
        """Fold evidence in; that about units which are not there is dropped."""
        ...

    def tell(self, action: Action) -> None:
        """Note something that happened."""
        ...


@dataclass(slots=True, eq=False)
class _Followed:
    """One source and what is known of it. `lost` is why its world cannot be seen now, empty while it can."""

    source: Source
    found: Found | None = None
    lost: str = ""
    task: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        return self.found is not None and not self.lost


class Discovery:
    """All sources of one gate. Needs a running loop."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._fixed = Fleet()
        self._followed: list[_Followed] = []
        self._parting: list[tuple[str, Found]] = []
        """What sources found that are configured no more, until the new ones have found something."""
        self._clashes: tuple[tuple[str, str], ...] = ()

    def take(self, fixed: Fleet, sources: Sequence[Source]) -> str:
        """Take over what is configured, at start and at each reload. Says what changed at once."""
        self._fixed = fixed
        kept = {one.source: one for one in self._followed if one.source in sources}
        for one in self._followed:
            if one.source not in kept and one.task is not None:
                one.task.cancel()
                if one.found is not None:
                    self._parting.append((one.source.title, one.found))
        self._followed = [kept.get(source) or _Followed(source) for source in sources]
        changed = self._apply()
        for one in self._followed:
            if one.task is None:
                one.task = asyncio.create_task(self._follow(one), name=f"discovery {one.source.title}")
        return changed

    def standing(self) -> dict[str, bool]:
        """Whether each source sees its world now, by title."""
        return {one.source.title: one.up for one in self._followed}

    async def close(self) -> None:
        """Follow no source any more; the units stay."""
        tasks = [one.task for one in self._followed if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- one source ----------------------------------------------------------------------------------------

    async def _follow(self, one: _Followed) -> None:
        failures = 0
        while True:
            follow = one.source.follow()
            try:
                async for found in follow:
                    failures = 0
                    self._heard(one, found)
                reason = "it ended"
            except LostError as error:
                reason = str(error)
            except Exception as error:  # A fault of ours must not take away units that work.
                reason = f"unforeseen {error!r}; please report it"
            finally:
                await follow.aclose()
            self._lost(one, reason)
            pause_s = min(PAUSE_MAX_S, PAUSE_S * 2.0**failures)
            failures = min(failures + 1, 8)
            await asyncio.sleep(pause_s * self._rng.uniform(0.8, 1.2))

    def _heard(self, one: _Followed, found: Found) -> None:
        if one.lost:
            self._tell("source_back", f"{one.source.title}: it is seen again")
            one.lost = ""
        if found == one.found:
            return
        before, one.found = one.found or Found(), found
        for evidence in self._news(one.source, before, found):
            self._world.observe(evidence)
        changed = self._apply()
        if one.found.units != before.units:
            self._tell("discovered", f"{one.source.title}: {len(found.units)} units; {changed}")

    def _lost(self, one: _Followed, reason: str) -> None:
        if not one.lost:
            count = len(one.found.units) if one.found is not None else 0
            stays = f"the {count} units known last stay" if count else "no unit of it is known"
            self._tell("source_lost", f"{one.source.title}: {reason}; {stays}, and it is tried again")
        one.lost = reason

    # -- what follows --------------------------------------------------------------------------------------

    def _apply(self) -> str:
        if all(one.found is not None for one in self._followed):
            self._parting.clear()
        found = [(one.source.title, one.found) for one in self._followed if one.found is not None]
        fleet, clashes = merge(self._fixed, [*found, *self._parting])
        for name, title in clashes:
            if (name, title) not in self._clashes:
                self._tell("clash", f"{title}: its unit {name} is left out: another one has that name")
        self._clashes = clashes
        changed = self._world.configure(fleet)
        # A unit that is new, or looked at in another way, has heard nothing of this yet.
        for one in self._followed:
            for evidence in self._standing(one.source, one.found or Found()):
                self._world.observe(evidence)
        return changed

    def _news(self, source: Source, before: Found, after: Found) -> Iterator[Evidence]:
        """What the units there are must hear before anything changes: what is new, and what is taken back."""
        if source.gone_is_dead:
            for name in {unit.name for unit in before.units} - {unit.name for unit in after.units}:
                yield self._evidence(source, Doubt(name, "group", "nothing of it is left"))
        for unit, epoch in after.epochs:
            yield self._incarnation(source, unit, epoch)
        stands = {(doubt.unit, doubt.node) for doubt in after.doubts}
        for doubt in before.doubts:
            if (doubt.unit, doubt.node) not in stands:
                yield self._evidence(source, doubt, over=True)
        for doubt in after.doubts:
            if doubt not in before.doubts:
                yield self._evidence(source, doubt)

    def _standing(self, source: Source, found: Found) -> Iterator[Evidence]:
        """What stands for as long as it is found; to say it again changes nothing."""
        for unit, epoch in found.epochs:
            yield self._incarnation(source, unit, epoch)
        for doubt in found.doubts:
            if doubt.fatal:
                yield self._evidence(source, doubt)

    def _evidence(self, source: Source, doubt: Doubt, *, over: bool = False) -> Evidence:
        sign, strength = (Sign.BAD, Strength.FATAL if doubt.fatal else Strength.STRONG)
        reason = doubt.reason
        if over:
            sign, strength, reason = Sign.GOOD, Strength.WEAK, f"over: {doubt.reason}"
        return Evidence(doubt.unit, sign, strength, source.kind, reason, self._world.now(), node=doubt.node)

    def _incarnation(self, source: Source, unit: str, epoch: str) -> Evidence:
        reason = f"its incarnation is {epoch}"
        return Evidence(
            unit, Sign.NEUTRAL, Strength.WEAK, source.kind, reason, self._world.now(), epoch=epoch
        )

    def _tell(self, kind: ActionKind, detail: str) -> None:
        self._world.tell(Action(kind, "discovery", detail=detail))
