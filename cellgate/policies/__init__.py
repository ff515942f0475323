"""Policies: each ranks the usable units for an ask, best first.

A policy is one file with one frozen dataclass whose fields are its configuration, and one line in
POLICIES. It never sees health, never drops a candidate, and holds no state beyond a cursor.
"""

from __future__ import annotations

from cellgate.policies.least_load import LeastLoad
from cellgate.policies.p2c import PowerOfTwo
from cellgate.policies.prefix_affinity import PrefixAffinity
from cellgate.policies.random import Random
from cellgate.policies.round_robin import RoundRobin
from cellgate.policies.session import Session
from cellgate.router.nouns import Policy

POLICIES: dict[str, type[Policy]] = {
    "least_load": LeastLoad,
    "p2c": PowerOfTwo,
    "prefix_affinity": PrefixAffinity,
    "random": Random,
    "round_robin": RoundRobin,
    "session": Session,
}

__all__ = ["POLICIES", "Policy"]
