"""Drill: a LeaderWorkerSet is updated group by group, then loses a follower's pod, under streaming users.

`python -m loadtests.rolling_update`: the gate discovers its units from a fake API server; each group is a
simulated unit with processes. What must hold: every request is answered whole, and a unit is DOWN before a
process of it ends. The exit code is 1 when it does not.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvloop

from loadtests.detection import TIMING
from loadtests.kit import progress
from loadtests.kit.gate import GateProcess
from loadtests.kit.lws_cluster import Group, LwsCluster
from loadtests.kit.questions import Answer, End, Question
from loadtests.kit.report import print_problems
from loadtests.kit.users import Users
from loadtests.kit.waiting import until

GROUPS = 4
STREAMS = 32
QUESTION = Question.between((50, 200), (8, 40))
SETTLE_S = 2.0
GRACE_S = 4.0
"""More than a stream takes: what runs on a pod that is told to go may end there, as `preStop` is for."""
CONTROLLER_S = 0.3
"""How long the controller takes to notice that a follower goes, and to delete the rest of its group."""
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Replaced:
    """One group made again: what for, and the seconds from the first deletion until the gate had it DOWN,
    until its processes began to end, and until the new unit was UP. None: never.
    """

    unit: str
    why: str
    down_s: float | None
    ended_s: float
    up_s: float | None

    def problems(self) -> list[str]:
        """Why it fails; empty when it passes."""
        if self.down_s is None or self.down_s >= self.ended_s:
            return [f"{self.unit} was not DOWN before its processes ended"]
        return [] if self.up_s is not None else [f"{self.unit} never came back"]

    def line(self) -> str:
        """For people."""
        down = "never" if self.down_s is None else f"after {1000 * self.down_s:.0f} ms"
        up = "never" if self.up_s is None else f"after {self.up_s:.1f} s"
        return (
            f"{self.unit}, {self.why}: DOWN {down}, processes ended after {self.ended_s:.1f} s, UP again {up}"
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """All groups replaced, and every request."""

    replaced: list[Replaced]
    answers: list[Answer]

    def ends(self) -> Counter[End]:
        """How requests ended."""
        return Counter(answer.end() for answer in self.answers)

    def problems(self) -> list[str]:
        """Why it fails; empty when it passes."""
        lost = [answer.why() for answer in self.answers if answer.end() is not End.WHOLE]
        return [problem for one in self.replaced for problem in one.problems()] + lost


async def run(
    groups: int = GROUPS, streams: int = STREAMS, *, grace_s: float = GRACE_S, asks_gate: bool = False
) -> Outcome:
    """The whole drill; none of its processes is left afterwards.

    `asks_gate`: the leaders' readiness probe asks the gate for their unit, instead of passing at once.
    """
    with tempfile.TemporaryDirectory(prefix="drill-") as folder:
        async with LwsCluster(groups, grace_s=grace_s, **TIMING) as cluster:
            discover = cluster.discover(cluster.api.kubeconfig(Path(folder)))
            gate = GateProcess([], settings={"cells": [{"name": "drill", "discover": discover}]})
            try:
                await asyncio.to_thread(gate.__enter__)
                for group in cluster.groups:
                    await _until_up(gate, group)
                if asks_gate:
                    cluster.probe = partial(_until_up, gate)
                return await _drill(cluster, gate, streams)
            finally:
                await asyncio.to_thread(gate.__exit__, None, None, None)


async def _drill(cluster: LwsCluster, gate: GateProcess, streams: int) -> Outcome:
    async with Users(gate.url, streams, QUESTION) as users:
        await asyncio.sleep(SETTLE_S)
        # The controller goes on as soon as pods are ready, whatever the gate thinks of them.
        seen = [await _replace(cluster, gate, group, "updated") for group in cluster.groups]
        replaced = list(await asyncio.gather(*seen))
        replaced.append(await (await _replace(cluster, gate, cluster.groups[-1], "a follower's pod deleted")))
        await asyncio.sleep(SETTLE_S)
    return Outcome(replaced, users.answers)


async def _replace(cluster: LwsCluster, gate: GateProcess, group: Group, why: str) -> asyncio.Task[Replaced]:
    """Delete a group, all at once or its follower first, and make it again. Returns when its pods are
    ready; the task ends when the gate has it UP.
    """
    deleted_at, clock = time.time(), time.monotonic()
    if why == "updated":
        await cluster.delete(group, 0, 1)
    else:
        await cluster.delete(group, 1)
        await asyncio.sleep(CONTROLLER_S)
        await cluster.delete(group, 0)
    await asyncio.sleep(cluster.grace_s)
    ended_s = time.monotonic() - clock
    await cluster.end(group)
    await cluster.start(group)

    async def see() -> Replaced:
        up_s = await _until_up(gate, group, clock)
        down_at = await asyncio.to_thread(gate.flipped, group.name, "down", deleted_at)
        down_s = None if down_at is None else max(0.0, down_at - deleted_at)
        return Replaced(group.name, why, down_s, ended_s, up_s)

    return asyncio.create_task(see())


async def _until_up(gate: GateProcess, group: Group, since: float = 0.0) -> float | None:
    """Wait until the gate has this incarnation of a group UP. Seconds from `since`; None: it never does."""

    def is_up() -> bool:
        units = {unit["name"]: unit for unit in gate.units()}
        unit = units.get(group.name, {"url": "", "verdict": ""})
        return group.host(0) in unit["url"] and unit["verdict"] == "up"

    return time.monotonic() - since if await until(is_up, _PATIENCE_S) else None


@progress.shown("rolling-update")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the drill; 0 when it passes."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.rolling_update", description=__doc__)
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--grace-s", type=float, default=GRACE_S, help="what a pod has to finish in")
    args = parser.parse_args(arguments)
    failed = False
    for asks_gate, groups in ((False, args.groups), (True, 2)):
        print(f"{groups} groups, ready when {'the gate says so' if asks_gate else 'they listen'}")
        progress.phase(f"{groups} groups")
        outcome = uvloop.run(run(groups, args.streams, grace_s=args.grace_s, asks_gate=asks_gate))
        print(*(f"  {one.line()}\n" for one in outcome.replaced), sep="", end="")
        print("  " + ", ".join(f"{count} {end.value}" for end, count in outcome.ends().most_common()))
        problems = outcome.problems()
        print_problems(problems, most=20)
        failed |= bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
