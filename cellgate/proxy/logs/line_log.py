"""A log of one line for each record, written off the hot path.

1. A line is formatted at once and written by a separate thread. Formatting in the thread would cost ten times
   as much: two threads that run Python wait for each other, and waiting records leave the CPU caches.
2. A blocked sink costs lines, oldest first and counted, never a request and never unbounded memory.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from cellgate.proxy.logs.log import Level, log_line
from cellgate.proxy.logs.log_writer import LogSink, write_all

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
