"""The table of promises: what each measures in a run, and on which side of its bound that must be.

What must stay true: a figure that a run could not yield breaks its promise; nothing is kept by not looking.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from loadtests.drill.answers import End
from loadtests.drill.links import Broken
from loadtests.drill.summary import Summary, percentile


@dataclass(frozen=True, slots=True)
class Blow:
    """A fault as it was dealt. Times are of the wall clock; `healed_at` None: not yet, or never.
    `down_at`: when its unit came to be DOWN, if it did; `must_down`: whether it had to.
    """

    what: str
    unit: str | None
    at: float
    healed_at: float | None
    must_down: bool
    down_at: float | None

    @property
    def detection_s(self) -> float:
        """From the fault to DOWN; infinite: never."""
        return math.inf if self.down_at is None else self.down_at - self.at

    def discovery(self) -> str:
        """The same for people."""
        if self.down_at is not None:
            return f"DOWN after {self.detection_s:.2f} s"
        return "never DOWN, which it must be" if self.must_down else "no gate says that it is DOWN"


@dataclass(frozen=True, slots=True)
class Splits:
    """What became of requests that two units shared. `transferred` is what the gates count; `broken` are the
    links that a fault broke; `blamed` counts links that a gate avoided although neither they nor their units
    were hurt; `unclaimed` are prompts whose blocks were still held ORPHAN_PATIENCE_S after the load.
    """

    transferred: int = 0
    broken: Sequence[Broken] = ()
    blamed: int = 0
    orphans: float = math.nan

    def avoided_s(self) -> float:
        """The longest time for which a broken link was used after its first failure. NaN: one never failed,
        or none was broken.
        """
        times = [each.avoided_s for each in self.broken]
        return math.nan if any(map(math.isnan, times)) else max(times, default=math.nan)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run yielded. `flips` are departures from UP of units to which nothing had been done;
    `resumed` streams and `recoveries` are what the gates count.
    """

    summary: Summary
    blows: Sequence[Blow]
    flips: int
    continued: int
    recoveries: int
    splits: Splits = Splits()

    def ended(self, *ends: End) -> int:
        """How many requests ended so."""
        counts = self.summary.ends()
        return sum(counts[end] for end in ends)

    def continued_share(self) -> float:
        """Of all streams that broke after a token: NaN of none."""
        bad = (End.ERROR_EVENT, End.LOST, End.HUNG, End.REPEATED, End.WRONG)
        broken = sum(r.first_at is not None and r.end in bad for r in self.summary.records)
        total = broken + self.continued
        return self.continued / total if total else math.nan

    def detection_s(self) -> float:
        """The slowest discovery of a unit that had to be taken out; NaN: there was none."""
        return max((blow.detection_s for blow in self.blows if blow.must_down), default=math.nan)


@dataclass(frozen=True, slots=True)
class Promise:
    """`measure` takes a run's outcome; the bound is the most allowed, or the least."""

    measure: Callable[[Outcome], float]
    at_least: bool = False

    def is_kept(self, value: float, bound: float) -> bool:
        """NaN is on no side of any bound."""
        return value >= bound if self.at_least else value <= bound


@dataclass(frozen=True, slots=True)
class Verdict:
    """One promise of one run."""

    name: str
    bound: float
    value: float
    kept: bool

    def line(self) -> str:
        """For people."""
        sign = ">=" if PROMISES[self.name].at_least else "<="
        shown = "nothing to measure" if math.isnan(self.value) else f"{self.value:.4g}"
        return f"{'kept  ' if self.kept else 'BROKEN'}  {self.name} {sign} {self.bound:g}: {shown}"


def _p99(of: Callable[[Summary], Sequence[float]]) -> Promise:
    return Promise(lambda outcome: percentile(of(outcome.summary), 0.99))


def _count(*ends: End) -> Promise:
    return Promise(lambda outcome: outcome.ended(*ends))


PROMISES: dict[str, Promise] = {
    "requests": Promise(lambda outcome: len(outcome.summary.records), at_least=True),
    "lost": _count(End.LOST),
    "hung": _count(End.HUNG),
    "repeated": _count(End.REPEATED),
    "wrong": _count(End.WRONG),
    "refused": _count(End.REFUSED),
    "error_events": _count(End.ERROR_EVENT),
    "continued": Promise(lambda outcome: outcome.continued, at_least=True),
    "continued_share": Promise(Outcome.continued_share, at_least=True),
    "continuations": Promise(lambda outcome: outcome.continued),
    "recoveries": Promise(lambda outcome: outcome.recoveries),
    "flips": Promise(lambda outcome: outcome.flips),
    "detection_s": Promise(Outcome.detection_s),
    "transferred": Promise(lambda outcome: outcome.splits.transferred, at_least=True),
    "link_avoided_s": Promise(lambda outcome: outcome.splits.avoided_s()),
    "links_blamed": Promise(lambda outcome: outcome.splits.blamed),
    "orphans": Promise(lambda outcome: outcome.splits.orphans),
    "goodput_share": Promise(lambda outcome: outcome.summary.goodput_share(), at_least=True),
    "ttft_p99_s": _p99(Summary.ttft_s),
    "tpot_p99_s": _p99(Summary.tpot_s),
    "itl_p99_s": _p99(Summary.itl_s),
    "e2e_p99_s": _p99(Summary.e2e_s),
}
"""Each by the name that a drill file has for it."""


def check(promises: Mapping[str, float], outcome: Outcome) -> Iterator[Verdict]:
    """The verdict on each promise, in the file's order."""
    for name, bound in promises.items():
        value = PROMISES[name].measure(outcome)
        yield Verdict(name, bound, value, PROMISES[name].is_kept(value, bound))
