"""Panic: when most units do not answer at all, the gate is probably cut off, and the fleet is not dead.

Pure. The last good rotation is then kept for a while: dropping it would turn a lost network of the gate into
an outage of everything. A unit whose leader, or any node, answers anything is reachable, even if it hangs.
"""

from __future__ import annotations

from cellgate.router.nouns import Rules

UNREACHABLE_S = 1.5
"""Longer than a period of the probes, and shorter than any way to DOWN without an answer."""


def is_unreachable(heard_at: float, now: float) -> bool:
    """Whether a unit, last heard at `heard_at`, has not answered at all for too long."""
    return now - heard_at > UNREACHABLE_S


def hold(unreachable: int, rotation: int, held_s: float, rules: Rules) -> bool:
    """Whether an unreachable unit stays in rotation, when `unreachable` of `rotation` units are, for `held_s`
    now.
    """
    many = unreachable >= rules.panic_min_units and unreachable > rules.panic_share * rotation
    return many and held_s < rules.panic_max_s
