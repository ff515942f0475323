"""Drill: real vLLM units lose their follower's worker, or stand still, under users of the gate.

`python -m loadtests.vllm_detection` starts two units on this machine's CPU (8 GB, over a minute), freezes and
continues processes of one; each kill takes a pair of its own. What must hold is what `loadtests.detection`
asks of simulated units, but for waits: a CPU is too slow for those. The exit code is 1 when it does not.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import uvloop

from loadtests.detection import HEADS, Case, Row
from loadtests.kit import progress
from loadtests.kit.agents import Agents
from loadtests.kit.gate import GateProcess
from loadtests.kit.questions import Question
from loadtests.kit.report import columns, print_problems
from loadtests.kit.rounds import Moments, account, hurt_and_heal
from loadtests.kit.sent import Sent
from loadtests.kit.users import Users

USERS = 8
START_PATIENCE_S = 600.0
STOP_PATIENCE_S = 60.0
SETTLE_S = 6.0
FAULTS = {
    "stop-worker": ("follower_worker", signal.SIGSTOP),
    "stop-engine": ("leader_engine", signal.SIGSTOP),
    "kill-worker": ("follower_worker", signal.SIGKILL),
}
"""The process, by its role in `loadtests.vllm_unit --state`, and what it is sent."""


@dataclass(frozen=True, slots=True)
class VllmUnit:
    """A unit as `--state` tells of it."""

    name: str
    url: str
    pids: dict[str, int]
    host: str = "127.0.0.1"

    def node_pids(self) -> dict[str, int]:
        """One node for each process: they share a process table, and no pattern tells two units apart."""
        return {f"{self.name}-{role}": pid for role, pid in self.pids.items()}

    def signal(self, role: str, number: signal.Signals) -> None:
        """Send a signal to one process."""
        os.kill(self.pids[role], number)


class Prompt(Question):
    """A question whose answer nobody knows beforehand: whole is what came to its end with some text."""

    def begins_with(self, _text: str) -> bool:
        """Any text will do."""
        return True

    def is_answered_by(self, text: str) -> bool:
        """Some text."""
        return bool(text)


PROMPT = Prompt.between((10, 60), (16, 48))


@contextmanager
def fleet(base_port: int) -> Iterator[list[VllmUnit]]:
    """Two units that answer; none of their processes is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="vllm-drill-") as folder:
        state = Path(folder) / "state.json"
        command = [sys.executable, "-m", "loadtests.vllm_unit", "--base-port", str(base_port)]
        command += ["--units", "2", "--state", str(state)]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            give_up_at = time.monotonic() + START_PATIENCE_S
            while not state.exists():
                if process.poll() is not None or time.monotonic() > give_up_at:
                    raise RuntimeError("the vLLM units did not start; what they said is above")
                time.sleep(0.5)
            units = json.loads(state.read_text())["units"]
            yield [VllmUnit(unit["name"], unit["url"], unit["pids"]) for unit in units]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(STOP_PATIENCE_S)


async def run(case: Case, units: Sequence[VllmUnit], rounds: int) -> Row:
    """Rounds of one case with a gate of its own; a kill is the last thing that befalls a unit."""
    role, number = FAULTS[case.fault]
    async with AsyncExitStack() as stack:
        agents = stack.enter_context(Agents(units)) if case.agent else None
        gate = stack.enter_context(GateProcess(units, agents=agents))
        async with Users(gate.url, USERS if case.load else 0, PROMPT) as users:
            moments: list[Moments] = []
            for index in range(rounds):
                unit = units[index % len(units)]
                heal = partial(unit.signal, role, signal.SIGCONT) if number is signal.SIGSTOP else None
                moments.append(await _round(gate, unit.name, partial(unit.signal, role, number), heal))
        return Row(case, account(moments, users.answers), wait_limit_s=float("inf"))


async def _round(
    gate: GateProcess, unit: str, hurt: Callable[[], object], heal: Callable[[], object] | None
) -> Moments:
    await asyncio.to_thread(gate.wait_up)
    async with Sent(gate, unit) as sent:
        await asyncio.sleep(SETTLE_S + random.random())
        return await hurt_and_heal(gate, unit, sent, hurt, heal)


@progress.shown("vllm-detection")
def main() -> int:
    """Run the cases that were asked for; 0 when every one passes."""
    args = _arguments()
    rows: list[Row] = []
    progress.figures(lambda: f"{len(rows)} cases so far")

    def take(row: Row) -> None:
        rows.append(row)
        print(columns([HEADS, row.cells()]))
        print_problems(row.problems(), most=10)

    kills = [case for case in _cases(args) if case.fault.startswith("kill")]
    if others := [case for case in _cases(args) if case not in kills]:
        with fleet(args.base_port) as units:
            for case in others:
                take(uvloop.run(run(case, units, args.rounds)))
    for case in kills:
        outcomes = []
        for _ in range(args.rounds):
            with fleet(args.base_port) as units:
                outcomes += (row := uvloop.run(run(case, units, 1))).outcomes
        take(replace(row, outcomes=outcomes))
    print("\nAll, as median / worst of the rounds in seconds:")
    print(columns([HEADS, *(row.cells() for row in rows)]))
    return 1 if any(row.problems() for row in rows) else 0


def _cases(args: argparse.Namespace) -> list[Case]:
    return [
        Case(fault, agent, load)
        for fault in args.fault or FAULTS
        for agent in (True, False)
        for load in (True, False)
        if args.agent in (None, agent) and args.load in (None, load)
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.vllm_detection", description=__doc__)
    parser.add_argument("--fault", action="append", choices=FAULTS, help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each case")
    parser.add_argument("--load", action="store_true", default=None, help="only with users")
    parser.add_argument("--idle", action="store_false", dest="load", default=None, help="only idle")
    parser.add_argument("--agent", action=argparse.BooleanOptionalAction, help="only with, or only without")
    parser.add_argument("--base-port", type=int, default=8301, help="the first unit's API")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
