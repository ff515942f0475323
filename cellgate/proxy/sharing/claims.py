"""Recovery's side of leadership: which gate acts for a cell, and the attempts that gates have claimed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import orjson

from cellgate.proxy.recovery.acting import Claim
from cellgate.proxy.sharing.leadership import Document, Leadership

PURPOSE = "recovery"
VERSION = 1


class ClaimSharing:
    """The agreement of gates on who acts, as recovery knows it (`Acting`)."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._news: list[Claim] = []

    @property
    def trouble(self) -> str:
        """Why no gate is known to act; empty: one is."""
        return self._leadership.trouble

    def stand_for(self, cells: Collection[str]) -> None:
        """This gate could act for these cells now, and for no others."""
        self._leadership.stand_for(PURPOSE, cells)

    def acts_for(self, cell: str) -> bool:
        """Whether this gate acts for the cell."""
        return self._leadership.leads(cell)

    def news(self) -> list[Claim]:
        """The claims of other gates since the last call."""
        news, self._news = self._news, []
        return news

    def hear(self, document: Document) -> None:
        """A document of a cell. One that is no claim is ignored."""
        claim = _read(document)
        if claim is not None and claim.gate != self._leadership.gate:
            self._news.append(claim)

    async def claim(self, claim: Claim) -> int:
        """Claim an attempt right before it begins; its fencing token. Raises NotActingError."""
        said = _written(replace(claim, gate=self._leadership.gate))
        return await self._leadership.write(claim.cell, claim.unit, said)

    async def withdraw(self, claim: Claim) -> None:
        """A claimed attempt was not begun after all. If Redis cannot be told, the unit is given its time."""
        await self._leadership.erase(claim.cell, claim.unit)

    async def close(self) -> None:
        """Let another gate act, at once."""
        await self._leadership.close()


def _written(claim: Claim) -> bytes:
    told = {"id": claim.id, "gate": claim.gate, "attempt": claim.attempt, "rest_s": claim.rest_s}
    return orjson.dumps({"v": VERSION} | told)


def _read(document: Document) -> Claim | None:
    """The claim in a document; None when there is none."""
    try:
        found = orjson.loads(document.text)
        who = str(found["gate"]), str(found["id"])
        numbers = int(found["attempt"]), float(found["rest_s"])
        return Claim(document.name, document.scope, *who, *numbers, age_s=document.age_s)
    except (ValueError, TypeError, KeyError):
        return None
