"""What happened, in order: equal for equal seeds. Keeps a digest of all and the last events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from zlib import crc32

KEPT = 2000


class Trace:
    """Notes are (virtual time, kind, details); details must have a `repr` that is the same in every run."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.last: deque[str] = deque(maxlen=KEPT)
        self.digest = 0

    def note(self, kind: str, *details: object) -> None:
        line = f"{self._now_s():.6f} {kind} {details}"
        self.digest = crc32(line.encode(), self.digest)
        self.last.append(line)
