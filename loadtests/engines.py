"""What the simulated units know of a crowd: how much is inside, what they made for it, when clients left.

What must stay true: the units are asked and not the gate, which might only say that it let go.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from loadtests.simunit.process import SimUnit
from loadtests.waiting import repeated

_POLL_S = 0.005


class Engines:
    """A context manager: inside, a thread counts the requests whose client has left, as the units see it."""

    def __init__(self, units: Sequence[SimUnit]) -> None:
        self._units = units
        self._watching = repeated(self._look, _POLL_S)
        self._aborts: list[int] = []
        self._seen_at: list[float] = []

    def __enter__(self) -> "Engines":
        self._aborts_before, self._tokens_before = (
            self._count("ended", "abort"),
            self._count("generation_tokens"),
        )
        self._watching.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._watching.__exit__(None, None, None)

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

    def _look(self) -> None:
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
