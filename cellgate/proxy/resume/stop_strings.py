"""Stop strings across the boundary between two units. Pure.

1. An engine looks for stop strings in its own output only. One may have begun in the text that was sent
   before (SGLang sends such text), so only the gate, which knows both parts, can see it end.
2. vLLM holds back text that may become a stop string, so the text may end within a token, where no model can
   continue as it would have. The next unit starts where a token began and must repeat exactly the text that
   was sent after that point.

Stop strings may be long: all here is linear in their length, and that is bounded (LIMITS.stop_bytes).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# Tokenizers of all kinds begin a token at a space between two words; this finds the last one.
_LAST_WORD = re.compile(r".*\S( )(?=[^\W\d_])", re.DOTALL)


def stops_of(body: dict[str, Any]) -> list[str]:
    """The stop strings that a request asks for."""
    stop = body.get("stop")
    if isinstance(stop, str):
        return [stop]
    return [each for each in stop if isinstance(each, str)] if isinstance(stop, list) else []


def token_start(shown: str, stops: Iterable[str]) -> int:
    """Where to resume: at the end of `shown`, or, with stop strings, where its last token began."""
    if all(len(stop) < 2 for stop in stops):
        return len(shown)
    found = _LAST_WORD.match(shown)
    return found.start(1) if found else 0


class StopMatch:
    """How much of one stop string the text so far ends with (Knuth, Morris and Pratt 1977)."""

    __slots__ = ("_borders", "size", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.size = 0
        """The longest beginning of `stop` that is an end of the text."""
        # Of each beginning of `stop`: the longest shorter one that is also an end of it.
        self._borders = [0]
        for char in stop[1:]:
            self.take(char)
            self._borders.append(self.size)
        self.size = 0

    def take(self, char: str) -> bool:
        """One more character of the text; True: it ends with the whole of `stop`."""
        size, stop, borders = self.size, self.stop, self._borders
        while size and (size == len(stop) or stop[size] != char):
            size = borders[size - 1]
        self.size = size = size + (stop[size] == char)
        return size == len(stop)


class BoundaryStops:
    """Watches the beginning of the second unit's text. `is_over`: no stop string across the boundary can
    come.
    """

    __slots__ = ("_begun", "_held", "stop")

    def __init__(self, shown: str, stops: Iterable[str]) -> None:
        self.stop = ""
        """The stop string that is complete."""
        self._held = ""
        self._begun = []
        for stop in stops:
            if len(stop) < 2:
                # It cannot be on both sides.
                continue
            match = StopMatch(stop)
            for char in shown[1 - len(stop) :]:
                match.take(char)
            if match.size:
                self._begun.append(match)

    @property
    def is_over(self) -> bool:
        return not self._begun

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that may be sent now, and, when a stop string is complete, its part after the
        boundary.
        """
        if not self._begun:
            return text, None
        begun, before = self._begun, len(self._held)
        self._held += text
        for behind, char in enumerate(text, before + 1):
            if complete := next((match for match in begun if match.take(char)), None):
                self.stop = complete.stop
                return "", self._held[:behind]
            # A match that is longer than the text after the boundary began before it.
            begun = [match for match in begun if match.size > behind]
            if not begun:
                break
        self._begun = begun
        return ("", None) if begun else (self.flush(), None)

    def flush(self) -> str:
        """What was held back, once nothing more can follow."""
        held, self._held, self._begun = self._held, "", []
        return held
