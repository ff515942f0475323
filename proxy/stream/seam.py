"""Stop strings across a seam: begun in what one unit said, completed by the next. Pure.

An engine looks for stop strings in its own output only. vLLM shows no text that may yet become one, SGLang
does; so one may have begun in what was shown, and only whoever knows both sides can see it end.
"""

from __future__ import annotations

from collections.abc import Iterable


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
