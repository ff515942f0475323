"""Policies: each ranks the usable units for an ask, best first.

A policy is one file with one frozen dataclass whose fields are its configuration, and one line in
POLICIES. It never sees health, never drops a candidate, and holds no state beyond a cursor.
"""

from __future__ import annotations

from policies.least_load import LeastLoad
from policies.p2c import PowerOfTwo
from policies.random import Random
from policies.round_robin import RoundRobin
from router.nouns import Policy

POLICIES: dict[str, type[Policy]] = {
    "least_load": LeastLoad,
    "p2c": PowerOfTwo,
    "random": Random,
    "round_robin": RoundRobin,
}

__all__ = ["POLICIES", "Policy"]
