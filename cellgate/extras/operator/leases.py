"""Gates agree through Leases of Kubernetes on who acts: one Lease for each cell. For gates without Redis.

1. The gate that has the Lease of a cell renews it every CLAIM_RENEW_S. Once nobody changed it for LEASE_S,
   by the clock of the gate that looks, another gate that stands for the cell takes it.
2. Every change carries the version that it is made of, and the API server refuses it when that is not the
   last one any more. So an attempt is claimed by a change of the Lease, right before its action: a gate that
   stood still while another one took the Lease is refused, and does nothing.
3. Without the API server nobody acts, because no gate knows whether another does.

In this order: `KubernetesLeases`, `lease_name`, `agree_by_leases`.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from cellgate.extras.operator.action_settings import LeasePlace
from cellgate.extras.operator.plan import Acting, Claim, NotActingError
from cellgate.extras.operator.recovery import acting_metrics
from cellgate.extras.orchestrators import (
    CONFLICT,
    LEASES,
    NOT_FOUND,
    ApiCall,
    ApiError,
    ApiObject,
    ask,
    connected,
    own_namespace,
)
from cellgate.proxy.observe.events import Action
from cellgate.proxy.observe.log import utc
from cellgate.proxy.process.tasks import end_tasks

if TYPE_CHECKING:
    from cellgate.proxy.control.plane import Plane


CLAIM_RENEW_S = 2.0
LEASE_S = 10.0
CLAIM_STEP_S = 5.0
"""An exchange with the API server takes no longer."""
_UNREACHED = "which gate acts is not known: %s"


class KubernetesLeases:
    """This gate's part in the agreement (`Acting`), under the name `gate`. `on_acting` is called with a cell
    and a token when this gate begins to act for it.
    """

    def __init__(
        self, place: LeasePlace, gate: str, now: Callable[[], float], on_acting: Callable[[str, int], None]
    ) -> None:
        self.trouble = _UNREACHED % "the API server has not been asked yet"
        self._place = place
        self._namespace = place.namespace or own_namespace()
        self._gate = gate
        self._now = now
        self._on_acting = on_acting
        self._cells = frozenset[str]()
        self._held: dict[str, _Held] = {}
        self._received: dict[tuple[str, str], str] = {}
        self._news: list[Claim] = []
        self._turn = asyncio.Lock()
        self._api: Any = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, and run until `close`."""
        self._task = asyncio.create_task(self._forever(), name="kubernetes leases")

    # -- what recovery asks --------------------------------------------------------------------------------

    def stand_for(self, cells: Collection[str]) -> None:
        """This gate could act for these cells now, and for no others."""
        self._cells = frozenset(cells)

    def acts_for(self, cell: str) -> bool:
        """Whether this gate has the Lease of the cell."""
        held = self._held.get(cell)
        return held is not None and self._now() < held.ours_until

    def cells(self) -> Collection[str]:
        """Those that it stands for."""
        return self._cells

    def news(self) -> list[Claim]:
        """The claims of other gates since the last call."""
        news, self._news = self._news, []
        return news

    async def claim(self, claim: Claim) -> int:
        """Claim an attempt right before it begins; its fencing token. Raises NotActingError."""
        asked_at = self._now()
        async with self._turn:
            if not self.acts_for(claim.cell):
                raise NotActingError(self._who(claim.cell))
            held, said = self._held[claim.cell], replace(claim, gate=self._gate)
            try:
                renewed = self._renewed(held.lease)
                await self._write(claim.cell, claimed(renewed, said, time.time()))
            except (ApiError, TimeoutError) as error:
                held.ours_until = 0.0
                raise NotActingError(_UNREACHED % _in_words(error)) from error
        if self._now() - asked_at >= LEASE_S:
            # This process stood still: by now another gate may have acted.
            await self.withdraw(claim)
            raise NotActingError("the API server answered too late")
        return lease_token(held.lease)

    async def withdraw(self, claim: Claim) -> None:
        """A claimed attempt was not begun after all. Otherwise the unit is given its time."""
        with suppress(ApiError, TimeoutError):
            async with self._turn:
                await self._write(claim.cell, withdrawn(self._held[claim.cell].lease, claim))

    async def close(self) -> None:
        """Let another gate act, at once, if the API server can be told."""
        self._cells = frozenset()
        if self._task is None:
            return
        await end_tasks(self._task)
        self._task = None

    # -- asking --------------------------------------------------------------------------------------------

    async def _forever(self) -> None:
        while True:
            try:
                async with connected(self._place.kubeconfig) as self._api:
                    try:
                        await self._keep_looking()
                    finally:
                        await self._give_back()
            except ApiError as error:
                self.trouble = _UNREACHED % error
                await asyncio.sleep(CLAIM_RENEW_S)

    async def _keep_looking(self) -> None:
        while True:
            self.trouble = await self._round()
            await asyncio.sleep(CLAIM_RENEW_S)

    async def _round(self) -> str:
        """One step for each cell; what was wrong first, empty: nothing. A Lease that the server refuses takes
        none from other cells.
        """
        trouble = ""
        for cell in sorted(self._cells | self._held.keys()):
            try:
                async with self._turn:
                    await self._step(cell)
            except Exception as error:  # Whatever a server answers, this task has to go on.
                trouble = trouble or _UNREACHED % _in_words(error)
                if isinstance(error, TimeoutError) or (isinstance(error, ApiError) and not error.status):
                    # It does not answer: nor will it for the next cell.
                    break
        return trouble

    async def _step(self, cell: str) -> None:
        """Renew the Lease of a cell, or look who has it, and take it if nobody has it any more."""
        try:
            if not self.acts_for(cell):
                await self._read(cell)
            held = self._held[cell]
            is_ours, token = self.acts_for(cell), lease_token(held.lease)
            if cell not in self._cells:
                if is_ours:
                    await self._write(cell, released(held.lease))
            elif is_ours or self._is_free(held):
                await self._write(cell, self._renewed(held.lease))
                if lease_token(held.lease) != token:
                    self._on_acting(cell, lease_token(held.lease))
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            # Somebody else has changed it first.
            if cell in self._held:
                self._held[cell].ours_until = 0.0

    async def _read(self, cell: str) -> None:
        name = lease_name(cell)
        try:
            found = await self._ask(ApiCall("get", LEASES, self._namespace, name))
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            found = await self._ask(ApiCall("create", LEASES, self._namespace, body=new_lease(cell)))
        self._take(cell, found)

    async def _write(self, cell: str, lease: ApiObject) -> None:
        asked_at = self._now()
        call = ApiCall("update", LEASES, self._namespace, lease["metadata"]["name"], body=lease)
        self._take(cell, await self._ask(call))
        is_ours = holder(lease) == self._gate
        self._held[cell].ours_until = asked_at + LEASE_S if is_ours else 0.0

    async def _ask(self, call: ApiCall) -> ApiObject:
        async with asyncio.timeout(CLAIM_STEP_S):
            return await ask(self._api, call)

    def _take(self, cell: str, lease: ApiObject) -> None:
        """What the API server has answered."""
        known = self._held.get(cell)
        if known is None:
            self._held[cell] = _Held(lease, self._now())
        elif version(known.lease) != version(lease):
            known.lease, known.seen_at = lease, self._now()
        for claim in claims(lease, cell, time.time()):
            if claim.gate != self._gate and self._received.get((cell, claim.unit)) != claim.id:
                self._received[cell, claim.unit] = claim.id
                self._news.append(claim)

    def _is_free(self, held: _Held) -> bool:
        """Nobody has it, or it has run out, or this gate has it and did not know that any more."""
        is_ours = holder(held.lease) in ("", self._gate)
        return is_ours or self._now() - held.seen_at > LEASE_S

    def _renewed(self, lease: ApiObject) -> ApiObject:
        return held(lease, self._gate, LEASE_S, utc(time.time()))

    async def _give_back(self) -> None:
        """Whoever stands for the cells may have them at once."""
        async with self._turn:
            for cell, held in self._held.items():
                if self.acts_for(cell):
                    held.ours_until = 0.0
                    with suppress(ApiError, TimeoutError):
                        await self._write(cell, released(held.lease))

    def _who(self, cell: str) -> str:
        held = self._held.get(cell)
        who = holder(held.lease) if held is not None else ""
        return f"gate {who} acts" if who and who != self._gate else "no gate acts"


