"""Drill: a leader restarts faster than any probe looks. Who reaches the new process first?

`python -m loadtests.restart` kills a leader while its successor waits for the port: under streaming users,
and in an idle fleet whose users come right after. What must hold: the new process has answered a canary
before it gets any request. The exit code is 1 when it does not.
"""

import argparse
import asyncio
import itertools
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import uvloop

from loadtests.detection import TIMING
from loadtests.kit import progress
from loadtests.kit.agents import Agents
from loadtests.kit.gate import GateProcess
from loadtests.kit.questions import Question
from loadtests.kit.report import print_problems, verdict
from loadtests.kit.rounds import MUST_NOT
from loadtests.kit.users import RAMP_S, Users
from loadtests.kit.waiting import until
from loadtests.simunit.process import SimUnit, sim_units

STREAMS = 64
QUESTION = Question.between((50, 200), (4, 24))
SETTLE_S = 3.0
CANARY = "cellgate-canary-"
_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One restart. `journal`: what befell the first generations that reached the new process, in order;
    `gone_s`: from the kill until the successor listened.
    """

    gone_s: float
    journal: list[str]
    served: bool

    def problems(self) -> list[str]:
        """Why it fails; empty when it passes."""
        if not self.served:
            return ["proves nothing: no request reached the new process"]
        first = next(n for n, line in enumerate(self.journal) if _is_request(line))
        if not any(line.startswith(f"ended {CANARY}") for line in self.journal[:first]):
            return [f"a request before a canary was answered: {', '.join(self.journal[: first + 1])}"]
        return []


def _is_request(line: str) -> bool:
    return not line.split()[1].startswith(CANARY)


async def run(
    rounds: int, *, agents: bool, load: bool, streams: int = STREAMS
) -> tuple[list[Outcome], list[str]]:
    """All rounds on one fleet, and why requests ended as they must not."""
    with ExitStack() as stack:
        units = stack.enter_context(sim_units(("a", "b"), **TIMING))
        watched = stack.enter_context(Agents(units)) if agents else None
        gate = stack.enter_context(GateProcess(units, agents=watched))
        outcomes, lost = [], []
        for number in range(rounds):
            progress.phase(f"restart {number + 1} of {rounds}")
            await asyncio.to_thread(gate.wait_up)
            unit = units[number % 2]
            users = Users(gate.url, streams, QUESTION, seed=number, ramp_s=RAMP_S if load else 0.0)
            if load:
                async with users:
                    await asyncio.sleep(SETTLE_S + random.random())
                    outcomes.append(await _served(unit, await _restart(unit, watched)))
            else:
                await asyncio.sleep(SETTLE_S + random.random())
                gone_s = await _restart(unit, watched)
                async with users:
                    outcomes.append(await _served(unit, gone_s))
            lost += [answer.why() for answer in users.answers if answer.end() in MUST_NOT]
        return outcomes, lost


async def _restart(unit: SimUnit, agents: Agents | None) -> float:
    gone_s = await asyncio.to_thread(unit.restart)
    if agents is not None:
        agents.follow(unit)
    return gone_s


async def _served(unit: SimUnit, gone_s: float) -> Outcome:
    """Wait until a request has reached the new process."""
    served = await until(lambda: any(map(_is_request, unit.state()["journal"])), _PATIENCE_S)
    return Outcome(gone_s, (await asyncio.to_thread(unit.state))["journal"], served)


@progress.shown("restart")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds, with agents and without; 0 when each passes."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.restart", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--agent", action=argparse.BooleanOptionalAction, help="only with, or only without")
    args = parser.parse_args(arguments)
    failed = False
    agents_or_not = (True, False) if args.agent is None else (args.agent,)
    for agents, load in itertools.product(agents_or_not, (True, False)):
        outcomes, lost = uvloop.run(run(args.rounds, agents=agents, load=load))
        kind = f"{'with' if agents else 'without'} agents, {'under load' if load else 'idle'}"
        for number, outcome in enumerate(outcomes, start=1):
            problems = outcome.problems()
            print(f"{kind}, restart {number}: {verdict(problems)}; ", end="")
            print(f"nobody listened for {1000 * outcome.gone_s:.0f} ms; first: {outcome.journal[:3]}")
            print_problems(problems)
            failed |= bool(problems)
        print_problems(lost, most=10)
        failed |= bool(lost)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
