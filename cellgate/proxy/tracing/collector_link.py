"""Sends something to a collector, and logs once when it begins to fail and once when it works again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from cellgate.proxy.logs.log import Level, log_line


class _FirstWords(logging.Handler):
    """Keeps what the SDK would log at each try: the first of it is the reason, and then it only gives up."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said = threading.local()
        """Spans and metrics are sent by a thread each."""

    def emit(self, record: logging.LogRecord) -> None:
        """Take note of a line."""
        self.said.text = getattr(self.said, "text", "") or record.getMessage()


_WORDS = _FirstWords()


class CollectorLink:
    """Sends `what` (spans, metrics) to `endpoint`, for the section `section` of the configuration."""

    def __init__(
        self, section: str, what: str, endpoint: str, log: Callable[[Level, str], None] = log_line
    ) -> None:
        self._section = section
        self._what = what
        self._endpoint = endpoint
        self._log = log
        self._lost = 0
        # Of the rest of the SDK, which has a word for each span that its full queue drops, nothing.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
        exporters = logging.getLogger("opentelemetry.exporter")
        exporters.setLevel(logging.WARNING)
        exporters.propagate = False
        exporters.handlers[:] = [_WORDS]

    def send(self, send: Callable[[], bool], count: int) -> bool:
        """Send `count` of them by calling `send`, which tells whether they were accepted."""
        _WORDS.said.text = ""
        try:
            accepted = send()
        except Exception as error:
            _WORDS.said.text = repr(error)
            accepted = False
        if accepted:
            if self._lost:
                again = f"accepts {self._what} again; at least {self._lost} were lost"
                self._log("info", f"{self._section}: {self._endpoint} {again}")
            self._lost = 0
        else:
            if not self._lost:
                reason = _WORDS.said.text or "it gave no reason"
                lost = f"{self._what} are dropped until it does; requests are not affected"
                refuses = f"does not accept {self._what} ({reason})"
                self._log("warning", f"{self._section}: {self._endpoint} {refuses}: {lost}")
            self._lost += count
        return accepted
