"""Drill: gates that share a Redis are replaced one by one by another version, and back, under load.

`python -m loadtests.upgrade` starts two gates of the last release on one Redis, before the same two units and
behind HAProxy. Each becomes this version, then each the last one again. What must hold: no request fails, and
each gate hears the other, whichever version either is. The exit code is 1 when it does not.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import uvloop

from loadtests import last_release
from loadtests.drill import routers
from loadtests.kit import progress
from loadtests.kit.gate import THIS, GateProcess, metric_sum
from loadtests.kit.questions import End, Question
from loadtests.kit.redis_server import redis_server
from loadtests.kit.report import print_problems, verdict
from loadtests.kit.users import Users
from loadtests.kit.waiting import wait_until
from loadtests.simunit.process import sim_units

USERS = 16
STEP_MS = 5
BETWEEN_S = 3.0
"""How long the versions serve side by side after each replacement."""
HEARD_S = 10.0


def _question(rng: random.Random) -> Question:
    return Question.draw(rng, prompt_tokens=rng.randint(10, 300), max_tokens=rng.randint(4, 120))


async def run(between_s: float) -> tuple[list[str], str]:
    """One drill: what is wrong, and a line about it all."""
    problems: list[str] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="upgrade-")))
        last = last_release.unpack(folder / "last")
        server = stack.enter_context(redis_server())
        units = stack.enter_context(sim_units(("a", "b"), step_ms=STEP_MS))
        settings = {"redis": server.url}
        gates = [stack.enter_context(GateProcess(units, settings=settings, program=last)) for _ in range(2)]
        command = routers.ingress([(gate.port, gate.admin_port) for gate in gates], folder)
        url = stack.enter_context(routers.running(command, folder / "haproxy.log", "/v1/models"))
        async with Users(url, USERS, _question, seed=1) as users:
            for program, what in ((THIS, "forward"), (last, "back")):
                for number, gate in enumerate(gates):
                    progress.phase(f"gate {number + 1} is rolled {what}")
                    gate.program = program
                    await asyncio.to_thread(gate.restart)
                    if not await asyncio.to_thread(_hear_each_other, gates):
                        problems.append(f"rolled {what}, gate {number + 1}: the gates do not hear each other")
                    await asyncio.sleep(between_s)
    failed = [answer.why() for answer in users.answers if answer.end() is not End.WHOLE]
    if not users.answers:
        problems.append("nobody asked for anything")
    summary = f"{len(failed)} of {len(users.answers)} requests failed; two gates, {last_release.name()[:12]}"
    return [*failed[:10], *problems], f"{summary} to this version and back"


def _hear_each_other(gates: Sequence[GateProcess]) -> bool:
    return wait_until(
        lambda: all(metric_sum(gate.metrics(), "cellgate_redis_peers") == 1 for gate in gates), HEARD_S
    )


@progress.shown("upgrade")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the drill; 0 when nobody noticed."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.upgrade", description=__doc__)
    parser.add_argument("--between-s", type=float, default=BETWEEN_S, help="after each replacement")
    args = parser.parse_args(arguments)
    problems, summary = uvloop.run(run(args.between_s))
    print(f"{verdict(problems)}: {summary}")
    print_problems(problems)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
