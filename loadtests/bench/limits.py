"""Descriptors: thousands of streams need more of them than a process has as a rule."""

import resource

HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
"""As many as a process may have here."""


def raise_files() -> None:
    """Let this process, and those it starts, have as many as there may be."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (HARD, HARD))


def most_streams(spare: int = 200) -> int:
    """Through a router, which has two descriptors for each."""
    return (HARD - spare) // 2
