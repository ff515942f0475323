"""How long streams pause when their unit breaks, and what their continuation costs, fault by fault.

`python -m loadtests.stream_pauses` breaks one of two simulated units, or of `--units`, under 32 streams, with
agents and without, several times for each fault. Each stream that the unit broke must go on at another one,
and every text is compared. The pause of a stream is the longest time between two of its tokens; as many of
the longest are taken as the gate says it has continued. The exit code is 1 when a stream is not whole.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import quantiles

import uvloop

from loadtests.kit import progress
from loadtests.kit.agents import Agents
from loadtests.kit.faults import FAULTS
from loadtests.kit.gate import GateProcess, metric_sum
from loadtests.kit.questions import Answer, End, Question, ask
from loadtests.kit.report import columns
from loadtests.simunit.process import SimUnit, sim_units
from loadtests.wire.client import Connections

STREAMS = 32
PROMPT_TOKENS, ANSWER_TOKENS = 400, 250
TIMING = {"step_ms": 20, "prefill_tokens_per_s": 100_000}
BEFORE_S = 2.0
"""All streams have shown tokens by then, and none has ended."""
NAMES = ("a", "b", "c", "d")
SHOWN = ("kill-leader", "kill-follower", "stop-leader", "stop-follower", "freeze-engine")


@dataclass(frozen=True, slots=True)
class Paused:
    """What some rounds of one fault came to. `again`: tokens, of prompts and answers, that a second unit had
    to take in.
    """

    fault: str
    agent: bool
    streams: int
    whole: int
    pauses_s: Sequence[float]
    again: int

    def row(self) -> tuple[str, ...]:
        """A row of the table."""
        cuts = quantiles(self.pauses_s, n=100, method="inclusive") if len(self.pauses_s) > 1 else [0.0] * 99
        times = (f"{cuts[at - 1]:.2f}" for at in (50, 99))
        each = self.again / max(1, len(self.pauses_s))
        agent = "with" if self.agent else "without"
        lost = str(self.streams - self.whole)
        return (self.fault, agent, str(len(self.pauses_s)), *times, lost, f"{each:.0f}")


HEAD = ("fault", "agent", "streams continued", "pause p50, s", "p99, s", "streams lost", "tokens again, each")


async def _round(gate: GateProcess, victim: SimUnit, fault: str, seed: int) -> list[Answer]:
    """The answers of all streams, one unit broken in the middle of them."""
    rng = random.Random(seed)
    sizes = {"prompt_tokens": PROMPT_TOKENS, "max_tokens": ANSWER_TOKENS}
    answers = [Answer(Question.draw(rng, **sizes)) for _ in range(STREAMS)]
    async with Connections(gate.url) as way:
        asked = asyncio.gather(*(ask(way, answer) for answer in answers))
        await asyncio.sleep(BEFORE_S)
        FAULTS[fault].hurt(victim, 1)
        await asked
    return answers


def measure(fault: str, rounds: int, *, units: int = 2, agent: bool) -> Paused:
    """Some rounds, each with units and a gate of its own."""
    streams = whole = again = 0
    pauses_s = list[float]()
    for number in range(rounds):
        with ExitStack() as stack:
            standing = stack.enter_context(sim_units(NAMES[:units], followers=2, **TIMING))
            agents = stack.enter_context(Agents(standing)) if agent else None
            gate = stack.enter_context(GateProcess(standing, agents=agents))
            answers = uvloop.run(_round(gate, standing[number % units], fault, number))
            continued = int(metric_sum(gate.metrics(), "cellgate_continuations_total", 'result="continued"'))
        broken = sorted(answers, key=lambda answer: -answer.gap_s)[:continued]
        pauses_s += [answer.gap_s for answer in broken]
        again += sum(PROMPT_TOKENS + answer.before_gap for answer in broken)
        streams += len(answers)
        whole += sum(answer.end() is End.WHOLE for answer in answers)
        for answer in answers:
            if answer.end() is not End.WHOLE:
                print(f"{fault}: {answer.why()}", file=sys.stderr)
    return Paused(fault, agent, streams, whole, pauses_s, again)


@progress.shown("stream-pauses")
def main() -> int:
    """Measure all faults; 1 when a stream was lost, or none was broken."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.stream_pauses", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--units", type=int, choices=range(2, len(NAMES) + 1), default=2)
    parser.add_argument("--fault", choices=FAULTS, help="only this one")
    args = parser.parse_args()
    found = list[Paused]()
    for fault, agent in itertools.product([args.fault] if args.fault else SHOWN, (True, False)):
        progress.phase(f"{fault}, {'with' if agent else 'without'} agents")
        found.append(measure(fault, args.rounds, units=args.units, agent=agent))
        print(columns([HEAD, found[-1].row()], numbers=True), flush=True)
    print(columns([HEAD, *(each.row() for each in found)], numbers=True))
    return 1 if any(each.whole < each.streams or not each.pauses_s for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