@dataclass(slots=True)
class _Held:
    """What this gate knows of one cell's Lease, and since when; `ours_until` is on this gate's clock."""

    lease: ApiObject
    seen_at: float
    ours_until: float = 0.0


def _in_words(error: Exception) -> str:
    return str(error) or "the API server does not answer"


# What a Lease of Kubernetes says about who acts, and how it is changed. Pure.
#
# Fields: "Leases" of coordination.k8s.io/v1. As in the leader election of Kubernetes, times in a Lease are
# for people: a lease has run out when nobody has changed it for as long as it says, by the reader's own
# clock. Claims are an annotation of the same object, so that whoever writes one has the lease in the same
# step.


CLAIMS = "cellgate.io/claims"
CLAIMS_MAX = 256
"""The oldest are dropped: annotations of an object are bounded."""


def lease_name(cell: str) -> str:
    """The name of a cell's Lease, a DNS subdomain (RFC 1123); another one for each cell."""
    plain = re.sub(r"[^a-z0-9-]", "-", cell.lower())
    tail = (
        ""
        if plain == cell and not plain.endswith("-")
        else "-" + hashlib.sha256(cell.encode()).hexdigest()[:8]
    )
    return f"cellgate-{plain[:180]}{tail}"


def new_lease(cell: str) -> ApiObject:
    """A Lease that nobody has."""
    meta = {"name": lease_name(cell), "labels": {"app.kubernetes.io/managed-by": "cellgate"}}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": {}}


