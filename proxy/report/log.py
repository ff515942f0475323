"""The operator's log: one line per thing worth knowing, on stderr, each with a UTC timestamp.

A line stays one line whatever a unit put into a reason: control characters are escaped.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal

import orjson

Level = Literal["info", "warning", "error"]

_LOGGER = logging.getLogger("cellgate")
_LEVELS: dict[Level, int] = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


def log_line(level: Level, message: str) -> None:
    """Tell the operator something."""
    _LOGGER.log(_LEVELS[level], "%s", message)


def configure(form: Literal["console", "json"]) -> None:
    """Say how lines look. Called once at start; what libraries warn about comes out in the same form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Console())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    _LOGGER.setLevel(logging.INFO)


_MILLISECONDS = tuple(f".{number:03}Z" for number in range(1000))


def utc(timestamp: float) -> str:
    """A wall-clock time as ISO 8601 in UTC, to the millisecond."""
    second = int(timestamp)
    return _second(second) + _MILLISECONDS[int((timestamp - second) * 1000)]


@lru_cache(maxsize=4)
def _second(timestamp: int) -> str:
    """Lines come many a second, and a date takes as long to write as all the rest of one."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat().removesuffix("+00:00")


def one_line(text: str) -> str:
    """`text` with its control characters escaped."""
    return text if text.isprintable() else text.translate(_ESCAPES)


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
