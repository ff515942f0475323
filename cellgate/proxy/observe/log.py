"""What the gate writes: the log for operators, one line for each event, on stderr, with a UTC timestamp; and
the access log, one line for each finished request.

1. A line stays one line whatever a unit put into a reason: control characters are escaped.
2. Nothing else in a running gate writes to stderr: a blocked output would block the gate.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar, TypeVarTuple

import orjson

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.config.settings import LogFormat
from cellgate.proxy.observe.text import one_line
from cellgate.router.nouns import Outcome

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_MILLISECONDS = tuple(f".{number:03}Z" for number in range(1000))


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


Level = Literal["info", "warning", "error"]

_LOGGER = logging.getLogger("cellgate")
_LEVELS: dict[Level, int] = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def log_line(level: Level, message: str) -> None:
    """Log one line."""
    _LOGGER.log(_LEVELS[level], "%s", message)


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
            "message": _from(record) + record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


def _from(record: logging.LogRecord) -> str:
    return "" if record.name == _LOGGER.name else f"{record.name}: "


# Defects, that is unexpected exceptions: none leaves a client without an answer, and each is logged.
#
# 1. `guarded` wraps all calls into an exchange: by its client, its unit, the queue, a timer. An exception
#    ends this exchange and no other.
# 2. All of them, and those of tasks, are passed to the loop's exception handler: one log line, and a count.


Args = TypeVarTuple("Args")

REPORT_EVERY_S = 10.0
"""A defect is logged at most once in this time for each place in the code."""
PLACES_KEPT = 64
_FRAMES = 3


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
        told_at, silent = self._reported_at.get(place, (-REPORT_EVERY_S, 0))
        if now - told_at < REPORT_EVERY_S:
            self._reported_at[place] = told_at, silent + 1
            return
        if len(self._reported_at) >= PLACES_KEPT:
            del self._reported_at[next(iter(self._reported_at))]
        self._reported_at[place] = now, 0
        more = f"; {silent} more of these since the last report" if silent else ""
        self._log("error", f"{what}: {error!r} at {place}{more}" if error is not None else f"{what}{more}")


def where(error: BaseException) -> str:
    """The innermost frames of an exception, the last one first."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))


DEFECTS = Defects()
"""Those of this process."""


# A log of one line for each record, written off the hot path.
#
# 1. A line is formatted at once and written by a separate thread. Formatting in the thread would cost ten
#    times as much: two threads that run Python wait for each other, and waiting records leave the CPU caches.
# 2. A blocked sink costs lines, oldest first and counted, never a request and never unbounded memory.


Record = TypeVar("Record")

KEPT = 16_384
"""Lines that wait for the sink at most; some 6 MiB."""
CLOSE_TIMEOUT_S = 2.0
COMPLAIN_EVERY_S = 10.0


class LineLog(Generic[Record]):
    """Writes records to `sink`, as `form` makes lines of them; without a form nothing is written. `wall` is
    the wall clock (seconds since 1970), `title` what it is called where it complains.
    """

    def __init__(
        self,
        form: Callable[[float, Record], bytes] | None,
        sink: LogSink,
        wall: Callable[[], float],
        title: str,
        log: Callable[[Level, str], None] = log_line,
    ) -> None:
        self._sink = sink
        self._wall = wall
        self._title = title
        self._log = log
        self._format = form
        self._pending: deque[bytes] = deque(maxlen=KEPT)
        # One batch is being written and one may wait. While both are taken, lines stay in `_pending`.
        self._batches: queue.Queue[list[bytes] | None] = queue.Queue(maxsize=1)
        name = f"cellgate-{title.replace(' ', '-')}"
        self._writer = threading.Thread(target=self._run, name=name, daemon=True)
        # Two counters, because each is written by one thread.
        self._overflowed = 0
        self._failed = 0
        self._trouble = "it is stuck"
        self._complained = 0
        self._complained_at = -COMPLAIN_EVERY_S
        if self._format is not None:
            self._writer.start()

    @property
    def dropped(self) -> int:
        """Lines that were never written, because the sink was blocked or broken."""
        return self._overflowed + self._failed

    def write(self, record: Record) -> None:
        """Take note of a record."""
        if self._format is None:
            return
        if len(self._pending) == KEPT:
            self._overflowed += 1
        self._pending.append(self._format(self._wall(), record))

    def flush(self) -> None:
        """Pass pending lines to the writer. Never blocks; must be called a few times a second."""
        self._complain()
        if not self._pending:
            return
        try:
            self._batches.put_nowait(list(self._pending))
        except queue.Full:
            return
        self._pending.clear()

    def close(self) -> None:
        """Write what is left. Blocks for at most CLOSE_TIMEOUT_S; meant for the end of the process."""
        if not self._writer.is_alive():
            return
        patience = CLOSE_TIMEOUT_S / 3
        try:
            self._batches.put(list(self._pending), timeout=patience)
            self._pending.clear()
            self._batches.put(None, timeout=patience)
        except queue.Full:
            return
        self._writer.join(patience)

    def _complain(self) -> None:
        lost, now = self.dropped - self._complained, self._wall()
        if lost and now - self._complained_at >= COMPLAIN_EVERY_S:
            self._complained, self._complained_at = self.dropped, now
            self._log(
                "warning",
                f"{self._title}: {lost} lines lost, its output does not accept them: {self._trouble}",
            )

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                write_all(self._sink, b"".join(batch))
            except Exception as error:
                # Try the next batch after any error: an empty log would look like no traffic.
                self._failed += len(batch)
                self._trouble = str(error) or repr(error)


