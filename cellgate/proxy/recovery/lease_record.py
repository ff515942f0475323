"""What a Lease of Kubernetes says about who acts, and how it is changed. Pure.

Fields: "Leases" of coordination.k8s.io/v1. As in the leader election of Kubernetes, times in a Lease are for
people: a lease has run out when nobody has changed it for as long as it says, by the reader's own clock.
Claims are an annotation of the same object, so that whoever writes one has the lease in the same step.
"""

from __future__ import annotations

import hashlib
import re
from copy import deepcopy
from dataclasses import asdict

import orjson

from cellgate.proxy.orchestrators.kubernetes_api import ApiObject
from cellgate.proxy.recovery.acting import Claim

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


def token(lease: ApiObject) -> int:
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
        spec |= {"holderIdentity": gate, "acquireTime": at, "leaseTransitions": token(lease) + 1}
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
    for unit, told in _claims(lease).items():
        try:
            who = str(told["gate"]), str(told["id"]), int(told["attempt"])
            age_s = max(0.0, wall_s - float(told["at_s"]))
            found.append(Claim(unit, cell, *who, float(told["rest_s"]), age_s))
        except (TypeError, KeyError, ValueError):
            continue
    return found


def claimed(lease: ApiObject, claim: Claim, wall_s: float) -> ApiObject:
    """The lease with one more attempt, the last of its unit."""
    told = asdict(claim) | {"at_s": round(wall_s, 3)}
    others = {unit: told for unit, told in _claims(lease).items() if unit != claim.unit}
    kept = dict(list(others.items())[-CLAIMS_MAX + 1 :])
    return _with_claims(lease, {**kept, claim.unit: told})


def withdrawn(lease: ApiObject, claim: Claim) -> ApiObject:
    """The lease without an attempt that was not begun."""
    kept = {unit: told for unit, told in _claims(lease).items() if told.get("id") != claim.id}
    return _with_claims(lease, kept)


def _claims(lease: ApiObject) -> dict[str, ApiObject]:
    try:
        found = orjson.loads(lease["metadata"].get("annotations", {}).get(CLAIMS) or "{}")
    except orjson.JSONDecodeError:
        return {}
    return (
        {unit: told for unit, told in found.items() if isinstance(told, dict)}
        if isinstance(found, dict)
        else {}
    )


def _with_claims(lease: ApiObject, told: dict[str, ApiObject]) -> ApiObject:
    after = deepcopy(lease)
    after["metadata"].setdefault("annotations", {})[CLAIMS] = orjson.dumps(told).decode()
    return after
