"""Discovery at work: follows all sources and keeps the gate's fleet to what is configured and what they find.

1. The last units of a source are kept until it reports others, or another source takes its place and has
   reported. So are those that the previous process knew.
2. Faults of a unit reach the judge before the unit changes or is removed, so that its requests move.
3. A change of state (failed, works again) is one event and one log line, however often it is retried.

In this order: `Discovery`, `MergedFleet`, `discovery_metrics`.
"""

from __future__ import annotations

import asyncio
import importlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from prometheus_client import Metric

from cellgate.proxy.config.settings import Settings
from cellgate.proxy.config.sources import PACKAGES, DnsSource, RedisSource, Source
from cellgate.proxy.control.plane import Part, Plane
from cellgate.proxy.discovery.base import GROUP, Feed, Follow, Found, SourceError, Suspicion
from cellgate.proxy.discovery.sources import FOLLOW
from cellgate.proxy.discovery.varying import VaryingAnswers
from cellgate.proxy.observe.events import Action, ActionKind
from cellgate.proxy.observe.families import gauge
from cellgate.proxy.observe.helpers import HelperTrouble
from cellgate.proxy.process.tasks import end_tasks
from cellgate.router.nouns import Cell, Evidence, Fleet, Sign, Strength, Unit, Verdict

PAUSE_MAX_S = 5.0
"""The pause before a failed source is retried: doubled with each failure in a row."""


