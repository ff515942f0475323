"""Who is told of the steps of a request, without a say in it. Most requests have nobody.

Times are the loop's. Nothing here may fail: what it raises is taken for a defect of the request.
"""

from __future__ import annotations

from typing import Protocol

from cellgate.proxy.logs.record import Finished
from cellgate.proxy.metrics.continuations import ContinuationResult
from cellgate.router.nouns import Outcome
from cellgate.router.unit_state import Lease


class Observer(Protocol):
    """Of one request. `unit_lines` are header lines for the unit of the attempt in flight."""

    unit_lines: bytes

    def waited(self, since: float, until: float) -> None:
        """It had a place in the queue."""

    def attempted(self, lease: Lease, before: int) -> None:
        """A unit is asked, after `before` others were."""

    def replied(self, status: int) -> None:
        """The unit has sent the head of its reply."""

    def failing(self, code: str) -> None:
        """The attempt in flight fails, for this reason."""

    def attempt_over(self, lease: Lease, outcome: Outcome, at: float) -> None:
        """The attempt in flight is over."""

    def broke(self, unit: str, at: float) -> None:
        """A unit broke what it had begun to answer."""

    def settled(self, result: ContinuationResult) -> None:
        """It is known what came of the first break of which it was not."""

    def over(self, record: Finished, at: float) -> None:
        """The response has ended."""
