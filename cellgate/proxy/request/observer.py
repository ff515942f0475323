"""Observers of the steps of a request, which change nothing. Most requests have none.

Times are the loop's. An observer must not raise: an exception counts as a defect of the request.
"""

from __future__ import annotations

from typing import Protocol

from cellgate.proxy.logs.record import Finished
from cellgate.proxy.metrics.continuations import ContinuationResult
from cellgate.router.cost_model import Usage
from cellgate.router.nouns import Outcome
from cellgate.router.unit_state import Lease


class Observer(Protocol):
    """An observer of one request. `unit_lines` are header lines for the unit of the attempt in flight."""

    unit_lines: bytes

    def waited(self, since: float, until: float) -> None:
        """It was queued."""

    def attempted(self, lease: Lease, before: int) -> None:
        """An attempt on a unit begins, after `before` others."""

    def replied(self, status: int) -> None:
        """The unit has sent the head of its reply."""

    def failing(self, code: str) -> None:
        """The attempt in flight fails, for this reason."""

    def attempt_over(self, lease: Lease, outcome: Outcome, at: float) -> None:
        """The attempt in flight is over."""

    def completed(self, usage: Usage | None) -> None:
        """A generation has ended, whole; `usage` is what its unit told of its tokens."""

    def broke(self, unit: str, at: float) -> None:
        """A unit broke its answer after the commit."""

    def settled(self, result: ContinuationResult) -> None:
        """The result of the first break without a result is known."""

    def over(self, record: Finished, at: float) -> None:
        """The response has ended."""