class Discovery:
    """All sources of one gate, each followed by what `follow` has for its kind. Needs a running loop."""

    def __init__(self, plane: Plane, rng: random.Random, follow: Mapping[str, Follow]) -> None:
        self._plane = plane
        self._follows = follow
        self._rng = rng
        self._fixed = Fleet()
        self._followed: list[_Followed] = []
        self._parting: list[_Followed] = []
        """Sources that are no longer configured, until all new ones have found something."""
        self._before = Found()
        """What the previous process had found, until then."""
        self._held: dict[_Against, Suspicion] = {}
        """Reported faults that have not been cleared."""

    def take(self, fixed: Fleet, sources: Sequence[Source]) -> str:
        """Apply the configuration, at start and at each reload. Returns what changed at once."""
        self._fixed = fixed
        kept = {one.source: one for one in self._followed if one.source in sources}
        for one in self._followed:
            if one.source not in kept and one.task is not None:
                one.task.cancel()
                self._parting.append(one)
        self._followed = [kept.get(source) or _followed(source) for source in sources]
        changed = self._apply()
        for one in self._followed:
            if one.task is None:
                one.task = asyncio.create_task(self._follow(one), name=f"discovery {one.source.title}")
        return changed

    def remember(self, found: Found) -> None:
        """Take over what the previous process had found, unless something newer is known."""
        if any(one.found is None for one in self._followed):
            self._before = found
            self._apply()

    def connected(self) -> dict[str, bool]:
        """Whether each source works now, by title."""
        return {one.source.title: one.up for one in self._followed}

    def troubles(self) -> Mapping[str, HelperTrouble | None]:
        """What is wrong with each source, by title. A source that has yet to answer is not there."""
        return {
            one.source.title: HelperTrouble(
                f"{one.lost}; {_stays(one.found or self._before)}", has_event=True
            )
            if one.lost
            else None
            for one in self._followed
            if one.lost or one.found is not None
        }

    async def close(self) -> None:
        """Stop following; the units stay."""
        await end_tasks(*(one.task for one in self._followed if one.task is not None))

    # -- one source ----------------------------------------------------------------------------------------

    async def _follow(self, one: _Followed) -> None:
        failures = 0
        while True:
            follow = self._follows[one.source.kind](one.source)
            try:
                async for found in follow:
                    failures = 0
                    self._received(one, found)
                reason = "it ended"
            except SourceError as error:
                reason = str(error)
            except Exception as error:  # A defect of the gate must not remove working units.
                reason = f"unexpected {error!r}; please report it"
            finally:
                await follow.aclose()
            self._lost(one, reason)
            pause_s = min(PAUSE_MAX_S, FOLLOW_PAUSE_S * 2.0**failures)
            failures = min(failures + 1, 8)
            await asyncio.sleep(pause_s * self._rng.uniform(0.8, 1.2))

    def _received(self, one: _Followed, found: Found) -> None:
        if one.lost:
            self._tell("source_back", f"{one.source.title}: it answers again")
            one.lost = ""
        if one.varying is not None:
            known = one.found.units if one.found is not None else ()
            found = one.varying.take(found, {u.name for u in known if self._is_lost(u.name)})
        if found == one.found:
            return
        before, one.found = one.found or Found(), found
        if one.source.gone_is_dead:
            gone = {unit.name for unit in before.units} - {unit.name for unit in found.units}
            for name in sorted(gone - one.left_out):
                self._observe(one.source.kind, Suspicion(name, GROUP, "its group is gone"))
        changed = self._apply()
        if found.units != before.units:
            self._tell("discovered", f"{one.source.title}: {len(found.units)} units; {changed}")

    def _lost(self, one: _Followed, reason: str) -> None:
        if not one.lost:
            stays = _stays(one.found or self._before)
            self._tell("source_lost", f"{one.source.title}: {reason}; {stays}")
        one.lost = reason

    # -- what follows --------------------------------------------------------------------------------------

    def _apply(self) -> str:
        """Apply what is found now to the judge and the fleet. Returns what changed in the fleet."""
        if all(one.found is not None for one in self._followed):
            self._parting.clear()
            self._before = Found()
        known = [(one, one.found) for one in (*self._followed, *self._parting) if one.found is not None]
        fleet, left_out = merge(self._fixed, [*(found for _, found in known), self._before])
        for (one, _), names in zip(known, left_out[:-1], strict=True):
            self._leave_out(one, names)
        epochs, held = _says(known)
        # Before the fleet changes: requests on a unit that will be removed or replaced must move.
        self._tell_epochs(epochs)
        for against, suspicion in self._held.items():
            if against not in held:
                self._observe(against.kind, suspicion, over=True)
        for against, suspicion in held.items():
            if self._held.get(against) != suspicion:
                self._observe(against.kind, suspicion)
        self._held = held
        changed = self._plane.configure(fleet)
        # And again afterwards, for units that are new or replaced; for others nothing changes.
        self._tell_epochs(epochs)
        for against, suspicion in held.items():
            if suspicion.fatal:
                self._observe(against.kind, suspicion)
        return changed

    def _leave_out(self, one: _Followed, names: frozenset[str]) -> None:
        for name in sorted(names - one.left_out) if one in self._followed else ():
            self._tell("clash", f"{one.source.title}: its unit {name} is ignored: another unit has that name")
        one.left_out = names

    def _observe(self, kind: str, suspicion: Suspicion, *, over: bool = False) -> None:
        sign, strength = Sign.BAD, Strength.FATAL if suspicion.fatal else Strength.STRONG
        reason = suspicion.reason
        if over:
            sign, strength, reason = Sign.GOOD, Strength.WEAK, f"over: {suspicion.reason}"
        self._plane.prober.observe(
            Evidence(suspicion.unit, sign, strength, kind, reason, self._plane.now(), node=suspicion.node)
        )

    def _is_lost(self, unit: str) -> bool:
        """Whether a unit does not pass its probes, or is not there."""
        state = self._plane.board.units.get(unit)
        return state is None or state.case.verdict is Verdict.DOWN

    def _tell_epochs(self, epochs: Mapping[tuple[str, str], str]) -> None:
        for (kind, unit), epoch in epochs.items():
            reason, now = f"its epoch is {epoch}", self._plane.now()
            self._plane.prober.observe(
                Evidence(unit, Sign.NEUTRAL, Strength.WEAK, kind, reason, now, epoch=epoch)
            )

    def _tell(self, kind: ActionKind, detail: str) -> None:
        self._plane.events.add(Action(kind, "discovery", detail=detail))


