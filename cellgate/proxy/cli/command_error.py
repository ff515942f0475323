"""Why a command did not work."""

from __future__ import annotations


class CommandError(Exception):
    """A command did not work. `str()` is one line that says what to do."""
