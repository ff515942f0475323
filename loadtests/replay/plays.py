"""What one load is, as all routers get it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtests.gym.nouns import Request


@dataclass(frozen=True, slots=True)
class Play:
    """A load as all routers get it. `gate` are keys of the gate's configuration."""

    cell: str
    fleet: str
    seed: int
    requests: Sequence[Request]
    bodies: Mapping[Request, bytes]
    speed_up: float
    patience_s: float = 60.0
    gate: dict[str, Any] = field(default_factory=dict)
