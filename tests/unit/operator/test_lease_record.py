"""What is written into a Lease, and read from it."""

from __future__ import annotations

import re

from cellgate.proxy.extras.operator import leases
from cellgate.proxy.extras.operator.leases import CLAIMS, CLAIMS_MAX
from cellgate.proxy.extras.operator.plan import Claim

CLAIM = Claim("u1", "c", "g1", "u1-1", attempt=2, rest_s=30.0)


def test_cells_have_names_of_their_own() -> None:
    names = [leases.lease_name(cell) for cell in ("east", "East", "e_st", "e-st", "e.st", "e-", "x" * 128)]
    assert names[0] == "cellgate-east"
    assert len(set(names)) == len(names)
    assert all(re.fullmatch("[a-z0-9]([a-z0-9-]{,251}[a-z0-9])?", name) for name in names)


def test_a_token_grows_with_each_holder_and_not_with_renewals() -> None:
    lease = leases.new_lease("c")
    for gate, token in (("g1", 1), ("g1", 1), ("g2", 2), ("g1", 3)):
        lease = leases.held(lease, gate, 10.0, "2026-01-01T00:00:00.000Z")
        assert (leases.holder(lease), leases.lease_token(lease)) == (gate, token)
    assert leases.holder(leases.released(lease)) == ""


def test_the_last_claim_of_a_unit_is_kept_with_its_time() -> None:
    lease = leases.claimed(leases.new_lease("c"), CLAIM, 100.0)
    (found,) = leases.claims(lease, "c", 105.0)
    assert (found.unit, found.id, found.attempt, found.rest_s, found.age_s) == ("u1", "u1-1", 2, 30.0, 5.0)
    assert leases.claims(leases.withdrawn(lease, CLAIM), "c", 105.0) == []


def test_only_so_many_are_kept() -> None:
    lease = leases.new_lease("c")
    for number in range(CLAIMS_MAX + 3):
        lease = leases.claimed(lease, Claim(f"u{number}", "c", "g", "id", 1, 1.0), 1.0)
    units = [claim.unit for claim in leases.claims(lease, "c", 1.0)]
    assert (len(units), units[0]) == (CLAIMS_MAX, "u3")


def test_what_is_no_claim_is_left_out() -> None:
    lease = leases.new_lease("c")
    for text in (
        "",
        "{",
        "[]",
        '{"u": 5}',
        '{"u": {"gate": "g"}}',
        '{"u": {"gate": 1, "id": 2, "attempt": "x"}}',
    ):
        lease["metadata"]["annotations"] = {CLAIMS: text}
        assert leases.claims(lease, "c", 1.0) == []
