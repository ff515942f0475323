"""The number of decode slots of an engine (vLLM's `--max-num-seqs`), measured from its reports. Pure.

An engine at that limit has requests that wait, and as many that run in one report as in the next, and never
had more. While its KV cache is full it looks alike, but what fits there changes with every request.
"""

from __future__ import annotations

from math import inf

from cellgate.router.nouns import Load

KV_FULL = 0.95
"""With so large a share in use, requests may wait for KV cache."""


class Seats:
    """The limit of one engine; infinite until it was met."""

    __slots__ = ("_most", "_running", "limit")

    def __init__(self) -> None:
        self.limit = inf
        self._running = self._most = 0

    def learn(self, load: Load) -> None:
        """Take over a report."""
        if load.running > self.limit:
            self.limit = inf
        self._most = max(self._most, load.running)
        if not load.waiting or load.kv_use >= KV_FULL:
            self._running = 0
            return
        if load.running == self._running == self._most > 0:
            self.limit = float(load.running)
        self._running = load.running

    def reset(self) -> None:
        """The engine has restarted, maybe with another limit."""
        self.limit, self._running, self._most = inf, 0, 0
