"""The log for operators: one line for each event, on stderr, with a UTC timestamp.

1. A line stays one line whatever a unit put into a reason: control characters are escaped.
2. Nothing else in a running gate writes to stderr: a blocked output would block the gate.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol

import orjson

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.observe.text import one_line

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_MILLISECONDS = tuple(f".{number:03}Z" for number in range(1000))


class LogWriter(logging.Handler):
    """Accepts lines at once, and writes them to `sink` when possible."""

    def __init__(self, sink: LogSink, form: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(form)
        self._sink = sink
        self._pid = 0
        self._begin()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line. Never raises and never blocks."""
        try:
            line = self._line(record)
        except Exception as error:
            line = f"a line of the log could not be made: {error!r}\n".encode(errors="backslashreplace")
        if self._pid != os.getpid():
            # Threads do not survive a fork; lines that waited in the parent are written by the parent.
            self._begin()
            threading.Thread(target=self._run, name="cellgate-log", daemon=True).start()
            self._pid = os.getpid()
        if len(self._waiting) >= LIMITS.log_lines:
            self._lost += 1
            reached("log_lines")
            with suppress(IndexError):
                self._waiting.popleft()
        self._waiting.append(line)
        self._wake.set()

    def flush(self) -> None:
        """Wait until all is written, for at most FLUSH_S."""
        until = time.monotonic() + FLUSH_S
        while self._pid == os.getpid() and (self._waiting or self._busy) and time.monotonic() < until:
            time.sleep(0.001)

    def _begin(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._wake = threading.Event()
        self._busy = False
        self._lost = 0

    def _line(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def _run(self) -> None:
        while self._wake.wait():
            self._busy = True
            self._wake.clear()
            while self._waiting:
                self._write(self._waiting.popleft())
                if self._lost:
                    lost, self._lost = self._lost, 0
                    self._write(self._about(lost))
            self._busy = False

    def _write(self, line: bytes) -> None:
        # The output is closed, and there is nowhere to report that.
        with suppress(OSError, ValueError):
            write_all(self._sink, line)

    def _about(self, lost: int) -> bytes:
        text = f"{lost} lines of this log are lost: its output took none for a while; look at what reads it"
        return self._line(logging.LogRecord("cellgate", logging.WARNING, "", 0, text, (), None))


def utc(timestamp: float) -> str:
    """A wall-clock time as ISO 8601 in UTC, to the millisecond."""
    second = int(timestamp)
    return _second(second) + _MILLISECONDS[int((timestamp - second) * 1000)]


@lru_cache(maxsize=4)
def _second(timestamp: int) -> str:
    """Cached: there are many lines in a second, and formatting a date takes as long as the rest of a line."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat().removesuffix("+00:00")


# Writes the gate's log from a separate thread, so that logging never waits for the output.
#
# Docker's log driver, or a pipe without a reader, can block a write for ever. The number of waiting lines
# is limited; the oldest are dropped, counted, and reported once the output accepts lines again.


FLUSH_S = 1.0
"""How long the exit of the process waits for a slow output."""
LOG_BUSY_S = 0.05
"""The pause after a non-blocking output has accepted nothing."""


class LogSink(Protocol):
    """Where bytes go: an unbuffered file. `write` may take a part of them, or nothing (None)."""

    def write(self, data: memoryview, /) -> int | None: ...


def stderr_sink() -> LogSink:
    """Standard error, unbuffered: a thread that blocks in a buffered one would delay the exit."""
    if sys.stderr is None:
        # It was closed before the start, and its descriptor may be a client's by now.
        return open(os.devnull, "wb", buffering=0)
    return open(sys.stderr.fileno(), "wb", buffering=0, closefd=False)


def write_all(sink: LogSink, data: bytes) -> None:
    """Write `data` to the end, however long that takes. Raises OSError."""
    rest = memoryview(data)
    while rest:
        written = sink.write(rest)
        if written is None:
            time.sleep(LOG_BUSY_S)
        rest = rest[written or 0 :]


Level = Literal["info", "warning", "error"]

_LOGGER = logging.getLogger("cellgate")
_LOG_LEVELS: dict[Level, int] = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def log_line(level: Level, message: str) -> None:
    _LOGGER.log(_LOG_LEVELS[level], "%s", message)


def configure(form: Literal["console", "json"]) -> None:
    """Set the format of lines. Called once at start; warnings get the same format."""
    root = logging.getLogger()
    root.handlers[:] = [LogWriter(stderr_sink(), _Json() if form == "json" else _Console())]
    root.setLevel(logging.WARNING)
    _LOGGER.setLevel(logging.INFO)
    logging.captureWarnings(True)
    threading.excepthook = _thread_ended
    sys.unraisablehook = _unraisable


def _thread_ended(args: threading.ExceptHookArgs) -> None:
    about = (args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
    _LOGGER.error("a thread ended by an exception", exc_info=about)


def _unraisable(args: UnraisableHookArgs) -> None:
    about = (args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
    _LOGGER.error("%s", args.err_msg or "an exception that could not be raised", exc_info=about)


class _Console(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = f"{utc(record.created)} {record.levelname:<7} {_from(record)}{one_line(record.getMessage())}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": utc(record.created),
            "level": record.levelname.lower(),
            "message": _from(record) + one_line(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


def _from(record: logging.LogRecord) -> str:
    return "" if record.name == _LOGGER.name else f"{record.name}: "
