"""One measurement as figures, and what many of them come to. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Figure:
    """One load on one target in one round.

    CPU is that of one answer, a request, a streamed token, or a stream of a burst, in microseconds: the
    target's, and that of the engine and the generator beside it. `pace` is how many tokens should have come
    to one that came, `reads_each` how often a client read per answer, `lag_ms` the 99th percentile of the
    generator's own timer lateness, `others` the share of the machine that processes outside the benchmark
    took. `ttft_*_ms` are from request (in a burst: from the connection) to first event, `stall_ms` how much
    later than its interval the latest token came. Memory is resident: before the first load, and under this
    one. What a load does not have is 0.
    """

    target: str
    load: str
    round: int
    answers: int
    seconds: float
    cpu_us: float
    engine_us: float
    generator_us: float
    reads_each: float
    lag_ms: float
    others: float
    pace: float = 0.0
    ttft_p50_ms: float = 0.0
    ttft_p99_ms: float = 0.0
    stall_ms: float = 0.0
    idle_mb: float = 0.0
    loaded_mb: float = 0.0
    stream_kib: float = 0.0
    leaked_clients: int = 0
    leaked_generating: int = 0
    kept_idle: int = 0

    def line(self) -> str:
        """What is printed as soon as it is measured."""
        ttft = f", TTFT {self.ttft_p50_ms:.1f} / {self.ttft_p99_ms:.1f} ms" if self.ttft_p99_ms else ""
        streams = f", pace {self.pace:.3f}, stall {self.stall_ms:.0f} ms, {self.loaded_mb:.0f} MB"
        return (
            f"{self.target:18}{self.load:14}{self.cpu_us:8.1f} us CPU each "
            f"{self.answers / self.seconds:8.0f}/s (engine {self.engine_us:.1f}, generator "
            f"{self.generator_us:.1f}){ttft}{streams if self.pace else ''}, "
            f"generator lag p99 {self.lag_ms:.1f} ms, others took {self.others:.0%}"
        )


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement. `at` is how many streams, units or bytes there were; `idle_share` and `share` are CPU
    of the target as a share of one core, before the load and under it.
    """

    sweep: str
    at: int
    idle_share: float
    share: float
    figure: Figure

    @property
    def net_us(self) -> float:
        """CPU of an answer without what the target takes at rest, in microseconds."""
        return self.figure.cpu_us - self.idle_share * self.figure.seconds / self.figure.answers * 1e6


class Spread(NamedTuple):
    """The median of some rounds, and their range."""

    middle: float
    low: float
    high: float


Value = Callable[[Figure], float]


def spread(values: Sequence[float]) -> Spread | None:
    """None: there are no values."""
    return Spread(median(values), min(values), max(values)) if values else None


def of(figures: Sequence[Figure], target: str, load: str, value: Value) -> Spread | None:
    """What a target came to under a load."""
    return spread([value(each) for each in figures if (each.target, each.load) == (target, load)])


def beside(
    figures: Sequence[Figure],
    target: str,
    other: str,
    load: str,
    value: Value,
    compare: Callable[[float, float], float],
) -> Spread | None:
    """A target compared with another one round by round: what disturbs a round disturbs both."""
    own, others = (
        {each.round: value(each) for each in figures if (each.target, each.load) == (name, load)}
        for name in (target, other)
    )
    return spread([compare(own[number], others[number]) for number in own.keys() & others.keys()])


def ratio(own: float, other: float) -> float:
    """How many times as much; of nothing, infinitely much."""
    return own / other if other else float("inf")


def difference(own: float, other: float) -> float:
    """How much more."""
    return own - other
