"""The numbers of a publisher's messages: what is missing, what came twice, who has begun anew. Pure.

A process counts its messages from 0. Those of a replay come on another connection than those that are
published, which may come a second time behind it; but published ones never run backwards within one process.
"""

from __future__ import annotations

from enum import Enum


class NumberStep(Enum):
    """What to do with a published message."""

    APPLY = "apply"
    SKIP = "skip"
    """A replay had it."""
    GAP = "gap"
    """Some before it are missing."""
    RESTART = "restart"
    """It is of another process."""


class Numbers:
    """The numbers that one publisher has used. `next` is the number of the next message; None: any."""

    __slots__ = ("_published", "next")

    def __init__(self) -> None:
        self.next: int | None = None
        self._published = -1

    def begin_anew(self) -> None:
        """Nothing is known of its messages."""
        self.next = None
        self._published = -1

    def take(self, number: int) -> NumberStep:
        """A message was published."""
        if number <= self._published:
            return NumberStep.RESTART
        self._published = number
        if self.next is None or number == self.next:
            return NumberStep.APPLY
        return NumberStep.SKIP if number < self.next else NumberStep.GAP
