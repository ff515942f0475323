"""Prefix affinity: the unit that would answer soonest, with what its prefix cache holds of the prompt.

Affinity is not a switch beside load: a cached prefix is work that is saved, and counts as such.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cellgate.policies.least_load import soonest_first


@dataclass(frozen=True, slots=True)
class PrefixAffinity:
    """Ranks by predicted seconds, ties at random."""

    by_seconds: ClassVar[bool] = True
    by_cache: ClassVar[bool] = True

    rank = staticmethod(soonest_first)
