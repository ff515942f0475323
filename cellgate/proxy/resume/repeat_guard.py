"""Guards against a unit that repeats the text it was given to continue. Pure.

Some builds of llama.cpp send an open last message of the assistant again before they continue it, and others
do not. An answer may also repeat itself. Where new text might be either, nobody can tell which one it is.
"""

from __future__ import annotations


class RepeatGuard:
    """Holds new text back for as long as it may be the text `given`, sent once more."""

    __slots__ = ("_given", "_matched")

    def __init__(self, given: str) -> None:
        self._given = given
        self._matched = 0
        """So many characters came that are those of the text given; all of them are held back."""

    def feed(self, text: str) -> str | None:
        """The text that is certainly new; None: all of the text given has come once more."""
        given, matched = self._given, self._matched
        if text.startswith(given[matched : matched + len(text)]) and given:
            self._matched += len(text)
            return None if self._matched >= len(given) else ""
        return self.flush() + text

    def flush(self) -> str:
        """What was held back, once no more can come: whoever repeats, repeats all."""
        held, self._given, self._matched = self._given[: self._matched], "", 0
        return held
