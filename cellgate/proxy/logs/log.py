"""The log for operators: one line for each event, on stderr, with a UTC timestamp.

1. A line stays one line whatever a unit put into a reason: control characters are escaped.
2. Nothing else in a running gate writes to stderr: a blocked output would block the gate.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING, Literal

import orjson

from cellgate.proxy.logs.log_writer import LogWriter, stderr_sink
from cellgate.proxy.logs.text import one_line, utc

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

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