# The record of one finished request: the source of metrics and of the access log.


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


TEXT_MAX = 256
"""The most characters of a text that the client chose (path, model, id)."""


def stdout_sink() -> LogSink:
    """Standard output, unbuffered: a thread that blocks in a buffered one would delay the exit."""
    return open(sys.stdout.fileno(), "wb", buffering=0, closefd=False)


class AccessLog(LineLog[Finished]):
    """Writes finished requests to `sink`. `wall` is the wall clock (seconds since 1970)."""

    def __init__(
        self,
        form: LogFormat,
        sink: LogSink,
        wall: Callable[[], float],
        log: Callable[[Level, str], None] = log_line,
    ) -> None:
        super().__init__(_FORMATS.get(form), sink, wall, "access log", log)


def json_line(at: float, record: Finished) -> bytes:
    """The record as one JSON object (docs/logs.md); times to a tenth of a millisecond."""
    path, model, ttft_s = record.path, record.model, record.ttft_s
    if len(path) + len(model) > TEXT_MAX:
        path, model = _short(path), _short(model)
    # Rounded in a tenth of the time that `round` takes.
    fields = {
        "time": utc(at),
        "request_id": record.request_id,
        "peer": record.peer,
        "method": record.method,
        "path": path,
        "route": record.route,
        "model": model,
        "status": record.status,
        "code": record.code,
        "unit": record.unit,
        "outcome": record.outcome._value_,
        "attempts": record.attempts,
        "continued": record.continued,
        "ttft_s": None if ttft_s is None else int(ttft_s * 10_000 + 0.5) / 10_000,
        "duration_s": int(record.duration_s * 10_000 + 0.5) / 10_000,
        "events": record.events,
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
        "rank": record.rank,
    }
    try:
        # A copy: the buffer of orjson holds at least 4 KB for each waiting line.
        return orjson.dumps(fields) + b"\n"
    except TypeError:
        # A lone surrogate: orjson refuses it, json escapes it.
        return json.dumps(fields).encode() + b"\n"


def console_line(at: float, record: Finished) -> bytes:
    """The record as a short aligned line for people."""
    ttft = "-" if record.ttft_s is None else f"{record.ttft_s:.3f}s"
    outcome = f"{record.outcome.value} ({record.code})" if record.code else record.outcome.value
    parts = (
        utc(at),
        str(record.status),
        f"{record.method:<4} {_short(record.path):<20}",
        f"{record.unit or '-':<8} {outcome:<12}",
        f"ttft {ttft:<7} total {record.duration_s:.3f}s",
        f"{record.events} events {_size(record.bytes_in)} in {_size(record.bytes_out)} out",
        f"{record.peer} {_short(record.request_id)}",
        f"{record.attempts} attempts" if record.attempts > 1 else "",
        f"continued {record.continued} times" if record.continued else "",
    )
    return one_line("  ".join(parts).rstrip()).encode(errors="backslashreplace") + b"\n"


_FORMATS: dict[LogFormat, Callable[[float, Finished], bytes]] = {"json": json_line, "console": console_line}


def _short(text: str) -> str:
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"


def _size(n: int) -> str:
    return f"{n}B" if n < 10_000 else f"{n / 1000:.0f}kB" if n < 10_000_000 else f"{n / 1_000_000:.0f}MB"
