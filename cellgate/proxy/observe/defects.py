"""Defects, that is unexpected exceptions: none leaves a client without an answer, and each is logged.

1. `guarded` wraps all calls into an exchange: by its client, its unit, the queue, a timer. An exception
   ends this exchange and no other.
2. All of them, and those of tasks, are passed to the loop's exception handler: one log line, and a count.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TypeVarTuple

from cellgate.proxy.observe.log import log_line

Args = TypeVarTuple("Args")
REPORT_EVERY_S = 10.0
"""A defect is logged at most once in this time for each place in the code."""
PLACES_KEPT = 64
_DEFECT_FRAMES = 3


class Defects:
    """Logs the defects of one process, and counts them."""

    def __init__(
        self, log: Callable[..., None] = log_line, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.count = 0
        self._log = log
        self._now = now
        self._reported_at: dict[str, tuple[float, int]] = {}

    def handle(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's exception handler."""
        error, what = context.get("exception"), context.get("message", "")
        if task := context.get("task") or context.get("future"):
            what = f"{what} ({getattr(task, 'get_name', lambda: task)()})"
        if isinstance(error, Exception) and not isinstance(error, OSError):
            self.count += 1
        self._report(what, error)

    def _report(self, what: str, error: BaseException | None) -> None:
        place, now = what if error is None else f"{type(error).__name__} {where(error)}", self._now()
        reported_at, silent = self._reported_at.get(place, (-REPORT_EVERY_S, 0))
        if now - reported_at < REPORT_EVERY_S:
            self._reported_at[place] = reported_at, silent + 1
            return
        if len(self._reported_at) >= PLACES_KEPT:
            del self._reported_at[next(iter(self._reported_at))]
        self._reported_at[place] = now, 0
        more = f"; {silent} more of these since the last report" if silent else ""
        self._log("error", f"{what}: {error!r} at {place}{more}" if error is not None else f"{what}{more}")


class Guarded(Protocol):
    """An object with callbacks that can be ended when one fails."""

    def crashed(self, error: Exception) -> None:
        """A callback has failed: end. Never raises."""


def guarded(whose: Guarded, callback: Callable[[*Args], object], *args: *Args) -> None:
    """Call `callback` of `whose`."""
    try:
        callback(*args)
    except Exception as error:
        whose.crashed(error)


def report_defect(loop: asyncio.AbstractEventLoop, what: str, error: Exception) -> None:
    """Log and count a defect of the gate, through the loop's exception handler."""
    loop.call_exception_handler({"message": what, "exception": error})


def where(error: BaseException) -> str:
    """The innermost frames of an exception, the last one first."""
    frames = traceback.extract_tb(error.__traceback__)[-_DEFECT_FRAMES:]
    return " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))


DEFECTS = Defects()
"""Those of this process."""
