"""The roll that gates share through Redis: a document of the scope `:roll`, and a list of orders."""

from __future__ import annotations

from contextlib import suppress

import orjson

from cellgate.extras.operator.leadership import Document, Leadership
from cellgate.extras.operator.roll_plan import read_roll
from cellgate.extras.redis_client.signing import CLOCK_S

SCOPE = ":roll"
"""No cell can have this name."""
ROLL_LEASE = "roll"
ORDERS = "roll:orders"
ROLL_PURPOSE = "roll"
ROLL_KEPT_S = 600.0
"""So old a roll that goes on may be at a gate that has just begun."""
GATES_KEPT = 1024
FORGED_A_LOOK = 64
"""So many orders that no gate has signed are removed in one look."""


class SharedRoll:
    """The roll as all gates of this Redis know it (`RollStore`)."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._text = b""
        self._asked: tuple[bytes, bytes] = b"", b""
        """The order that was read last: as the list has it, and without its signature."""
        self._done: dict[str, bytes] = {}
        """The last order of each gate that was carried out or refused, as the list had it."""

    @property
    def trouble(self) -> str:
        """Why no gate is known to conduct; empty: one does."""
        return self._leadership.trouble

    @property
    def leader(self) -> str:
        """The gate that conducts; empty: none is known."""
        return self._leadership.leader(SCOPE)

    def hear(self, document: Document) -> None:
        """A document of the scope."""
        if document.name == ROLL_LEASE and self._is_of_now(document):
            self._text = document.text

    def _is_of_now(self, document: Document) -> bool:
        """Whether a gate may go on with it. One that goes on is written again each minute: an old one may be
        a replay, which would restart units.
        """
        if not self._leadership.signer.must or document.age_s <= ROLL_KEPT_S:
            return True
        with suppress(ValueError):
            if read_roll(document.text).is_over():
                return True
        what = f"a roll that was written {document.age_s:.0f} s ago, which does not go on: order it again"
        self._leadership.on_forged(SCOPE, what)
        return False

    def stand(self, *, willing: bool) -> None:
        """Whether this gate could conduct."""
        self._leadership.stand_for(ROLL_PURPOSE, {SCOPE} if willing else set())

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
        token = await self._leadership.write(SCOPE, ROLL_LEASE, text)
        self._text = text
        return token

    async def ask(self, text: bytes) -> None:
        """Ask the conductor for something. Raises NotActingError when Redis cannot be asked."""
        gate = self._leadership.gate
        said = b'{"gate":"%b",%b' % (gate.encode(), text[1:])
        await self._leadership.push(ORDERS, self._leadership.signer.sign(_orders_of(gate), said))

    async def asked(self) -> bytes | None:
        """What was asked first and is not done yet; None: nothing. What no gate has asked within a minute is
        removed. Raises NotActingError.
        """
        for _ in range(FORGED_A_LOOK):
            text = await self._leadership.first(ORDERS)
            if text is None:
                return None
            if self._is_believed(text):
                self._asked = text, self._leadership.signer.bare(text)
                return self._asked[1]
            await self._leadership.remove(ORDERS, text)
            what = f"an order that no gate has signed within {CLOCK_S:g} s, or again; it is not carried out"
            self._leadership.on_forged(SCOPE, what)
        return None

    async def done(self, text: bytes) -> None:
        """It was carried out, or refused. Raises NotActingError."""
        asked, bare = self._asked
        if text != bare:
            return
        if len(self._done) >= GATES_KEPT:
            self._done.clear()
        self._done[_asking_gate(asked)] = asked
        await self._leadership.remove(ORDERS, asked)

    def _is_believed(self, text: bytes) -> bool:
        """Whether a gate has asked for it, and for the first time."""
        signer, gate = self._leadership.signer, _asking_gate(text)
        if not signer.must:
            return True
        return signer.believes(_orders_of(gate), text) and self._done.get(gate) != text


def _orders_of(gate: str) -> str:
    """What a signature of its orders is for."""
    return f"{ORDERS}:{gate}"


def _asking_gate(text: bytes) -> str:
    """The gate that an order says it is from; empty: it does not say."""
    try:
        return str(orjson.loads(text)["gate"])[:128]
    except (ValueError, TypeError, KeyError):
        return ""
