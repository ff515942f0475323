"""What gates agree on through Redis: who acts for a cell, with the attempts they have claimed, and the roll.

In this order: `Agreement`, `ClaimSharing`.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import orjson

from cellgate.extras.operator.leadership import Document, Leadership
from cellgate.extras.operator.plan import Acting, Claim, Undecided
from cellgate.extras.operator.recovery import acting_metrics
from cellgate.extras.operator.roll_plan import RollStore, UndecidedRoll
from cellgate.extras.operator.shared_roll import SCOPE, SharedRoll
from cellgate.extras.redis_client.connect import connector
from cellgate.extras.redis_client.redis_names import Names
from cellgate.extras.redis_client.signing import signer_of
from cellgate.proxy.observe.events import Action
from cellgate.proxy.observe.rare_events import RareEvents

if TYPE_CHECKING:
    from cellgate.proxy.config.settings import RedisAccess
    from cellgate.proxy.control.plane import Plane


class Agreement(NamedTuple):
    """What gates agree on: who acts for a cell, and the roll."""

    acting: Acting
    rolls: RollStore


def agree(plane: Plane, access: RedisAccess, gate: str) -> Agreement:
    """The agreement of this gate with others. With an invalid URL no gate acts."""
    try:
        connect = connector(access, plane.settings.tls)
    except ValueError as error:
        return Agreement(Undecided(f"redis: {error}"), UndecidedRoll(f"redis: {error}"))

    def on_leading(scope: str, token: int) -> None:
        if scope == SCOPE:
            detail = f"this gate conducts rolls from now on (fencing token {token})"
            plane.events.add(Action("roll", "gate", detail=detail))
            return
        detail = f"no other gate recovers units of it from now on (fencing token {token})"
        plane.events.add(Action("acting", "gate", detail=detail, cell=scope))

    rare = RareEvents(plane.events, plane.now)

    def on_forged(scope: str, what: str) -> None:
        detail = f"{what}: somebody who is no gate writes in Redis, or a gate has another secret of the fleet"
        rare.add(Action("forged", "gate", detail=detail, cell=None if scope == SCOPE else scope))

    def on_document(document: Document) -> None:
        (rolls if document.scope == SCOPE else claims).hear(document)

    leadership = Leadership(
        connect,
        gate,
        Names(access.prefix),
        now=plane.now,
        rng=random.Random(),
        on_leading=on_leading,
        on_document=on_document,
        on_forged=on_forged,
        signer=signer_of(plane.settings, routes=False),
    )
    claims, rolls = ClaimSharing(leadership), SharedRoll(leadership)
    leadership.start()
    plane.metrics.include(partial(acting_metrics, leadership.scopes, leadership.leads))
    return Agreement(claims, rolls)


RECOVERY_PURPOSE = "recovery"
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
        self._leadership.stand_for(RECOVERY_PURPOSE, cells)

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
    claimed = {"id": claim.id, "gate": claim.gate, "attempt": claim.attempt, "rest_s": claim.rest_s}
    return orjson.dumps({"v": VERSION} | claimed)


def _read(document: Document) -> Claim | None:
    """The claim in a document; None when there is none."""
    try:
        found = orjson.loads(document.text)
        who = str(found["gate"]), str(found["id"])
        numbers = int(found["attempt"]), float(found["rest_s"])
        return Claim(document.name, document.scope, *who, *numbers, age_s=document.age_s)
    except (ValueError, TypeError, KeyError):
        return None
