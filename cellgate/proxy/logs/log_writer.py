"""Writes the gate's log from a separate thread, so that logging never waits for the output.

Docker's log driver, or a pipe without a reader, can block a write for ever. The number of waiting lines is
limited; the oldest are dropped, counted, and reported once the output accepts lines again.
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
"""How long the exit of the process waits for a slow output."""
BUSY_S = 0.05
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
            time.sleep(BUSY_S)
        rest = rest[written or 0 :]


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
