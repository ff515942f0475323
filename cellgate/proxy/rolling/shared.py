"""Where gates keep a roll, so that each of them can go on with it."""

from __future__ import annotations

import time
from typing import Protocol


class RollStore(Protocol):
    """The roll that gates share, and what operators ask of whoever conducts it."""

    @property
    def trouble(self) -> str:
        """Why no gate is known to conduct; empty: one does."""

    @property
    def conductor(self) -> str:
        """The gate that conducts; empty: none is known."""

    def stand(self, *, willing: bool) -> None:
        """Whether this gate could conduct."""

    def conducts(self) -> bool:
        """Whether this gate conducts."""

    def clock_ms(self) -> int:
        """The clock by which times in a roll are told."""

    def latest(self) -> bytes:
        """The document that was written last; empty: none."""

    async def write(self, text: bytes) -> int:
        """Write the document; its fencing token. Raises NotActingError when another gate conducts."""

    async def ask(self, text: bytes) -> None:
        """Ask the conductor for something. Raises NotActingError when it cannot be asked."""

    async def asked(self) -> bytes | None:
        """What was asked first and is not done yet; None: nothing. Raises NotActingError."""

    async def done(self, text: bytes) -> None:
        """It was carried out, or refused. Raises NotActingError."""


class OwnRoll:
    """The roll of a gate that shares nothing with others: in its memory."""

    trouble = ""
    conductor = "this gate"

    def __init__(self) -> None:
        self._text = b""
        self._asks: list[bytes] = []

    def stand(self, *, willing: bool) -> None:
        """Nobody else does."""

    def conducts(self) -> bool:
        """Always."""
        return True

    def clock_ms(self) -> int:
        """This machine's."""
        return round(1000.0 * time.time())

    def latest(self) -> bytes:
        """The document that was written last; empty: none."""
        return self._text

    async def write(self, text: bytes) -> int:
        """Keep the document; nobody compares the token."""
        self._text = text
        return 0

    async def ask(self, text: bytes) -> None:
        """Keep it for the next look."""
        self._asks.append(text)

    async def asked(self) -> bytes | None:
        """What was asked first and is not done yet; None: nothing."""
        return self._asks[0] if self._asks else None

    async def done(self, text: bytes) -> None:
        """It was carried out, or refused."""
        self._asks.remove(text)


class UndecidedRoll(OwnRoll):
    """A roll that is to be shared, at a gate that cannot ask the others: nobody conducts."""

    def __init__(self, trouble: str) -> None:
        super().__init__()
        self.trouble = trouble

    def conducts(self) -> bool:
        """Never."""
        return False
