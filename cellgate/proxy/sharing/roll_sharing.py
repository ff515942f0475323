"""The roll that gates share through Redis: a document of the scope `:roll`, and a list of orders."""

from __future__ import annotations

from cellgate.proxy.sharing.leadership import Document, Leadership

SCOPE = ":roll"
"""No cell can have this name."""
NAME = "roll"
ORDERS = "roll:orders"
PURPOSE = "roll"


class SharedRoll:
    """The roll as all gates of this Redis know it (`RollStore`)."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._text = b""

    @property
    def trouble(self) -> str:
        """Why no gate is known to conduct; empty: one does."""
        return self._leadership.trouble

    @property
    def conductor(self) -> str:
        """The gate that conducts; empty: none is known."""
        return self._leadership.leader(SCOPE)

    def hear(self, document: Document) -> None:
        """A document of the scope."""
        if document.name == NAME:
            self._text = document.text

    def stand(self, *, willing: bool) -> None:
        """Whether this gate could conduct."""
        self._leadership.stand_for(PURPOSE, {SCOPE} if willing else set())

    def conducts(self) -> bool:
        """Whether this gate conducts."""
        return self._leadership.leads(SCOPE)

    def clock_ms(self) -> int:
        """Redis's clock."""
        return self._leadership.clock_ms()

    def latest(self) -> bytes:
        """The document that was written last; empty: none."""
        return self._text

    async def write(self, text: bytes) -> int:
        """Write the document; its fencing token. Raises NotActingError when another gate conducts."""
        token = await self._leadership.write(SCOPE, NAME, text)
        self._text = text
        return token

    async def ask(self, text: bytes) -> None:
        """Ask the conductor for something. Raises NotActingError when Redis cannot be asked."""
        await self._leadership.push(ORDERS, text)

    async def asked(self) -> bytes | None:
        """What was asked first and is not done yet; None: nothing. Raises NotActingError."""
        return await self._leadership.first(ORDERS)

    async def done(self, text: bytes) -> None:
        """It was carried out, or refused. Raises NotActingError."""
        await self._leadership.remove(ORDERS, text)
