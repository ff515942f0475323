"""The record of one finished request: the source of metrics and of the access log."""

from __future__ import annotations

from typing import NamedTuple

from cellgate.router.nouns import Outcome

LEFT_STATUS = 499
"""The status in the record of a request whose client left before it was sent one."""


class Finished(NamedTuple):
    """One request, from its first byte to the last of its answer.

    `status` is what the client was sent (499: it left before), `code` the failure-table row or empty,
    `unit` the last unit that answered (empty when none did), `attempts` the number of attempts, `continued`
    how often another unit resumed a broken stream, `rank` the data parallel rank of that unit (None: its
    engine has chosen, or has none).
    """

    request_id: str
    peer: str
    method: str
    path: str
    route: str
    model: str
    status: int
    code: str
    unit: str
    outcome: Outcome
    attempts: int
    continued: int
    ttft_s: float | None
    duration_s: float
    events: int
    bytes_in: int
    bytes_out: int
    rank: int | None = None
