"""The usage log: one line of JSON for each request that was charged, for billing.

A batch of lines is on the disk (fsync) before the next one is written. A line that a crash has cut off is
ended, so that the next one is whole; who reads the file skips it. A file that was renamed (logrotate) is
left for a new one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import orjson

from cellgate.proxy.doors.bill import Bill
from cellgate.proxy.logs.line_log import LineLog
from cellgate.proxy.logs.text import utc

TEXT_MAX = 256
"""The most characters of a text that a client or an engine chose."""
NAMES = (
    "time",
    "request_id",
    "key",
    "tenant",
    "model",
    "route",
    "status",
    "prompt_tokens",
    "completion_tokens",
    "is_estimated",
    "cost",
)


class UsageRow(NamedTuple):
    """One request as it is logged: its bill, and its cost in the currency of the prices."""

    bill: Bill
    cost: float


def usage_log(path: str, wall: Callable[[], float]) -> LineLog[UsageRow]:
    """The log at `path`, which is appended to."""
    return LineLog(usage_line, SyncedFile(path), wall, "usage log")


def usage_line(at: float, row: UsageRow) -> bytes:
    """One line; docs/limits.md has the fields."""
    bill = row.bill
    values = (
        utc(at),
        bill.request_id,
        bill.key,
        bill.tenant,
        bill.model[:TEXT_MAX],
        bill.route,
        bill.status,
        bill.prompt_tokens,
        bill.completion_tokens,
        bill.is_estimated,
        row.cost,
    )
    return orjson.dumps(dict(zip(NAMES, values, strict=True))) + b"\n"


class SyncedFile:
    """A file to append to; what was written is on the disk. Raises OSError, and opens it anew after that."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self._inode = 0

    def write(self, data: memoryview, /) -> int | None:
        """Write the beginning of `data`; how many bytes of it."""
        if self._fd < 0 or not self._is_current():
            self._open()
        try:
            written = os.write(self._fd, data)
            os.fsync(self._fd)
        except OSError:
            self._close()
            raise
        return written

    def _is_current(self) -> bool:
        try:
            return os.stat(self._path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def _open(self) -> None:
        self._close()
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        found = os.fstat(self._fd)
        self._inode = found.st_ino
        if found.st_size and os.pread(self._fd, 1, found.st_size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def rows_of(path: str) -> Iterator[dict[str, object]]:
    """The lines of a usage log, but for those that are none. Raises OSError."""
    with Path(path).open("rb") as file:
        for line in file:
            try:
                found = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(found, dict) and all(name in found for name in NAMES):
                yield found
