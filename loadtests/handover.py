"""Drill: the gate is replaced by a new process again and again under load. Does any client notice?

`python -m loadtests.handover` sends SIGUSR2 to a gate before two simulated units, while users who keep their
connections and users who make a new one for each request stream answers, short and long, and a load balancer
asks /readyz. What must hold: every answer is whole, /readyz never says no, every gate that has handed over
ends. The exit code is 1 when it does not.
"""

import argparse
import asyncio
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import uvloop

from loadtests.kit import processes, progress
from loadtests.kit.gate import GateProcess
from loadtests.kit.questions import End, Question
from loadtests.kit.report import print_problems, verdict
from loadtests.kit.users import Users
from loadtests.simunit.process import sim_units
from loadtests.wire.client import Connections
from loadtests.wire.messages import get
from loadtests.wire.reply import Reply

REQUESTS = 5_000
HANDOVERS = 5
USERS = 24
"""Of each of the two kinds."""
STEP_MS = 4
LONG_SHARE, LONG_TOKENS = 0.05, 1_000
CHECK_S, CHECK_LIMIT_S = 0.02, 5.0
LIMIT_S = 90.0
"""A machine that has much else to do starts a process slowly; nobody waits for it meanwhile."""
ENDING_S = 60.0
_SUCCESSOR = re.compile(r"process (\d+) accepts clients")


class Dynasty:
    """The gates of one drill, one after the other; the first is started as ever, and has to end as well."""

    def __init__(self, first: GateProcess) -> None:
        self._first = first
        self.pids = [first.pid]

    def hand_over(self) -> float:
        """Have the gate that reigns start a successor; the seconds that took. Raises TimeoutError."""
        began_s = time.monotonic()
        processes.send(self.pids[-1], signal.SIGUSR2)
        while len(found := _SUCCESSOR.findall(self._first.log.read_text())) < len(self.pids):
            if time.monotonic() - began_s > LIMIT_S:
                raise TimeoutError(
                    f"no successor within {LIMIT_S:g} s:\n{self._first.log.read_text()[-2000:]}"
                )
            time.sleep(0.02)
        self.pids.append(int(found[-1]))
        return time.monotonic() - began_s

    def left(self) -> list[int]:
        """Those that live still, but for the last."""
        return [pid for pid in self.pids[:-1] if processes.is_running(pid)]

    def close(self) -> None:
        """End them all."""
        processes.end_all(self.pids)


class Checks:
    """A load balancer that asks /readyz, on a connection that it keeps and on new ones in turn."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self.answers: Counter[str] = Counter()

    async def run(self) -> None:
        """Ask until cancelled."""
        async with Connections(self._url) as kept:
            while True:
                for gate in (kept, Connections(self._url, keep=False)):
                    self.answers[await self._ask(gate)] += 1
                await asyncio.sleep(CHECK_S)

    async def _ask(self, gate: Connections) -> str:
        reply = Reply()
        try:
            async with asyncio.timeout(CHECK_LIMIT_S):
                await gate.exchange(get("/readyz"), reply)
        except OSError as error:
            return repr(error)
        return str(reply.status)

    def problems(self) -> list[str]:
        """What was no yes."""
        return [f"/readyz: {n} times {what}" for what, n in self.answers.items() if what != "200"]


def _question(rng: random.Random) -> Question:
    tokens = LONG_TOKENS if rng.random() < LONG_SHARE else rng.randint(4, 32)
    return Question.draw(rng, prompt_tokens=rng.randint(10, 200), max_tokens=tokens)


async def run(requests: int, handovers: int) -> tuple[list[str], str]:
    """One drill: what is wrong, and a line about it all."""
    with ExitStack() as stack:
        units = stack.enter_context(sim_units(("a", "b"), step_ms=STEP_MS))
        first = stack.enter_context(GateProcess(units))
        dynasty = Dynasty(first)
        stack.callback(dynasty.close)
        checks = Checks(first.admin_port)
        checking = asyncio.create_task(checks.run())
        keeping = Users(first.url, USERS, _question, seed=1)
        coming = Users(first.url, USERS, _question, seed=2, keep_connections=False)
        async with keeping, coming:
            took_s = []
            for number in range(1, handovers + 1):
                progress.phase(f"before hand-over {number} of {handovers}")
                await _until_ended(number * requests // (handovers + 1), keeping, coming)
                took_s.append(await asyncio.to_thread(dynasty.hand_over))
            await _until_ended(requests, keeping, coming)
        problems = await _all_end(dynasty)
        checking.cancel()
        await asyncio.wait([checking])
    answers = keeping.answers + coming.answers
    failed = [answer.why() for answer in answers if answer.end() is not End.WHOLE]
    slowest_s = max(answer.first_at - answer.sent_at for answer in answers if answer.first_at is not None)
    summary = (
        f"{len(failed)} of {len(answers)} requests failed, {handovers} hand-overs "
        f"({', '.join(f'{each:.1f}' for each in took_s)} s), slowest first token {1000 * slowest_s:.0f} ms, "
        f"/readyz asked {checks.answers.total()} times"
    )
    return failed[:10] + problems + checks.problems(), summary


async def _until_ended(count: int, *users: Users) -> None:
    """Wait until so many requests have ended."""
    while True:
        if sum(answer.ended_at > 0.0 for each in users for answer in each.answers) >= count:
            return
        await asyncio.sleep(0.05)


async def _all_end(dynasty: Dynasty) -> list[str]:
    """Wait until the gates that have handed over have ended."""
    give_up_at = time.monotonic() + ENDING_S
    while True:
        if not (left := dynasty.left()) or time.monotonic() > give_up_at:
            return [f"gate {pid} still runs {ENDING_S:g} s after the last request" for pid in left]
        await asyncio.sleep(0.1)


@progress.shown("handover")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the drill; 0 when nobody noticed."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.handover", description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--handovers", type=int, default=HANDOVERS)
    args = parser.parse_args(arguments)
    problems, summary = uvloop.run(run(args.requests, args.handovers))
    print(f"{verdict(problems)}: {summary}")
    print_problems(problems)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
