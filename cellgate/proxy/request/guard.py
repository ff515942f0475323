"""What a request knows of a guardrail: a program of the operator's that sees requests and answers.

Without one there is no guard, and nothing is asked of it. `exchange` is that of exchange.py.
"""

from __future__ import annotations

from typing import Any, Protocol

from cellgate.router.nouns import Ask


class Guard(Protocol):
    """See proxy/guardrail/guardrail.py."""

    def screen_request(self, exchange: Any, ask: Ask) -> bool:
        """Whether the request has to wait for a verdict; then `exchange.screened` is called with it."""

    def screen_answer(self, exchange: Any) -> None:
        """The first part of a unit's answer is about to be sent: hold it until it is allowed, if need be."""

    def tick(self, now: float) -> None:
        """Close connections that have been idle for too long."""

    def close(self) -> None:
        """The gate ends."""
