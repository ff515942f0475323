"""What was read again while the gate runs, and whether it was good."""

from __future__ import annotations

from cellgate.proxy.logs.log import log_line
from cellgate.proxy.process.tallies import RELOADS, tally


def taken(what: str) -> None:
    """New files are in use."""
    tally(RELOADS, what, "taken")


def refused(what: str, *problems: str) -> None:
    """New files are not used, and what was in use stays: one line in the log for each reason."""
    tally(RELOADS, what, "refused")
    for problem in problems:
        log_line("error", f"{what} not reloaded, what was in use stays: {problem}")
