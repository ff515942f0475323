"""Drill: one of two units breaks under streaming users, and every single request is accounted for.

`python -m loadtests.failover` starts fresh units and a fresh gate for each round. What must hold: a request
that had shown no token is answered by the other unit, a broken stream ends with an error event, nothing
hangs. The exit code is 1 when it does not, or when no request of a round had to move: that proves nothing.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass

import uvloop

from loadtests.kit import progress
from loadtests.kit.faults import FAULTS
from loadtests.kit.gate import GateProcess, metric_sum
from loadtests.kit.questions import Answer, End, Question
from loadtests.kit.report import print_problems, verdict
from loadtests.kit.sent import Sent
from loadtests.kit.users import Users
from loadtests.simunit.process import SimUnit, sim_units

MUST_NOT = (End.UNANSWERED, End.CUT_SILENTLY, End.HUNG, End.WRONG)
TIMING = {"step_ms": 50, "prefill_tokens_per_s": 20_000}
QUESTION = Question.between((200, 2500), (4, 24))
"""10 to 125 ms of prefill when alone; behind the prompts of 31 other users it takes a second."""

WITHOUT_TOKEN = 0.3
"""The fault comes at a moment when at least this share of the requests in flight has shown no token."""

_PATIENCE_S = 5.0
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Drill:
    """One round's plan. Users begin `before_s` before the fault, and ask on until `after_s` after it."""

    fault: str = "kill-leader"
    streams: int = 64
    before_s: float = 4.0
    after_s: float = 12.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """What came of one. `down_s` (None: never) and `last_sent_s`, the last request sent to the broken unit,
    count from the fault.
    """

    answers: list[Answer]
    fault_at: float
    down_s: float | None
    last_sent_s: float
    moved: int

    def ends(self) -> Counter[End]:
        """How many requests ended how."""
        return Counter(answer.end() for answer in self.answers)

    def in_flight(self) -> list[Answer]:
        """The requests that the fault met."""
        return [each for each in self.answers if each.sent_at < self.fault_at < each.ended_at]

    def without_token(self) -> int:
        """How many of those had shown no token then."""
        return sum(each.first_at is None or each.first_at > self.fault_at for each in self.in_flight())

    def longest_ttft_s(self) -> float:
        """The longest wait for a first token that came after the fault."""
        first = [(each.first_at, each.sent_at) for each in self.answers if each.first_at is not None]
        return max((at - sent_at for at, sent_at in first if at > self.fault_at), default=0.0)

    def problems(self) -> list[str]:
        """Why this round fails; empty when it passes."""
        problems = [each.why() for each in self.answers if each.end() in MUST_NOT]
        if self.down_s is None:
            problems.append("the broken unit never came to be DOWN")
        if not self.moved:
            problems.append("proves nothing: the broken unit had no request without a token")
        return problems

    def lines(self) -> list[str]:
        """The round for people."""
        ends, cuts = self.ends(), sum(bool(each.cut) for each in self.answers)
        sent = "no request" if self.last_sent_s < 0 else f"the last request {self.last_sent_s:.2f} s after it"
        down = "never" if self.down_s is None else f"{self.down_s:.2f} s after it"
        return [
            _count(ends),
            f"at the fault {len(self.in_flight())} in flight, {self.without_token()} without a token: "
            f"{self.moved} moved to the other unit; {cuts} connections cut",
            f"after the fault the broken unit was sent {sent}; "
            f"DOWN {down}; longest TTFT from then on {self.longest_ttft_s():.2f} s",
        ]


async def run(drill: Drill) -> Round:
    """One round with units and gate of its own; none of their processes is left afterwards."""
    with sim_units(("a", "b"), **TIMING) as units, GateProcess(units) as gate:
        return await _round(drill, gate, units[drill.seed % 2])


async def _round(drill: Drill, gate: GateProcess, victim: SimUnit) -> Round:
    async with (
        Users(gate.url, drill.streams, QUESTION, seed=drill.seed) as users,
        Sent(gate, victim.name) as sent,
    ):
        await asyncio.sleep(drill.before_s)
        await _until_many_wait(users.answers)
        fault_at, fault_time = time.monotonic(), time.time()
        FAULTS[drill.fault].hurt(victim, 1)
        await asyncio.sleep(drill.after_s)
    down_time = await asyncio.to_thread(gate.flipped, victim.name, "down", fault_time)
    page = await asyncio.to_thread(gate.metrics)
    return Round(
        answers=users.answers,
        fault_at=fault_at,
        down_s=None if down_time is None else down_time - fault_time,
        last_sent_s=sent.last_at - fault_at,
        moved=int(metric_sum(page, "cellgate_retries_total", f'unit="{victim.name}"')),
    )


async def _until_many_wait(answers: list[Answer]) -> None:
    for _ in range(int(_PATIENCE_S / _LOOK_S)):
        if _many_wait(answers):
            return
        await asyncio.sleep(_LOOK_S)


def _many_wait(answers: list[Answer]) -> bool:
    live = [answer for answer in answers if not answer.ended_at]
    return sum(answer.first_at is None for answer in live) >= WITHOUT_TOKEN * len(live) > 0


def _count(ends: Counter[End]) -> str:
    return f"{ends.total()} requests: " + ", ".join(f"{ends[end]} {end.value}" for end in End)


@progress.shown("failover")
def main() -> int:
    """Run the rounds; 0 when every one passes."""
    args = _arguments()
    failed = 0
    total: Counter[End] = Counter()
    for number in range(args.rounds):
        progress.phase(f"round {number + 1} of {args.rounds}, {failed} failed")
        outcome = uvloop.run(run(Drill(args.fault, args.streams, seed=number)))
        problems = outcome.problems()
        print(f"round {number + 1} ({args.fault}): {verdict(problems)}")
        print(*(f"  {line}" for line in outcome.lines()), sep="\n", flush=True)
        print_problems(problems, most=10)
        total.update(outcome.ends())
        failed += bool(problems)
    print(f"{args.rounds - failed} of {args.rounds} rounds passed: {_count(total)}")
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.failover", description=__doc__)
    parser.add_argument("--streams", type=int, default=64, help="streaming users, each in a closed loop")
    parser.add_argument("--fault", choices=FAULTS, default="kill-leader", help="what happens to one unit")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
