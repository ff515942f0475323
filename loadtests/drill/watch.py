"""What the gates say of themselves during a run: every flip, and counters that survive a restart.

What must stay true: a gate that cannot be asked at the moment is asked again; nothing it said is forgotten.
"""

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from loadtests.drill.links import Pair
from loadtests.kit.gate import GateProcess, metric_sum
from loadtests.kit.waiting import repeated

_LOOK_S = 0.5
_LINK = re.compile(r"link (\S+) -> (\S+):")
"""How an event names the link that is avoided."""
COUNTERS = {
    "continued": ("cellgate_continuations_total", ('result="continued"', 'result="completed"')),
    "recoveries": ("cellgate_recoveries_total", ("",)),
    "transferred": ("cellgate_split_steps_total", ('step="transferred"',)),
}
"""The metric of each, and which of its samples count."""


@dataclass(frozen=True, slots=True)
class Flip:
    """A unit's verdict changed, as a gate saw it, by the wall clock."""

    gate: int
    unit: str
    before: str
    after: str
    at: float
    line: str


class Blamed(NamedTuple):
    """A gate began to avoid a pair, by the wall clock."""

    gate: int
    pair: Pair
    at: float


class Watch:
    """What was seen of the gates, whenever `look` was called."""

    def __init__(self, gates: Sequence[GateProcess]) -> None:
        self._gates = gates
        self._seen: dict[tuple[int, str, str], Flip] = {}
        self._blamed: dict[Blamed, None] = {}
        self._last: dict[tuple[int, str], float] = {}
        self._totals = dict.fromkeys(COUNTERS, 0.0)
        self._resumed: list[tuple[float, float]] = []

    def flips(self) -> list[Flip]:
        """All that were seen, in order of time."""
        return sorted(self._seen.values(), key=lambda flip: flip.at)

    def blamed(self) -> list[Blamed]:
        """All links that were avoided."""
        return list(self._blamed)

    def resumed(self) -> list[tuple[float, float]]:
        """How many streams were resumed until when, by the wall clock."""
        return list(self._resumed)

    def total(self, counter: str) -> int:
        """How much a counter of `COUNTERS` has grown, over all gates and their processes."""
        return int(self._totals[counter])

    def begin(self) -> None:
        """Counters count from here."""
        self.look()
        self._totals = dict.fromkeys(COUNTERS, 0.0)
        self._resumed.clear()

    def look(self) -> None:
        """Ask each gate that can be asked."""
        for number in range(len(self._gates)):
            self._look(number)
        self._resumed.append((time.time(), self._totals["continued"]))

    def _look(self, number: int) -> None:
        # It is being restarted.
        with suppress(OSError, json.JSONDecodeError):
            for event in self._gates[number].events():
                self._take(number, event)
            page = self._gates[number].metrics()
            for name, (metric, labels) in COUNTERS.items():
                value = sum(metric_sum(page, metric, label) for label in labels)
                last = self._last.get((number, name), 0.0)
                self._totals[name] += value - last if value >= last else value
                self._last[number, name] = value

    def _take(self, number: int, event: dict[str, Any]) -> None:
        if event["kind"] == "flip":
            at = GateProcess.at(event)
            flip = Flip(number, event["unit"], event["before"], event["after"], at, event["line"])
            self._seen[number, event["time"], event["line"]] = flip
        elif event["kind"] == "link_lost" and (found := _LINK.search(event["line"])) is not None:
            self._blamed[Blamed(number, Pair(*found.groups()), GateProcess.at(event))] = None


@contextmanager
def watching(gates: Sequence[GateProcess]) -> Iterator[Watch]:
    """Inside, a thread looks at the gates; once more at the end."""
    watch = Watch(gates)
    watch.begin()
    with repeated(watch.look, _LOOK_S):
        yield watch
    watch.look()
