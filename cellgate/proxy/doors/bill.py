"""What one request has used: what limits are settled with, and what the usage log says."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Bill(NamedTuple):
    """What one request was charged with, and what it has used. Tokens are whole numbers.

    `model` has answered; `model_charged` is the one whose price it was charged with: another one, if it was
    served by a fallback.

    `at` is when it was charged, in seconds since 1970; `is_estimated`: its engine has not said what it used.
    """

    request_id: str
    key: str
    tenant: str
    model: str
    model_charged: str
    route: str
    status: int
    at: float
    prompt_charged: int
    completion_charged: int
    prompt_tokens: int
    completion_tokens: int
    is_estimated: bool


class Accounts(Protocol):
    """Where requests are accounted for: the ledger of this process, or that of the control process."""

    def spent(self, key: str, tenant: str, model: str, tokens: int) -> None:
        """The answer of a request that is in flight has so many tokens more than it was charged with."""

    def settle(self, bill: Bill) -> None:
        """A request that was charged is over."""

    def refused(self, tenant: str, limit: str) -> None:
        """A request was refused at the door: of this limit nothing is left."""
