"""One run of a drill: build, load, hurt on time, heal on time, and gather what came of it.

What must stay true: a plan that was not carried out as a whole is an error, never a verdict.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from loadtests.drill import links, load, records
from loadtests.drill.faults import FAULTS, Aim, Deed
from loadtests.drill.fleet import Fleet
from loadtests.drill.links import Broken, Failures, Pair
from loadtests.drill.plan import Drill, Step
from loadtests.drill.promises import Blow, Outcome, Splits, Verdict, check
from loadtests.drill.summary import Goal, Summary
from loadtests.drill.watch import Blamed, Flip, Watch, watching
from loadtests.kit import progress
from loadtests.kit.waiting import wait_until

SETTLE_S = 20.0
"""How long after its healing a unit may still change its mind, as far as `flips` is concerned."""

ORPHAN_PATIENCE_S = 60.0
"""How long after the load blocks may be held that nobody will fetch."""
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it. `began_at` is of the wall clock."""

    drill: Drill
    began_at: float
    outcome: Outcome
    flips: Sequence[Flip]
    verdicts: Sequence[Verdict]
    resumed: Sequence[tuple[float, float]] = ()
    """How many streams were resumed until when, by the wall clock."""

    def is_kept(self) -> bool:
        """Whether every promise was."""
        return all(verdict.kept for verdict in self.verdicts)


@dataclass(slots=True)
class Dealt:
    """A step of the plan, as it was carried out; by the wall clock."""

    step: Step
    at: float = 0.0
    healed_at: float | None = None

    def covers(self, at: float) -> bool:
        """Whether what happens then may follow from it."""
        return self.at - 0.001 <= at <= (self.healed_at or float("inf")) + SETTLE_S


class Hand:
    """Deals the faults in order. What takes long, such as new processes, is finished before the next fault is
    dealt, and the rest of the plan is as much later: a fault must not meet what another one has left.
    """

    def __init__(self, fleet: Fleet, steps: Sequence[Step]) -> None:
        self.dealt: list[Dealt] = []
        self.errors: list[Exception] = []
        self._fleet = fleet
        self._steps = steps
        self._over = threading.Event()
        self._at_work = threading.Lock()
        self._began, self._late_s = 0.0, 0.0
        self._healers: list[threading.Thread] = []
        self._dealer = threading.Thread(target=self._deal_all, daemon=True)

    def begin(self) -> None:
        """The times of the plan count from here."""
        self._dealer.start()

    def stop(self) -> None:
        """Deal no more, heal no more, wait for what is being done."""
        self._over.set()
        for thread in (self._dealer, *self._healers):
            if thread.ident is not None:
                thread.join()

    def finish(self) -> None:
        """Stop. Raises RuntimeError with what failed first, or if the plan had not come to its end."""
        self.stop()
        if self.errors:
            raise RuntimeError(f"a fault could not be dealt or undone: {self.errors[0]}") from self.errors[0]
        if len(self.dealt) < len(self._steps):
            left = len(self._steps) - len(self.dealt)
            raise RuntimeError(f"the load was over before the plan: {left} faults were not dealt")

    def _deal_all(self) -> None:
        self._began = time.monotonic()
        for step in self._steps:
            if not self._await(step.at_s):
                return
            dealt = Dealt(step, time.time())
            self.dealt.append(dealt)
            self._do(FAULTS[step.fault].hurt, step)
            if step.heal_after_s is not None:
                self._healers.append(threading.Thread(target=self._heal, args=(dealt,), daemon=True))
                self._healers[-1].start()
            elif step.unit is None:
                dealt.healed_at = time.time()

    def _await(self, at_s: float) -> bool:
        """Wait until it is time for a step; False: it is over before that."""
        while True:
            with self._at_work:
                left_s = self._began + self._late_s + at_s - time.monotonic()
            if left_s <= 0:
                return True
            if self._over.wait(left_s):
                return False

    def _heal(self, dealt: Dealt) -> None:
        assert dealt.step.heal_after_s is not None
        if self._over.wait(dealt.at + dealt.step.heal_after_s - time.time()):
            return
        self._do(FAULTS[dealt.step.fault].heal, dealt.step)
        dealt.healed_at = time.time()

    def _do(self, deed: Deed, step: Step) -> None:
        with self._at_work:
            began = time.monotonic()
            try:
                deed(Aim(self._fleet, step.unit or "", step.node, step.parameters()))
            except Exception as error:  # Told by `finish`.
                self.errors.append(error)
            self._late_s += time.monotonic() - began