def holder(lease: ApiObject) -> str:
    """Who has it; empty: nobody."""
    return str(lease["spec"].get("holderIdentity") or "")


def lease_token(lease: ApiObject) -> int:
    """The fencing token: it grows each time somebody takes the lease."""
    return int(lease["spec"].get("leaseTransitions") or 0)


def version(lease: ApiObject) -> str:
    """Changes with each change of the object."""
    return str(lease["metadata"].get("resourceVersion", ""))


def held(lease: ApiObject, gate: str, lease_s: float, at: str) -> ApiObject:
    """The lease taken, or renewed, by `gate` at a time in ISO 8601."""
    after = deepcopy(lease)
    spec = after["spec"]
    if holder(lease) != gate:
        spec |= {"holderIdentity": gate, "acquireTime": at, "leaseTransitions": lease_token(lease) + 1}
    spec |= {"renewTime": at, "leaseDurationSeconds": round(lease_s)}
    return after


def released(lease: ApiObject) -> ApiObject:
    """The lease given back."""
    after = deepcopy(lease)
    after["spec"]["holderIdentity"] = ""
    return after


def claims(lease: ApiObject, cell: str, wall_s: float) -> list[Claim]:
    """The attempts that were begun under the lease, with their ages. What cannot be read is left out."""
    found = []
    for unit, document in _claims(lease).items():
        try:
            who = str(document["gate"]), str(document["id"]), int(document["attempt"])
            age_s = max(0.0, wall_s - float(document["at_s"]))
            found.append(Claim(unit, cell, *who, float(document["rest_s"]), age_s))
        except (TypeError, KeyError, ValueError):
            continue
    return found


def claimed(lease: ApiObject, claim: Claim, wall_s: float) -> ApiObject:
    """The lease with one more attempt, the last of its unit."""
    document = asdict(claim) | {"at_s": round(wall_s, 3)}
    others = {unit: document for unit, document in _claims(lease).items() if unit != claim.unit}
    kept = dict(list(others.items())[-CLAIMS_MAX + 1 :])
    return _with_claims(lease, {**kept, claim.unit: document})


def withdrawn(lease: ApiObject, claim: Claim) -> ApiObject:
    """The lease without an attempt that was not begun."""
    kept = {unit: document for unit, document in _claims(lease).items() if document.get("id") != claim.id}
    return _with_claims(lease, kept)


def _claims(lease: ApiObject) -> dict[str, ApiObject]:
    try:
        found = orjson.loads(lease["metadata"].get("annotations", {}).get(CLAIMS) or "{}")
    except orjson.JSONDecodeError:
        return {}
    return (
        {unit: document for unit, document in found.items() if isinstance(document, dict)}
        if isinstance(found, dict)
        else {}
    )


def _with_claims(lease: ApiObject, document: dict[str, ApiObject]) -> ApiObject:
    after = deepcopy(lease)
    after["metadata"].setdefault("annotations", {})[CLAIMS] = orjson.dumps(document).decode()
    return after


# Ties the Leases of Kubernetes to a control plane.


def agree_by_leases(plane: Plane, place: LeasePlace, gate: str) -> Acting:
    """Begin to agree with other gates, as the gate of this name."""

    def on_acting(cell: str, token: int) -> None:
        detail = f"no other gate recovers units of it from now on (fencing token {token})"
        plane.events.add(Action("acting", "gate", detail=detail, cell=cell))

    leases = KubernetesLeases(place, gate, plane.now, on_acting)
    leases.start()
    plane.metrics.include(partial(acting_metrics, leases.cells, leases.acts_for))
    return leases
