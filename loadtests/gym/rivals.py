"""The gate's rivals, by name."""

from __future__ import annotations

from loadtests.gym.caching import CacheAware, LMetric, Scorer
from loadtests.gym.counting import Counting, LeastConnections, PowerOfTwo, RoundRobin
from loadtests.gym.oracle import Oracle

RIVALS: dict[str, type[Counting]] = {
    "leastconn": LeastConnections,
    "p2c": PowerOfTwo,
    "round_robin": RoundRobin,
    "cache_aware": CacheAware,
    "lmetric": LMetric,
    "scorer": Scorer,
    "oracle": Oracle,
}
SIMPLE = ("leastconn", "p2c", "round_robin")
"""What the gate must never be worse than."""
