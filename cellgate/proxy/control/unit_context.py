"""What a probe sees of its unit: the `ProbeContext` of probes/base.py, from the unit's state on the Board."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from cellgate.probes.base import Fetch, Net
from cellgate.router import hold
from cellgate.router.engine_nouns import Build, Urgency
from cellgate.router.nouns import Load, Node, Rules, Unit, Use, Verdict
from cellgate.router.stall import hides_work, is_seen_still, stall_limit_s
from cellgate.router.unit_state import UnitState
from cellgate.router.uses import Uses


@dataclass(frozen=True, slots=True)
class UnitContext:
    """What one probe sees of a unit, or of a node of it."""

    unit_state: UnitState
    node: Node | None
    rules: Rules
    fetch: Fetch
    net: Net
    now: Callable[[], float]
    rng: random.Random
    notes: dict[str, Any]
    known_uses: Uses

    @property
    def uses(self) -> Sequence[Use]:
        return list(self.known_uses.of(self.unit_state, self.now()))

    def takes_turn(self) -> Use | None:
        use, self.unit_state.asks_next = self.unit_state.asks_next, None
        return use

    def answers_since(self, since: float) -> bool:
        return self.known_uses.answers_since(self.unit_state, since)

    @property
    def unit(self) -> Unit:
        return self.unit_state.unit

    @property
    def verdict(self) -> Verdict:
        return self.unit_state.case.verdict

    @property
    def in_flight(self) -> int:
        return self.unit_state.in_flight

    @property
    def life_at(self) -> float:
        return self.unit_state.life_at

    @property
    def answered_at(self) -> float:
        return self.fetch.answered_at

    @property
    def is_peers_turn(self) -> bool:
        return self.unit_state.peer_canary_at >= self.unit_state.life_at

    @property
    def load(self) -> Load | None:
        return self.unit_state.load

    @property
    def ranks(self) -> int:
        return self.unit_state.ranks.count

    @property
    def stalled_rank(self) -> int | None:
        found = self.unit_state.ranks.standstill(self.unit_state.counters_at)
        return found.rank if found is not None and found.still_s >= self.rules.silent_min_s else None

    @property
    def stall_limit_s(self) -> float:
        return stall_limit_s(self.unit_state, self.rules)

    @property
    def held_down(self) -> bool:
        return bool(self.unit_state.case.faults)

    @property
    def is_on_hold(self) -> bool:
        return hold.is_on(self.unit_state.hold)

    def hides_work(self, asked_at: float = inf) -> bool:
        return hides_work(self.unit_state, self.now(), self.rules, asked_at)

    def still_open(self, since: float) -> int:
        return self.unit_state.still_open(since)

    def answered_beside(self, requests: int) -> None:
        self.unit_state.seats_shown = max(self.unit_state.seats_shown, requests)

    def occupied_until(self, at: float) -> None:
        self.unit_state.occupied_until = at

    @property
    def is_seen_still(self) -> bool:
        return is_seen_still(self.unit_state, self.now())

    @property
    def shows_work(self) -> bool:
        return self.unit_state.shows_work()

    @property
    def engine(self) -> str:
        return self.unit_state.engine

    @property
    def reborn(self) -> tuple[str, float] | None:
        return self.unit_state.case.reborn

    @property
    def build(self) -> Build:
        return self.unit_state.build

    @property
    def urgency(self) -> Urgency:
        return self.unit_state.urgency

    @property
    def models(self) -> frozenset[str]:
        return self.unit_state.base_models()

    async def pause(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)

    def new_id(self) -> str:
        return f"{self.rng.getrandbits(40):010x}"

    def heard(self) -> None:
        self.unit_state.heard_at = self.now()
