"""What the simulated units know of a crowd: how much is inside, what they made for it, when clients left.

What must stay true: the units are asked and not the gate, which might only say that it let go.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from loadtests.kit.waiting import repeated
from loadtests.simunit.process import SimUnit

_POLL_S = 0.005


class Engines:
    """The requests whose client has left, counted whenever `look` is called, as the units see it."""

    def __init__(self, units: Sequence[SimUnit]) -> None:
        self._units = units
        self._aborts: list[int] = []
        self._seen_at: list[float] = []
        self._aborts_before = self._count("ended", "abort")
        self._tokens_before = self._count("generation_tokens")

    def inside(self) -> int:
        """Requests that run or wait at the units now."""
        return sum(state["running"] + state["waiting"] for state in self._states())

    def tokens(self) -> int:
        """Tokens generated since the watch began."""
        return self._count("generation_tokens") - self._tokens_before

    def delays_s(self, left_at: Sequence[float]) -> list[float]:
        """For the nth client that left, how long until the units had seen n aborts; sorted.

        Shorter than `left_at` by the requests whose clients left before an engine had them.
        """
        indices = [bisect_left(self._aborts, number) for number in range(1, len(left_at) + 1)]
        seen = [self._seen_at[index] for index in indices if index < len(self._seen_at)]
        return sorted(at - left for at, left in zip(seen, sorted(left_at), strict=False))

    def look(self) -> None:
        """See how many have left by now."""
        self._aborts.append(self._count("ended", "abort") - self._aborts_before)
        self._seen_at.append(time.monotonic())

    def _count(self, *path: str) -> int:
        total = 0
        for state in self._states():
            value: Any = state["counts"]
            for key in path:
                value = value[key]
            total += value
        return total

    def _states(self) -> list[dict[str, Any]]:
        return [unit.state() for unit in self._units]


@contextmanager
def watched(units: Sequence[SimUnit]) -> Iterator[Engines]:
    """Inside, a thread looks on."""
    engines = Engines(units)
    with repeated(engines.look, _POLL_S):
        yield engines
