"""One tenant floods a fleet with ten times its share: how much later do its neighbours' first tokens come?

`python -m loadtests.gym.fair_tenants`: three tenants ask alike, at half of what the fleet can do; then one
of them ten times as often, which is twice what the fleet can do. It does so with prompts that share nothing,
and with system prompts that all tenants share. The units take as many requests as they have seats. The flood
comes without a limit, when only the fair queue protects the others, and with a limit of requests in flight
(docs/limits.md) of twice what the tenant usually has. What must hold: with the limit the neighbours' p99 TTFT
is at most 1.2 times that without a flood.
"""

import argparse
import random
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from loadtests.gym.cells import saturation
from loadtests.gym.fleets import FLEETS
from loadtests.gym.gate import make_gates
from loadtests.gym.nouns import Call, Fleet, Request, Rival, Run
from loadtests.gym.prompts import Text
from loadtests.gym.shapes import byte_rate, exponential, poisson
from loadtests.gym.world import World
from loadtests.kit.report import print_problems, verdict

FLEET, LOAD = "equal", "azure_conv"
NORMAL = 0.5
"""The share of the fleet's rate that three tenants ask for together."""
TIMES, ALLOWED = 10, 2
"""How often the flood asks, and what its limit allows: as times of what is usual."""
FLOOD, TENANTS = "flood", ("flood", "one", "other")
SECONDS, SEEDS, MOST = 120.0, 3, 1.2
SYSTEM_PROMPTS, SYSTEM_TOKENS = 4, 1200


class LimitedGate:
    """A gate that refuses requests of the flood while it has `most` in flight."""

    def __init__(self, gate: Rival, world: World, most: int) -> None:
        self._gate = gate
        self._world = world
        self._most = most
        self._in_flight = 0
        self.first, self.broke, self.changed, self.waiting = (
            gate.first,
            gate.broke,
            gate.changed,
            gate.waiting,
        )

    def come(self, call: Call, now: float) -> None:
        """A request has come."""
        if call.request.tenant == FLOOD:
            if self._in_flight >= self._most:
                self._world.refuse(call, "limited")
                return
            self._in_flight += 1
        self._gate.come(call, now)
        if call.request.tenant == FLOOD and call.refused:
            self._in_flight -= 1

    def ended(self, call: Call, now: float) -> None:
        """An answer is whole."""
        self._in_flight -= call.request.tenant == FLOOD
        self._gate.ended(call, now)


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked: with shared system prompts or not; with a flood or not."""

    shares: bool
    floods: bool

    def requests(self, seed: int, rate: float) -> list[Request]:
        """All requests in the order of their times. Those of the neighbours are alike in each case."""
        nothing = Text()
        systems = [nothing.extend(SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)] if self.shares else [nothing]
        streams = [self._of(tenant, seed, rate / len(TENANTS), systems) for tenant in TENANTS]
        made = sorted((each for stream in streams for each in stream), key=lambda request: request.at)
        return [replace(request, number=number) for number, request in enumerate(made)]

    def _of(self, tenant: str, seed: int, rate: float, systems: list[Text]) -> Iterator[Request]:
        rng = random.Random(f"{tenant} {seed}")
        for at in poisson(rng, rate * (TIMES if tenant == FLOOD and self.floods else 1)):
            if at > SECONDS:
                return
            prompt = rng.choice(systems).extend(exponential(rng, 1000, 8000, least=20), byte_rate(rng))
            answer = prompt.extend(exponential(rng, 150, 1000))
            yield Request(0, at, prompt, answer, tenant=tenant, chance=rng.random())


def fleet() -> Fleet:
    """Units that are given no more requests than they have seats."""
    usual = FLEETS[FLEET]
    places = [
        replace(place, unit=replace(place.unit, max_in_flight=place.model.seats)) for place in usual.places
    ]
    return replace(usual, places=tuple(places))


def played(case: Case, rate: float, limit: int = 0) -> list[Run]:
    """A run for each seed; `limit` of the flood's requests in flight, 0: none."""
    runs = []
    for seed in range(1, SEEDS + 1):
        world = World(fleet())
        gates: list[Rival] = [*make_gates(world, seed)]
        rivals = [LimitedGate(gate, world, limit) if limit else gate for gate in gates]
        runs.append(world.run(case.requests(seed, rate), rivals))
    return runs


def neighbours(runs: Collection[Run]) -> list[Call]:
    """The calls of the neighbours."""
    return [call for run in runs for call in run.calls if call.request.tenant != FLOOD]


def p99_s(runs: Collection[Run]) -> float:
    """The 99th percentile of the neighbours' TTFT."""
    ttfts = sorted(call.first_at - call.came_at for call in neighbours(runs) if not call.refused)
    return ttfts[int(len(ttfts) * 0.99)]


def usual_in_flight(runs: Collection[Run]) -> int:
    """How many requests a tenant has in flight on average."""
    busy_s = sum(call.ended_at - call.came_at for call in neighbours(runs) if not call.refused)
    return max(1, round(busy_s / SECONDS / SEEDS / (len(TENANTS) - 1)))


def problems(*, shares: bool, rate: float) -> list[str]:
    """Play the cases, and print them; what did not hold."""
    found, alone = [], played(Case(shares, floods=False), rate)
    usual_s, limit = p99_s(alone), ALLOWED * usual_in_flight(alone)
    print(f"{'shared system prompts' if shares else 'prompts of their own'}: without a flood {usual_s:.3f} s")
    for most in (0, limit):
        runs = played(Case(shares, floods=True), rate, most)
        times = p99_s(runs) / usual_s
        lost = sum(bool(call.refused) for call in neighbours(runs))
        what = f"a flood with at most {most} requests in flight" if most else "a flood without a limit"
        print(f"  {what}: {p99_s(runs):.3f} s, {times:.2f} times; {lost} requests of neighbours refused")
        if most and (times > MOST or lost):
            found.append(f"{what}: {times:.2f} times, not {MOST}; {lost} requests of neighbours refused")
    return found


def main() -> None:
    """Exits with 1 when something did not hold."""
    argparse.ArgumentParser(prog="python -m loadtests.gym.fair_tenants", description=__doc__).parse_args()
    rate = NORMAL * saturation(LOAD, FLEET)
    found = [problem for shares in (False, True) for problem in problems(shares=shares, rate=rate)]
    print_problems(found)
    print(verdict(found))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
