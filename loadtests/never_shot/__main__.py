"""Drill: a unit that is merely busy is never taken out, and one that is merely slow is only called degraded.

`python -m loadtests.never_shot` keeps two healthy units full for ten minutes, while phases of what looks like
trouble take turns. What must hold: no verdict changes, no request hangs or is answered wrongly. `--slow`
makes one unit 1.5 times as slow instead: it must be `degraded` within 60 s and never DOWN. `--engines 30`
draws slow and small engines, as tests/scenarios/slow_engines.py does in virtual time: none may go DOWN, no
answer may be lost. The exit code is 1 when something of it does not hold.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from random import Random
from typing import NamedTuple, Self

import uvloop

from loadtests.kit import progress
from loadtests.kit.agents import Agents
from loadtests.kit.gate import GateProcess
from loadtests.kit.questions import Answer, End, Question
from loadtests.kit.report import print_problems, verdict
from loadtests.kit.users import Users
from loadtests.never_shot.storms import PHASES, Place
from loadtests.simunit.process import SimUnit, sim_units

STREAMS = 64
TIMING = {
    "step_ms": 50,
    "prefill_tokens_per_s": 20_000,
    "max_model_len": 131_072,
    "num_gpu_blocks": 24_576,
    "model": "sim-" + "x" * 1000,
}
"""A prompt of 100k tokens takes 5 s when alone, and three of them fit the KV cache. The model's name is in
every event: so large, slow clients fill every buffer on the way.
"""

SETTINGS = {"queue": {"max_wait_s": 8.0}}
"""Its clients call a request hung that shows nothing for 10 s: in the gate it may wait for most of that."""
QUESTION = Question.between((200, 2500), (8, 64))
PHASE_S = 20.0
SLOW = 1.5
DEGRADED_LIMIT_S = 60.0
SLOW_S = 90.0
FIRST_TOKEN_S, ANSWER_S, ENGINES_S, AT_ONCE = 20.0, 10.0, 60.0, 5
"""Of slow engines: the longest prompts and answers, how long they work, and seeds at a time."""
SILENCE_S = 120.0
"""Their users wait so long for a byte: a stream that has begun stands still, and the gate says nothing, while
the engine computes the prompts of all others.
"""
MUST_NOT = (End.CUT_SILENTLY, End.HUNG, End.WRONG, End.BROKEN)
"""Who is refused with a 429 or 503 has not been answered, which is right when all queues are full."""


async def never_shot(minutes: float, only: str | None) -> list[str]:
    """All phases in turn until the time is over; what must not have been."""
    phases = [phase for phase in PHASES if only in (None, phase.name)]
    with sim_units(("a", "b"), **TIMING) as units, GateProcess(units, settings=SETTINGS) as gate:
        began, over_at = time.time(), time.monotonic() + 60 * minutes
        problems: list[str] = []
        place = Place(gate, units)
        async with Users(gate.url, STREAMS, QUESTION) as users:
            while time.monotonic() < over_at:
                for phase in phases:
                    progress.phase(f"{phase.name}, {len(problems)} problems")
                    seen, flips = len(users.answers), len(gate.flips(began))
                    said = await phase.run(place, PHASE_S)
                    await asyncio.to_thread(_heal, units)
                    flipped = (await asyncio.to_thread(gate.flips, began))[flips:]
                    print(f"{phase.name}: {_count(users.answers[seen:])}; {said}; {len(flipped)} flips")
                    problems += (lines := [f"{phase.name}: {flip['line']}" for flip in flipped])
                    print_problems(lines)
        problems += place.bad
        return problems + [each.why() for each in users.answers if each.end() in MUST_NOT]


async def slow() -> list[str]:
    """One unit is slow; what must not have been."""
    with sim_units(("a", "b"), **TIMING) as units, GateProcess(units) as gate:
        async with Users(gate.url, STREAMS, QUESTION) as users:
            await asyncio.sleep(20.0)
            began, fault_at = time.time(), time.monotonic()
            await asyncio.to_thread(units[0].fault, "slow", factor=SLOW)
            degraded_s: float | None = None
            while (now_s := time.monotonic() - fault_at) < SLOW_S:
                shown = {unit["name"]: unit.get("degraded") for unit in await asyncio.to_thread(gate.units)}
                if shown["a"] and degraded_s is None:
                    degraded_s = now_s
                    print(f"degraded after {now_s:.1f} s: {shown}", flush=True)
                await asyncio.sleep(0.5)
            down = [f for f in await asyncio.to_thread(gate.flips, began) if f["after"] == "down"]
        print(f"after {SLOW_S:.0f} s: {shown}; {_count(users.answers)}")
    problems = [f"shot: {flip['line']}" for flip in down]
    if degraded_s is None or degraded_s > DEGRADED_LIMIT_S:
        problems.append(f"degraded after {degraded_s} s, the limit is {DEGRADED_LIMIT_S:.0f} s")
    if shown["b"]:
        problems.append("the healthy unit is called degraded too")
    return problems + [each.why() for each in users.answers if each.end() in MUST_NOT]


class Slow(NamedTuple):
    """Engines of one seed: what their processes are told, and what is asked of them."""

    units: int
    users: int
    in_flight: int
    has_agents: bool
    options: dict[str, float]
    question: Callable[[Random], Question]

    @classmethod
    def draw(cls, seed: int) -> Self:
        """1 to 64 slots, 20 to 20,000 tokens a second of prefill, 1 to 100 for each answer."""
        rng = Random(seed)
        slots, units = rng.choice((1, 2, 4, 64)), rng.randint(1, 2)
        prefill_tokens_s, tokens_s = 20.0 * 1000.0 ** rng.random(), 100.0 ** rng.random()
        users = rng.randint(1, min(2 * slots, 6) * units)
        prompt = min(16_000, max(20, int(prefill_tokens_s * FIRST_TOKEN_S / max(1.0, users / units))))
        answer = min(256, max(2, int(tokens_s * ANSWER_S)))
        options = {
            "step_ms": 1000.0 / tokens_s,
            "prefill_tokens_per_s": prefill_tokens_s,
            "max_num_seqs": slots,
            "max_num_batched_tokens": rng.choice((512, 2048, 16_384)),
            "num_gpu_blocks": 65_536,
            "blind": rng.randint(0, 1),
        }
        has_agents, sizes = rng.random() < 0.5, ((10, prompt), (1, answer))
        return cls(units, users, 2 * slots, has_agents, options, Question.between(*sizes))


async def slow_engines(seed: int) -> list[str]:
    """Slow and small engines that are well keep their requests; what must not have been."""
    drawn = Slow.draw(seed)
    with ExitStack() as stack:
        units = stack.enter_context(sim_units("abc"[: drawn.units], **drawn.options))
        agents = stack.enter_context(Agents(units)) if drawn.has_agents else None
        gate = stack.enter_context(GateProcess(units, max_in_flight=drawn.in_flight, agents=agents))
        began = time.time()
        async with Users(gate.url, drawn.users, drawn.question, seed=seed, silence_s=SILENCE_S) as users:
            await asyncio.sleep(ENGINES_S)
            ended = [answer for answer in users.answers if answer.ended_at]
        lost = [answer for answer in ended if answer.status != 200 or answer.end() is not End.WHOLE]
        downs = [flip["line"] for flip in gate.flips(began) if flip["after"] == "down"]
    what = (
        f"seed {seed}, {drawn.units} units, {drawn.users} users, agents {drawn.has_agents}, {drawn.options}"
    )
    print(f"{what}: {_count(users.answers)}", flush=True)
    return [f"{what}: {each}" for each in (*downs, *(answer.why() for answer in lost))]


async def many_engines(seeds: range) -> list[str]:
    """Some at a time, for they are slow and not busy."""
    problems: list[str] = []
    for first in range(seeds.start, seeds.stop, AT_ONCE):
        together = range(first, min(first + AT_ONCE, seeds.stop))
        found = await asyncio.gather(
            *(asyncio.to_thread(uvloop.run, slow_engines(each)) for each in together)
        )
        problems += [line for lines in found for line in lines]
    return problems


def _heal(units: Sequence[SimUnit]) -> None:
    for unit in units:
        unit.fault("heal")


def _count(answers: Iterable[Answer]) -> str:
    ended = [answer for answer in answers if answer.ended_at]
    ends = Counter(answer.end().value for answer in ended if answer.status == 200)
    refused = Counter(f"status {answer.status}" for answer in ended if answer.status != 200)
    return f"{len(ended)} requests: " + ", ".join(f"{n} {what}" for what, n in (ends + refused).items())


@progress.shown("never-shot")
def main() -> int:
    """Run it; 0 when nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.never_shot", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="at least one round of all phases")
    parser.add_argument("--phase", choices=[phase.name for phase in PHASES], help="only this one")
    parser.add_argument("--slow", action="store_true", help="the slow unit instead")
    parser.add_argument(
        "--engines", type=int, metavar="SEEDS", help="slow and small engines of so many seeds"
    )
    parser.add_argument("--first", type=int, default=0, help="the first of these seeds")
    args = parser.parse_args()
    if args.engines:
        played = many_engines(range(args.first, args.first + args.engines))
    else:
        played = slow() if args.slow else never_shot(args.minutes, args.phase)
    problems = uvloop.run(played)
    print(verdict(problems))
    print_problems(problems, most=20)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
