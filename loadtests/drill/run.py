"""One run of a drill: build, load, hurt on time, heal on time, and gather what came of it.

What must stay true: a fault that could not be dealt or undone ends the run with an error, not with a verdict.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

from loadtests.drill import load, records
from loadtests.drill.faults import FAULTS, Aim
from loadtests.drill.fleet import Fleet
from loadtests.drill.plan import Drill, Step
from loadtests.drill.promises import Blow, Outcome, Verdict, check
from loadtests.drill.summary import Goal, Summary
from loadtests.drill.watch import Flip, Watch

SETTLE_S = 20.0
"""How long after its healing a unit may still change its mind, as far as `flips` is concerned."""

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it. `began_at` is of the wall clock."""

    drill: Drill
    began_at: float
    outcome: Outcome
    flips: Sequence[Flip]
    verdicts: Sequence[Verdict]

    def is_kept(self) -> bool:
        """Whether every promise was."""
        return all(verdict.kept for verdict in self.verdicts)


@dataclass(slots=True)
class Dealt:
    """A step of the plan, as it was carried out; by the wall clock."""

    step: Step
    at: float = 0.0
    healed_at: float | None = None


@dataclass(slots=True)
class Hand:
    """Deals the faults, each in a thread of its own, since some take long to heal."""

    fleet: Fleet
    began: float
    dealt: list[Dealt] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def deal(self, steps: Sequence[Step]) -> None:
        """Begin; returns at once."""
        self._threads = [threading.Thread(target=self._deal, args=(step,), daemon=True) for step in steps]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Deal no more, heal no more, wait for what is being done."""
        self.over.set()
        for thread in self._threads:
            thread.join()

    def finish(self) -> None:
        """Stop. Raises RuntimeError with what failed first."""
        self.stop()
        if self.errors:
            raise RuntimeError(f"a fault could not be dealt or undone: {self.errors[0]}") from self.errors[0]

    def _deal(self, step: Step) -> None:
        try:
            if self.over.wait(self.began + step.at_s - time.monotonic()):
                return
            fault, dealt = FAULTS[step.fault], Dealt(step, time.time())
            aim = Aim(self.fleet, step.unit or "", step.node, step.parameters())
            self.dealt.append(dealt)
            fault.hurt(aim)
            if step.unit is None and step.heal_after_s is None:
                dealt.healed_at = time.time()
            if step.heal_after_s is not None:
                if self.over.wait(dealt.at + step.heal_after_s - time.time()):
                    return
                fault.heal(aim)
                dealt.healed_at = time.time()
        except Exception as error:  # Told by `finish`.
            self.errors.append(error)


def run(drill: Drill, folder: Path) -> Run:
    """The whole run; its files go to `folder`. None of its processes is left afterwards."""
    own_addresses = any(step.fault == "partition" for step in drill.faults)
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet(drill.topology, folder, own_addresses=own_addresses))
        watch = stack.enter_context(Watch(fleet.gates))
        locust = stack.enter_context(load.running(drill, fleet.url, folder))
        began_at = time.time()
        hand = Hand(fleet, time.monotonic())
        stack.callback(hand.stop)
        hand.deal(drill.steps())
        _wait(locust, hand)
        hand.finish()
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
    )
    return Run(drill, began_at, outcome, flips, list(check(drill.promises, outcome)))


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


def unprovoked(flips: Sequence[Flip], dealt: Sequence[Dealt]) -> list[Flip]:
    """Departures from UP of units that were whole: neither hurt, nor just healed, nor being rolled."""

    def was_hurt(flip: Flip) -> bool:
        return any(
            each.step.unit in (flip.unit, None)
            and each.at - 0.001 <= flip.at <= (each.healed_at or float("inf")) + SETTLE_S
            for each in dealt
        )

    return [flip for flip in flips if flip.before == "up" and not was_hurt(flip)]
