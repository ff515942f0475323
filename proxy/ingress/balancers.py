"""Counts the load balancers that check the gate or one of its units: each may use only its part. Pure.

HAProxy identifies itself on health checks (`http-check send-state`); without that, the addresses that connect
to the agent port are counted. One HAProxy with a unit in two backends counts twice, as it should: each
backend has a maxconn of its own.
"""

from __future__ import annotations

import re

SEEN_S = 30.0
"""A balancer without checks for this long is gone: fifteen checks at HAProxy's default of 2 s."""
BALANCERS_MAX = 1024

# `UP 2/3; name=bck/srv2; node=lb1; weight=1/2; scur=13/22; qcur=0`
_NAME = re.compile(r"(?:^|;)\s*name=([^;\s]{1,128})")
_NODE = re.compile(r"(?:^|;)\s*node=([^;\s]{1,128})")


class Balancers:
    """Which balancer checked what (a unit's name, or `gate`), and when last."""

    def __init__(self) -> None:
        self._checks: dict[tuple[str, str], float] = {}
        self._agent_checks: dict[tuple[str, str], float] = {}

    def on_check(self, about: str, state: str, now: float) -> None:
        """A health check came with this `X-Haproxy-Server-State`. What is no such state is not counted."""
        name, node = _NAME.search(state), _NODE.search(state)
        if name is not None and node is not None:
            _record(self._checks, (about, f"{node[1]} {name[1]}"), now)

    def on_agent_check(self, about: str, address: str, now: float) -> None:
        """A question came to the agent port from this address."""
        _record(self._agent_checks, (about, address), now)

    def count(self, about: str, now: float) -> int:
        """How many balancers check it now; at least 1."""
        counts = [
            sum(a == about and now - at <= SEEN_S for (a, _), at in seen.items())
            for seen in (self._checks, self._agent_checks)
        ]
        return max(1, *counts)


def _record(seen: dict[tuple[str, str], float], key: tuple[str, str], now: float) -> None:
    # The one that was heard longest ago comes first, and goes first.
    seen.pop(key, None)
    seen[key] = now
    while len(seen) > BALANCERS_MAX or now - next(iter(seen.values())) > SEEN_S:
        del seen[next(iter(seen))]
