"""What probes cost: CPU of a gate that looks after 1,000 units of 4 nodes, each probed once a second.

`python -m loadtests.probe_cost` puts the gate before a mock fleet: leaders by readiness and engine metrics,
followers by an HTTP probe each. What must hold: at most 30 % of one core, 8 % and one canary a unit in 14 s
while the fleet is idle, none while its engines' counters grow. The exit code is 1 when something does not.
"""

import argparse
import json
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass

from loadtests.kit import progress
from loadtests.kit.gate import GateProcess
from loadtests.kit.mock_fleet import NODES, MockUnit, mock_fleet
from loadtests.kit.report import print_problems, verdict
from loadtests.wire.blocking import fetch

CPU_LIMIT, IDLE_CPU_LIMIT = 0.30, 0.08
CANARY_PERIOD_S, KNOWN_PROMPT_PERIOD_S = 14.0, 60.0
MEASURED_S = 68.0
"""Five times the mean pause between canaries: units are not spread evenly, and in another time some would be
counted once more or less.
"""
JITTER = 0.05
"""Of canaries: pauses are drawn, so that units drift apart."""

PROBES_PER_S = NODES
"""Of a unit: one probe of each follower, and readiness or metrics of the leader."""

ENOUGH = 0.9
"""Of the looks that are due."""

METRICS_KB = 50.0
"""As large as the page of vLLM 0.32 after its first requests: 614 lines."""

SETTLE_S, REST_S = 10.0, 120.0
"""Idle units are asked ever more rarely in the first minutes."""
REST_SHARE = 0.09
"""So many of the probes of a busy fleet an idle one gets in the end: pauses are ten times as long, and up to
a quarter more.
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """What some seconds of probing took. `asked`: how often the fleet was asked what."""

    units: int
    busy: bool
    seconds: float
    cpu_s: float
    asked: Counter[str]

    @property
    def share(self) -> float:
        """Of one core."""
        return self.cpu_s / self.seconds

    @property
    def canaries_per_s(self) -> float:
        """Of each unit."""
        return self.asked["POST /v1/chat/completions"] / self.units / self.seconds

    @property
    def known_prompts_per_s(self) -> float:
        """Of each unit: each once a minute, whatever path it is tried at."""
        posts = sum(count for what, count in self.asked.items() if what.endswith("(known prompt)"))
        return posts / self.units / self.seconds

    @property
    def probes_per_s(self) -> float:
        """Of the fleet, without canaries."""
        return sum(n for what, n in self.asked.items() if what.startswith("GET")) / self.seconds

    def problems(self) -> list[str]:
        """Why it fails; empty when it passes."""
        problems = []
        limit = CPU_LIMIT if self.busy else IDLE_CPU_LIMIT
        if self.share > limit:
            problems.append(f"{self.share:.0%} of a core, the limit is {limit:.0%}")
        most = 0.0 if self.busy else (1 + JITTER) / CANARY_PERIOD_S
        if self.canaries_per_s > most:
            problems.append(f"{self.canaries_per_s:.3f} canaries a unit a second, the limit is {most:.3f}")
        known = 0.0 if self.busy else (1 + JITTER) / KNOWN_PROMPT_PERIOD_S
        if self.known_prompts_per_s > known:
            found = f"{self.known_prompts_per_s:.3f} known prompts a unit a second"
            problems.append(f"{found}, the limit is {known:.3f}")
        if self.probes_per_s < ENOUGH * PROBES_PER_S * self.units * (1.0 if self.busy else REST_SHARE):
            problems.append(f"proves nothing: only {self.probes_per_s:.0f} probes a second were made")
        return problems

    def line(self) -> str:
        """The cost for people."""
        asked = ", ".join(f"{count / self.seconds:.0f} {what}" for what, count in self.asked.most_common())
        each_us = 1e6 * self.cpu_s / max(1, sum(self.asked.values()))
        return (
            f"{'busy' if self.busy else 'idle'} fleet of {self.units}: {self.share:.1%} of a core, "
            f"{each_us:.0f} us a look; {self.canaries_per_s:.3f} canaries a unit a second; a second: {asked}"
        )


def measure(units: int, seconds: float, metrics_kb: float, *, busy: bool) -> Cost:
    """One run with a gate and a fleet of its own; neither is left afterwards."""
    with ExitStack() as stack:
        served = stack.enter_context(mock_fleet(units, metrics_kb, busy=busy))
        nodes = {unit.name: unit.nodes() for unit in served}
        gate = stack.enter_context(GateProcess(served, nodes=nodes.__getitem__))
        time.sleep(SETTLE_S if busy else REST_S)
        before, cpu_s, began = _counts(served[0]), gate.cpu_s(), time.monotonic()
        time.sleep(seconds)
        cpu_s, took_s = gate.cpu_s() - cpu_s, time.monotonic() - began
        asked = _counts(served[0]) - before
        del asked["GET /counts"]
        return Cost(units, busy, took_s, cpu_s, asked)


def _counts(unit: MockUnit) -> Counter[str]:
    return Counter(json.loads(fetch(f"{unit.url}/counts").body))


@progress.shown("probe-cost")
def main() -> int:
    """Measure both fleets, or one; 0 when all holds."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.probe_cost", description=__doc__)
    parser.add_argument("--units", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=MEASURED_S, help="of measuring, for each fleet")
    parser.add_argument("--metrics-kb", type=float, default=METRICS_KB, help="a page of engine metrics")
    parser.add_argument("--busy", action=argparse.BooleanOptionalAction, help="only the busy or idle fleet")
    args = parser.parse_args()
    problems = []
    for busy in (False, True) if args.busy is None else (args.busy,):
        progress.phase("busy units" if busy else "idle units")
        cost = measure(args.units, args.seconds, args.metrics_kb, busy=busy)
        print(cost.line(), flush=True)
        problems += cost.problems()
    print(verdict(problems))
    print_problems(problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
