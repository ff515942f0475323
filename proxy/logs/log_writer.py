"""Writes the lines of the gate's own log from a thread of its own: whoever logs never waits for the output.

Docker's log driver, or a pipe that nobody reads, can keep a write for ever. What waits then is bounded; the
oldest lines are lost, counted, and told of once the output takes lines again.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Protocol

from cellgate.proxy.config.limits import LIMITS, reached

FLUSH_S = 1.0
"""How long the end of the process waits for an output that is slow."""
BUSY_S = 0.05
"""How long to leave a non-blocking output alone that took nothing."""


class LogSink(Protocol):
    """Where bytes go: an unbuffered file. `write` may take a part of them, or nothing (None)."""

    def write(self, data: memoryview, /) -> int | None: ...


def stderr_sink() -> LogSink:
    """Standard error, unbuffered: a thread that is stuck in a buffered one would hold up the exit."""
    if sys.stderr is None:
        # It was closed before we began, and its number may be a client's by now.
        return open(os.devnull, "wb", buffering=0)
    return open(sys.stderr.fileno(), "wb", buffering=0, closefd=False)


def write_all(sink: LogSink, data: bytes) -> None:
    """Write `data` to the end, however long that takes. Raises OSError."""
    rest = memoryview(data)
    while rest:
        written = sink.write(rest)
        if written is None:
            time.sleep(BUSY_S)
        rest = rest[written or 0 :]


class LogWriter(logging.Handler):
    """Takes what is logged at once, and writes it to `sink` when that takes it."""

    def __init__(self, sink: LogSink, form: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(form)
        self._sink = sink
        self._pid = 0
        self._begin()

    def emit(self, record: logging.LogRecord) -> None:
        """Have it written. Never raises and never blocks: a log must not be what stops the gate."""
        try:
            line = self._line(record)
        except Exception as error:
            line = f"a line of the log could not be made: {error!r}\n".encode(errors="backslashreplace")
        if self._pid != os.getpid():
            # Threads do not cross a fork; what was waiting there is written there.
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
        # An output that is gone takes nothing any more, and there is nowhere to say so.
        with suppress(OSError, ValueError):
            write_all(self._sink, line)

    def _about(self, lost: int) -> bytes:
        text = f"{lost} lines of this log are lost: its output took none for a while; look at what reads it"
        return self._line(logging.LogRecord("cellgate", logging.WARNING, "", 0, text, (), None))