def _stays(found: Found) -> str:
    """What the gate does without a source that had found this."""
    count = len(found.units)
    kept = "last unit is" if count == 1 else f"last {count} units are"
    stays = f"its {kept} kept" if count else "it has given no units yet"
    return f"{stays}, and it is retried"


class _Against(NamedTuple):
    """Which source reports a fault of which unit: only that source can clear it."""

    kind: str
    unit: str
    node: str


@dataclass(slots=True, eq=False)
class _Followed:
    """One source and its state.

    `lost` is why it fails now, empty while it works. `left_out`: units whose names others have. `varying`: it
    may tell only a part of its units each time.
    """

    source: Source
    found: Found | None = None
    lost: str = ""
    left_out: frozenset[str] = frozenset()
    varying: VaryingAnswers | None = None
    task: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        return self.found is not None and not self.lost


def _followed(source: Source) -> _Followed:
    return _Followed(source, varying=VaryingAnswers() if source.kind == DnsSource.kind else None)


def _says(
    known: Sequence[tuple[_Followed, Found]],
) -> tuple[dict[tuple[str, str], str], dict[_Against, Suspicion]]:
    """The epochs, by kind of source and unit, and the faults of units. The first source of a name counts.

    Reports about a unit whose name another one has are ignored.
    """
    epochs: dict[tuple[str, str], str] = {}
    held: dict[_Against, Suspicion] = {}
    for one, found in known:
        kind = one.source.kind
        for unit, epoch in found.epochs:
            if unit not in one.left_out:
                epochs.setdefault((kind, unit), epoch)
        for suspicion in found.suspicions:
            if suspicion.unit not in one.left_out:
                held.setdefault(_Against(kind, suspicion.unit, suspicion.node), suspicion)
    return epochs, held


# Merges configured and discovered units into one fleet. Pure.


class MergedFleet(NamedTuple):
    """The fleet; and of each found, the names of the units that are not in it because others have them."""

    fleet: Fleet
    left_out: tuple[frozenset[str], ...]


def merge(fixed: Fleet, found: Sequence[Found]) -> MergedFleet:
    """The configured units, then the found ones, in this order. The first unit keeps a name."""
    cells: dict[str, Cell] = {cell.name: cell for cell in fixed.cells}
    units: dict[str, Unit] = {unit.name: unit for unit in fixed.units}
    left_out = []
    for one in found:
        for cell in one.cells:
            cells.setdefault(cell.name, cell)
        left_out.append(frozenset(u.name for u in one.units if units.setdefault(u.name, u) is not u))
    return MergedFleet(Fleet(tuple(cells.values()), tuple(units.values())), tuple(left_out))


FOLLOW_PAUSE_S = 1.0


# Ties a control plane to the sources of its units. The one place that knows both.


def discovery_metrics(discovery: Discovery) -> Iterator[Metric]:
    """Which sources work."""
    text = "1 while a source of units works; at 0 its last units are kept."
    yield gauge("discovery_up", text, "source", discovery.connected().items())


def preload(settings: Settings) -> None:
    """Import what the sources need at start: later, half a second of imports would delay streams."""
    for source in settings.sources:
        if source.kind in PACKAGES:
            importlib.import_module(PACKAGES[source.kind][0])


def discover(plane: Plane, feed: Feed) -> Part:
    """Begins to follow the sources that `plane` is configured with, if any. It has begun.

    `feed` has the units of Redis, for a gate whose units come from there.
    """
    follow = {**FOLLOW, RedisSource.kind: lambda _: feed.follow()}
    discovery = Discovery(plane, random.Random(), follow)
    plane.take_over = lambda settings: discovery.take(settings.fleet, settings.sources)
    plane.helpers.watch(discovery.troubles)
    plane.take_over(plane.settings)
    plane.remember = lambda fleet: discovery.remember(Found(fleet.units, fleet.cells))
    return Part(discovery.close, metrics=partial(discovery_metrics, discovery))
