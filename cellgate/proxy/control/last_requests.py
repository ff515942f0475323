"""The last requests of a gate, for what predicts others of them: an extra does."""

from __future__ import annotations

from collections import deque

LAST_REQUESTS_MAX = 1024
"""Three replays of so many take about 3 ms."""


class LastRequests:
    """Of those that were answered: when the attempt was opened, showed its first token and ended, the tokens
    of its prompt that had to be computed, and its unit. `waited`, of those that had to wait: the unit, when
    the attempt was opened, and how long they had waited.
    """

    def __init__(self) -> None:
        self.answered: deque[tuple[float, float, float, int, str]] = deque(maxlen=LAST_REQUESTS_MAX)
        self.waited: deque[tuple[tuple[str, float], float]] = deque(maxlen=LAST_REQUESTS_MAX)