def run(drill: Drill, folder: Path) -> Run:
    """The whole run; its files go to `folder`. None of its processes is left afterwards."""
    own_addresses = any(step.fault == "partition" for step in drill.faults)
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet(drill.topology, folder, own_addresses=own_addresses))
        watch = stack.enter_context(watching(fleet.gates))
        link_watch = stack.enter_context(links.watching(fleet.decoders()))
        locust = stack.enter_context(load.running(drill, fleet.url, folder))
        began_at = time.time()
        hand = Hand(fleet, drill.steps())
        through = f"{drill.name} through {drill.topology.router}"
        progress.phase(through, lambda: _so_far(folder, hand, began_at))
        stack.callback(hand.stop)
        hand.begin()
        _wait(locust, hand)
        hand.finish()
        wait_until(lambda: not fleet.orphans(), ORPHAN_PATIENCE_S)
        orphans = fleet.orphans()
    summary = Summary(
        records.read(folder / "requests.jsonl"), Goal(drill.load.goal.ttft_s, drill.load.goal.tpot_s)
    )
    flips = [flip for flip in watch.flips() if flip.at >= began_at]
    outcome = Outcome(
        summary=summary,
        blows=[_blow(dealt, flips, drill) for dealt in sorted(hand.dealt, key=lambda dealt: dealt.at)],
        flips=len(unprovoked(flips, hand.dealt)),
        continued=watch.total("continued"),
        recoveries=watch.total("recoveries"),
        splits=_splits(watch, link_watch.failures(), hand.dealt, orphans),
    )
    return Run(drill, began_at, outcome, flips, list(check(drill.promises, outcome)), watch.resumed())


def _so_far(folder: Path, hand: Hand, began_at: float) -> str:
    requests = (folder / "requests.jsonl").read_bytes().count(b"\n")
    return f"{requests} requests and {len(hand.dealt)} faults in {time.time() - began_at:.0f} s"


def _wait(locust: "Popen[bytes]", hand: Hand) -> None:
    while locust.poll() is None and not hand.errors:
        time.sleep(_LOOK_S)


def _blow(dealt: Dealt, flips: Sequence[Flip], drill: Drill) -> Blow:
    """A step with its discovery: the first word of any gate that the unit is DOWN, while it was hurt. Other
    routers do not tell.
    """
    step, fault = dealt.step, FAULTS[dealt.step.fault]
    until = dealt.healed_at or float("inf")
    # Events tell whole milliseconds.
    downs = (
        f.at for f in flips if f.unit == step.unit and f.after == "down" and dealt.at - 0.001 <= f.at <= until
    )
    return Blow(
        what=f"{step.fault} {step.target}",
        unit=step.unit,
        at=dealt.at,
        healed_at=dealt.healed_at,
        must_down=fault.takes_down and drill.topology.router == "cellgate",
        down_at=next(downs, None),
    )


def _splits(watch: Watch, failures: Failures, dealt: Sequence[Dealt], orphans: int) -> Splits:
    return Splits(
        transferred=watch.total("transferred"),
        broken=[_broken(each, failures) for each in dealt if FAULTS[each.step.fault].breaks],
        blamed=len(blamed_for_nothing(watch.blamed(), dealt)),
        orphans=orphans,
    )


def _broken(dealt: Dealt, failures: Failures) -> Broken:
    step, until = dealt.step, dealt.healed_at or float("inf")
    found = failures.get(Pair.of(step.unit or ""), ())
    return Broken.found(f"{step.fault} {step.target}", dealt.at, until, found)


def blamed_for_nothing(blamed: Sequence[Blamed], dealt: Sequence[Dealt]) -> list[Blamed]:
    """Links that were avoided while neither they nor their units were hurt, or just healed."""

    def was_hurt(one: Blamed) -> bool:
        names = (*one.pair, "-".join(one.pair), None)
        return any(each.step.unit in names and each.covers(one.at) for each in dealt)

    return [one for one in blamed if not was_hurt(one)]


def unprovoked(flips: Sequence[Flip], dealt: Sequence[Dealt]) -> list[Flip]:
    """Departures from UP of units that were whole: neither hurt, nor just healed, nor being rolled."""

    def was_hurt(flip: Flip) -> bool:
        return any(each.step.unit in (flip.unit, None) and each.covers(flip.at) for each in dealt)

    return [flip for flip in flips if flip.before == "up" and not was_hurt(flip)]
