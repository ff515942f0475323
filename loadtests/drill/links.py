"""What the units of a drill say of the links between them: which transfers failed, which blocks are held.

What must stay true: what a unit said before it was killed is not forgotten.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from loadtests.kit.waiting import repeated

AVOIDED_S = 5.0
"""A link that has failed once is avoided by the gate for so long; then one request tries it."""
_LOOK_S = 0.5
"""A unit that is killed is forgotten with what it has not said by then."""


class Pair(NamedTuple):
    """A prefiller and a decoder."""

    prefiller: str
    decoder: str

    @classmethod
    def of(cls, name: str) -> "Pair":
        """By the name that a drill file has for it, such as a1-a3."""
        prefiller, _, decoder = name.partition("-")
        return cls(prefiller, decoder)


class Failed(NamedTuple):
    """A transfer that did not arrive: when it began and ended, by the wall clock."""

    began: float
    ended: float


Failures = Mapping[Pair, Sequence[Failed]]


class Decoder(Protocol):
    """A unit that fetches blocks."""

    @property
    def name(self) -> str: ...

    def failures(self) -> Mapping[str, Sequence[tuple[float, float]]]:
        """Transfers that did not arrive, by prefiller. Raises OSError when it cannot be asked."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A link that was cut, or hung, in a run. `first_at`: when the first transfer over it failed; `last_at`:
    when the last one began before it was avoided. NaN: none was seen.
    """

    what: str
    at: float
    first_at: float = math.nan
    last_at: float = math.nan

    @property
    def avoided_s(self) -> float:
        """How long it was still used after the first failed transfer."""
        return max(self.last_at - self.first_at, 0.0) if self.last_at == self.last_at else math.nan

    def line(self) -> str:
        """For people."""
        if math.isnan(self.first_at):
            return f"{self.what}: no transfer has failed"
        first = f"the first transfer failed {self.first_at - self.at:.2f} s later"
        return f"{self.what}: {first}, avoided {self.avoided_s:.2f} s after that"

    @classmethod
    def found(cls, what: str, at: float, until: float, failures: Sequence[Failed]) -> "Broken":
        """A link that was broken from `at` on, and healed at `until`."""
        there = [each for each in failures if at <= each.ended <= until]
        if not there:
            return cls(what, at)
        first = min(each.ended for each in there)
        # Whoever tries it once it is open again is not late.
        return cls(what, at, first, max(each.began for each in there if each.began < first + AVOIDED_S))


class LinkWatch:
    """What was seen of the links, whenever `look` was called."""

    def __init__(self, decoders: Sequence[Decoder]) -> None:
        self._decoders = decoders
        self._seen: dict[Pair, dict[Failed, None]] = {}

    def look(self) -> None:
        """Ask each unit that can be asked."""
        for unit in self._decoders:
            try:
                found = unit.failures()
            except OSError:
                continue
            for prefiller, failures in found.items():
                seen = self._seen.setdefault(Pair(prefiller, unit.name), {})
                seen.update(dict.fromkeys(Failed(*each) for each in failures))

    def failures(self) -> Failures:
        """All transfers that did not arrive."""
        return {pair: list(seen) for pair, seen in self._seen.items()}


@contextmanager
def watching(decoders: Sequence[Decoder]) -> Iterator[LinkWatch]:
    """Inside, a thread looks at the units; once more at the end."""
    watch = LinkWatch(decoders)
    with repeated(watch.look, _LOOK_S):
        yield watch
    watch.look()
