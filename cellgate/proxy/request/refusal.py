"""What the head of a refusal tells the client of when to try again, and why. Pure."""

from __future__ import annotations

from cellgate.proxy.wire.failure import Failure


def refusal_lines(failure: Failure, reason: str = "") -> bytes:
    """The header lines of a row of the failure table; `reason`: a better word than the row has."""
    row, lines = failure.kind.row, failure.lines
    if row.retry_after_s is not None:
        lines += b"retry-after: %d\r\n" % (failure.retry_after_s or row.retry_after_s)
    if row.retry_after_s is not None or row.is_final:
        lines += b"x-cellgate-reason: %b\r\n" % (reason or failure.kind.value).encode()
    if row.is_final:
        # OpenAI's clients retry twice after any 5xx unless this header says no.
        lines += b"x-should-retry: false\r\n"
    return lines
