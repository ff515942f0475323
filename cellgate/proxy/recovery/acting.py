"""Which gate acts. Of several gates that could recover the same unit, one at a time does.

A gate stands for the cells that it could act for. One of the gates that stand for a cell acts for it, and
claims each attempt before it begins. The others hear of the claim, and count it as if it were their own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Claim:
    """An attempt on a unit that a gate has begun. `id` is that of the audit log; the unit is given `rest_s`
    to come back, of which `age_s` are over.
    """

    unit: str
    cell: str
    gate: str
    id: str
    attempt: int
    rest_s: float
    age_s: float = 0.0


class NotActingError(Exception):
    """An attempt must not begin: another gate acts for the cell, or nobody knows which. Its text says why."""


class Acting(Protocol):
    """The agreement of gates on who acts."""

    @property
    def trouble(self) -> str:
        """Why no gate is known to act; empty: one is."""

    def stand_for(self, cells: Collection[str], /) -> None:
        """This gate could act for these cells now, and for no others."""

    def acts_for(self, cell: str, /) -> bool:
        """Whether this gate acts for the cell."""

    def news(self) -> list[Claim]:
        """The claims of other gates since the last call."""

    async def claim(self, claim: Claim, /) -> int:
        """Claim an attempt right before it begins. Returns its fencing token: a later one is larger,
        whichever gate has it. Raises NotActingError.
        """

    async def withdraw(self, claim: Claim, /) -> None:
        """A claimed attempt was not begun after all."""

    async def close(self) -> None:
        """Let another gate act, at once."""


class Alone:
    """A gate that shares nothing with others: it acts for all of its cells."""

    trouble = ""

    def stand_for(self, _cells: Collection[str]) -> None:
        """Nobody else does."""

    def acts_for(self, _cell: str) -> bool:
        """Always."""
        return True

    def news(self) -> list[Claim]:
        """None."""
        return []

    async def claim(self, _claim: Claim) -> int:
        """Always granted; there is nothing to compare the token with."""
        return 0

    async def withdraw(self, _claim: Claim) -> None:
        """Nobody has heard of it."""

    async def close(self) -> None:
        """Nobody waits for it."""


class Undecided(Alone):
    """A gate that is to agree with others and cannot ask them: none acts."""

    def __init__(self, trouble: str) -> None:
        self.trouble = trouble

    def acts_for(self, _cell: str) -> bool:
        """Never."""
        return False
