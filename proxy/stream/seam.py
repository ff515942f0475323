"""Stop strings and the seam between two units. Pure.

1. An engine looks for stop strings in its own output only. One may have begun in what was shown (SGLang shows
   such text), and only whoever knows both sides can see it end.
2. vLLM shows no text that may yet become a stop string: it holds some characters back. So what was shown may
   end within a token, where no model can go on as it would have. The next unit goes on from a place where
   a token began, says what was shown behind it once more, and must say the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Tokenizers of all kinds begin a token at a space between two words.
_WORD = re.compile(r"(?<=\S) (?=[^\W\d_])")


def token_start(shown: str, stops: Iterable[str]) -> int:
    """Where to go on: at the end of `shown`, or, with stop strings, at the last place where a token began."""
    if all(len(stop) < 2 for stop in stops):
        return len(shown)
    return max((match.start() for match in _WORD.finditer(shown)), default=0)


class SeamStops:
    """Watches the beginning of the second unit's text. `is_over`: no stop string across the seam can come."""

    __slots__ = ("_begun", "_held")

    def __init__(self, shown: str, stops: Iterable[str]) -> None:
        # What is yet to come of each stop string that the shown text may have begun.
        self._begun = [
            stop[size:] for stop in stops for size in range(1, len(stop)) if shown.endswith(stop[:size])
        ]
        self._held = ""

    @property
    def is_over(self) -> bool:
        return not self._begun

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and, when a stop string is complete, its part behind the seam."""
        if not self._begun:
            return text, None
        held = self._held + text
        ended = [rest for rest in self._begun if held.startswith(rest)]
        if ended:
            return "", min(ended, key=len)
        self._begun = [rest for rest in self._begun if rest.startswith(held)]
        self._held = held if self._begun else ""
        return "" if self._begun else held, None

    def flush(self) -> str:
        """What was held back, once nothing more can follow."""
        held, self._held, self._begun = self._held, "", []
        return held
