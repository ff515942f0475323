"""The beginning of a stream, held until it shows what it is: work, or an error under status 200. Pure."""

from __future__ import annotations

from proxy.failure import Failure, Kind
from proxy.stream.sse import carries_data, end_of_events, is_error, message_of

HELD_BYTES = 64 * 1024


def judge_beginning(held: bytes, *, ended: bool) -> Failure | bool:
    """Whether `held` shows work: True, or not yet, or what is wrong with it.

    `ended`: nothing more will come.
    """
    end = end_of_events(held)
    if end and carries_data(held[:end]):
        if is_error(held[:end]):
            return Failure(Kind.FIRST_EVENT_ERROR, f"its stream began with an error: {message_of(held)}")
        return True
    if ended:
        return Failure(Kind.CLOSED_EARLY, "its stream ended without an event")
    if len(held) > HELD_BYTES:
        return Failure(Kind.GARBAGE, f"its first event is larger than {HELD_BYTES} bytes")
    return False
