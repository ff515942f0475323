"""The access log: one line for each finished request, written off the hot path.

1. A line is formatted at once and written by a separate thread. Formatting in the thread would cost ten
   times as much: two threads that run Python wait for each other, and waiting records leave the CPU caches.
2. A blocked sink costs lines, oldest first and counted, never a request and never unbounded memory.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import orjson

from cellgate.proxy.config.settings import LogFormat
from cellgate.proxy.observe.log import Level, LogSink, log_line, utc, write_all
from cellgate.proxy.observe.text import one_line
from cellgate.router.nouns import Outcome

Record = TypeVar("Record")
LINES_KEPT = 16_384
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
        self._pending: deque[bytes] = deque(maxlen=LINES_KEPT)
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
        if self._format is None:
            return
        if len(self._pending) == LINES_KEPT:
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


class Finished(NamedTuple):
    """One request, from its first byte to the last of its answer.

    `status` is what the client was sent (499: it left before), `code` the failure-table row or empty,
    `unit` the last unit that answered (empty when none did), `attempts` the number of attempts, `resumed`
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
    resumed: int
    ttft_s: float | None
    duration_s: float
    events: int
    bytes_in: int
    bytes_out: int
    rank: int | None = None


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


LEFT_STATUS = 499
"""The status in the record of a request whose client left before it was sent one."""
TEXT_MAX = 256
"""The most characters of a text that the client chose (path, model, id)."""


def stdout_sink() -> LogSink:
    """Standard output, unbuffered: a thread that blocks in a buffered one would delay the exit."""
    return open(sys.stdout.fileno(), "wb", buffering=0, closefd=False)


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
        "continued": record.resumed,
        "ttft_s": None if ttft_s is None else int(ttft_s * 10_000 + 0.5) / 10_000,
        "duration_s": int(record.duration_s * 10_000 + 0.5) / 10_000,
        "events": record.events,
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
        "rank": record.rank,
    }
    try:
        # A copy: the buffer of orjson holds at least 4 KB for each waiting line.
        line = orjson.dumps(fields)
        # What is not ASCII may be a control of terminals, or turn a line round: it is escaped.
        return line + b"\n" if line.isascii() else json.dumps(fields).encode() + b"\n"
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
        f"continued {record.resumed} times" if record.resumed else "",
    )
    return one_line("  ".join(parts).rstrip()).encode(errors="backslashreplace") + b"\n"


_FORMATS: dict[LogFormat, Callable[[float, Finished], bytes]] = {"json": json_line, "console": console_line}


def _short(text: str) -> str:
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"


def _size(n: int) -> str:
    return f"{n}B" if n < 10_000 else f"{n / 1000:.0f}kB" if n < 10_000_000 else f"{n / 1_000_000:.0f}MB"
