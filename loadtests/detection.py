"""Drill: how long until the gate knows that a unit cannot generate, for each fault, under load and idle.

`python -m loadtests.detection` prints a row for each fault x agent or none x load or idle, each of several
rounds on one fleet of two units, and the limits beside. The exit code is 1 when one is exceeded, a request
is lost, a healthy unit is shot, or a hurt one is trusted again.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import uvloop

from loadtests.kit import progress
from loadtests.kit.agents import Agents
from loadtests.kit.faults import FAULTS
from loadtests.kit.gate import GateProcess
from loadtests.kit.questions import Question
from loadtests.kit.report import columns, print_problems
from loadtests.kit.rounds import Moments, Outcome, account, hurt_and_heal, seconds
from loadtests.kit.sent import Sent
from loadtests.kit.users import Users
from loadtests.simunit.process import SimUnit, sim_units

STREAMS = 64
FOLLOWERS = 2
TIMING = {"step_ms": 50, "prefill_tokens_per_s": 100_000, "max_num_batched_tokens": 8192}
QUESTION = Question.between((100, 400), (8, 40))
"""Light enough for one unit alone: who waits for a token after a move waits for the gate, not for a unit."""

WAIT_LIMIT_S = 1.0
"""After detection, for whoever had shown no token."""

SETTLE_S = (2.5, 4.5)
"""Between rounds, drawn: probes have periods, and the fault must not fall into step with that."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    fault: str
    agent: bool
    load: bool

    def limit_s(self) -> float:
        """From the fault to DOWN."""
        if self.agent:
            return 0.3 if self.fault.startswith("kill") else 0.5
        if self.load:
            return 1.0 if self.fault.startswith("kill") else 3.0
        # Nothing but a canary sees the others. An idle unit gets one 14 s after it last showed work, and its
        # metrics may tell of that 3 s late.
        return 5.0 if self.fault in ("kill-leader", "stop-leader") else 20.0


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one case."""

    case: Case
    outcomes: list[Outcome]
    wait_limit_s: float = WAIT_LIMIT_S

    def problems(self) -> list[str]:
        """Why it fails; empty when it passes."""
        limit_s, problems = self.case.limit_s(), []
        for number, outcome in enumerate(self.outcomes, start=1):
            bad = list(outcome.bad)
            if outcome.down_s is not None and outcome.down_s > limit_s:
                bad.append(f"DOWN after {outcome.down_s:.2f} s, the limit is {limit_s} s")
            if outcome.waited_s > self.wait_limit_s:
                bad.append(f"without a token for {outcome.waited_s:.2f} s beyond detection")
            problems += [f"round {number}: {each}" for each in bad]
            problems += [f"round {number} was: {each}" for each in outcome.story if bad]
        return problems

    def cells(self) -> list[str]:
        """The row for people: median / worst."""
        outcomes = self.outcomes
        return [
            self.case.fault,
            "agent" if self.case.agent else "none",
            "load" if self.case.load else "idle",
            seconds([o.down_s for o in outcomes]),
            f"{self.case.limit_s():.1f}",
            seconds([o.last_sent_s for o in outcomes]) if self.case.load else "-",
            seconds([o.waited_s for o in outcomes]) if self.case.load else "-",
            f"{median(o.without_token for o in outcomes):.0f}" if self.case.load else "-",
            str(sum(o.broken for o in outcomes)),
            str(sum(len(o.bad) for o in outcomes)),
            seconds([o.up_s for o in outcomes]),
            "FAILED" if self.problems() else "passed",
        ]


HEADS = (
    "fault",
    "agent",
    "users",
    "DOWN, s",
    "limit",
    "last sent",
    "waited beyond",
    "waiting",
    "broken",
    "bad",
    "UP again",
    "",
)


async def run(case: Case, rounds: int, *, streams: int = STREAMS) -> Row:
    """All rounds of one case on one fleet; none of its processes is left afterwards."""
    with ExitStack() as stack:
        units = stack.enter_context(sim_units(("a", "b"), followers=FOLLOWERS, **TIMING))
        agents = stack.enter_context(Agents(units)) if case.agent else None
        gate = stack.enter_context(GateProcess(units, agents=agents))
        async with Users(gate.url, streams if case.load else 0, QUESTION) as users:
            moments = await _rounds(case, rounds, gate, units, agents)
        return Row(case, account(moments, users.answers))


async def _rounds(
    case: Case, rounds: int, gate: GateProcess, units: Sequence[SimUnit], agents: Agents | None
) -> list[Moments]:
    rng, fault, moments = random.Random(repr(case)), FAULTS[case.fault], []
    async with AsyncExitStack() as stack:
        sent = [await stack.enter_async_context(Sent(gate, unit.name)) for unit in units]
        for number in range(rounds):
            progress.phase(f"{case.fault}, round {number + 1} of {rounds}")
            await asyncio.to_thread(gate.wait_up)
            await asyncio.sleep(rng.uniform(*SETTLE_S))
            which, rank = number % len(units), rng.randint(1, FOLLOWERS)
            unit = units[which]

            def hurt(unit: SimUnit = unit, rank: int = rank) -> None:
                fault.hurt(unit, rank)

            def heal(unit: SimUnit = unit, rank: int = rank) -> None:
                fault.heal(unit, rank)
                if agents is not None:
                    agents.follow(unit)

            moments.append(await hurt_and_heal(gate, unit.name, sent[which], hurt, heal))
            if moments[-1].up_s is None:
                break  # The rounds that are left would prove nothing.
    return moments


@progress.shown("detection")
def main() -> int:
    """Run the cases that were asked for; 0 when every one passes."""
    args = _arguments()
    rows = []
    for case in _cases(args):
        rows.append(row := uvloop.run(run(case, args.rounds, streams=args.streams)))
        print(columns([HEADS, row.cells()]))
        print_problems(row.problems(), most=10)
    print("\nAll, as median / worst of the rounds in seconds:")
    print(columns([HEADS, *(row.cells() for row in rows)]))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 1 if any(row.problems() for row in rows) else 0


def _cases(args: argparse.Namespace) -> list[Case]:
    return [
        Case(name, agent, load)
        for name, fault in FAULTS.items()
        for agent in (True, False)
        for load in (True, False)
        if name in (args.fault or FAULTS)
        and (fault.seen_by_agent or not agent)
        and args.agent in (None, agent)
        and args.load in (None, load)
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.detection", description=__doc__)
    parser.add_argument("--fault", action="append", choices=FAULTS, help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each case")
    parser.add_argument("--streams", type=int, default=STREAMS, help="streaming users under load")
    parser.add_argument("--load", action="store_true", default=None, help="only under load")
    parser.add_argument("--idle", action="store_false", dest="load", default=None, help="only idle")
    parser.add_argument(
        "--agent", action=argparse.BooleanOptionalAction, help="only with agents, or only without"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
