"""What happened, in order: equal for equal seeds. Keeps a digest of all and the last events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from hashlib import blake2b

KEPT = 2000


class Trace:
    """Notes are (virtual time, kind, details); details must have a `repr` that is the same in every run."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._hash = blake2b(digest_size=16)
        self.last: deque[str] = deque(maxlen=KEPT)

    def note(self, kind: str, *details: object) -> None:
        line = f"{self._now_s():.6f} {kind} {' '.join(map(repr, details))}"
        self._hash.update(line.encode())
        self.last.append(line)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()
