"""New software for eight units in three cells under streams: is anything lost, whatever happens to the roll?

`python -m loadtests.roll` starts a real redis-server, eight simulated units, and three gates that all may
conduct. Users stream through the third. The command tells an orchestrator of the drill to restart the unit.

- `whole`: nothing else happens; `engine_controller`: the gate that conducts is killed (-9) in the middle;
- `slow`, `errors`, `wrong`: the new software is four times slower, half of its requests fail, or its answers
  are nonsense.

What must hold: every answer is whole and right; never more units out of rotation than `max_unavailable`; no
unit restarted twice; another gate goes on within 5 s; a bad version is stopped after one unit, which is put
back.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from loadtests.kit import progress
from loadtests.kit.gate import GateProcess
from loadtests.kit.questions import End, Question
from loadtests.kit.redis_server import RedisServer, redis_server
from loadtests.kit.report import print_problems, verdict
from loadtests.kit.users import Users
from loadtests.kit.waiting import repeated, until
from loadtests.simunit.process import SimUnit, sim_units
from loadtests.wire.blocking import fetch

NAMES = ("a1", "a2", "a3", "b1", "b2", "b3", "c1", "c2")
CELLS = "abc"
QUESTION = Question.between((50, 400), (20, 80))
MAX_UNAVAILABLE = 1
SOAK_S = 6.0
BAD_SOAK_S = 45.0
"""A unit that has just come up gets few requests for some seconds; and three comparisons with the speed of
the others of its cell take 15 s.
"""
LIMIT_S = 400.0
TAKEOVER_S = 5.0
LOOK_S = 0.1
PARTS = ("whole", "conductor", "slow", "errors", "wrong")
_FAULTS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "slow": ("slow", {"factor": 4.0}),
    "errors": ("error_rate", {"rate": 0.5}),
    "wrong": ("nonsense", {}),
}
"""What is wrong with the new software, as faults of a simulated unit."""


class Orchestrator:
    """Restarts units when the command asks for it, as a controller of a cluster does. `bad` is what is wrong
    with the new software; empty: nothing.
    """

    def __init__(self, units: Mapping[str, SimUnit], orders: Path, bad: str) -> None:
        self.restarts: list[tuple[str, str]] = []
        """Units and what they were given, in order."""
        self._units = units
        self._orders = orders
        self._bad = bad
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "Orchestrator":
        self._orders.touch()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.wait(LOOK_S):
            lines = self._orders.read_text().splitlines()
            for line in lines[len(self.restarts) :]:
                what, name = line.split()
                self.restarts.append((name, what))
                self._units[name].restart()
                if what == "new" and self._bad:
                    fault, parameters = _FAULTS[self._bad]
                    self._units[name].fault(fault, **parameters)


class Roll:
    """The gates of the drill, and the roll as they tell of it."""

    def __init__(self, gates: Sequence[GateProcess], pids: Mapping[str, GateProcess]) -> None:
        self.gates = list(gates)
        self.most_out = 0
        self._pids = dict(pids)

    @property
    def front(self) -> GateProcess:
        """The gate with the users."""
        return self.gates[-1]

    def ask(self, path: str, body: bytes | None = None) -> Any:
        """The admin port of the gate with the users."""
        return json.loads(fetch(f"http://127.0.0.1:{self.front.admin_port}{path}", body).body)

    def now(self) -> dict[str, Any]:
        """The roll; empty before it begins."""
        found: dict[str, Any] = self.ask("/roll")["roll"] or {}
        return found

    def is_over(self) -> bool:
        """Whether nothing more happens by itself."""
        roll = self.now()
        phases = {each["phase"] for each in roll.get("units", ())}
        return roll.get("status") in ("done", "stopped") and not phases & {
            "draining",
            "acting",
            "proving",
            "soaking",
        }

    def look(self) -> None:
        """Count the units out of rotation."""
        units = self.front.units()
        out = sum(unit["drained"] or unit["verdict"] not in ("up", "suspect") for unit in units)
        self.most_out = max(self.most_out, out)

    def engine_controller(self) -> GateProcess | None:
        """The gate that conducts now."""
        name = self.now().get("conducted_by", "")
        return next((gate for pid, gate in self._pids.items() if f"-{pid}-" in name), None)


async def part(name: str, users: int) -> list[str]:
    """One roll; what must not have been."""
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(redis_server())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="roll-")))
        units = stack.enter_context(sim_units(NAMES, step_ms=10, prefill_tokens_per_s=20_000, logprobs=1))
        named = {unit.name: unit for unit in units}
        gates = []
        for _ in range(3):
            gate = _gate(units, redis, folder, BAD_SOAK_S if name in _FAULTS else SOAK_S)
            gates.append(await asyncio.to_thread(stack.enter_context, gate))
            # The first one conducts, so that it has no users when it is killed.
            await asyncio.sleep(2.0 if len(gates) == 1 else 0.0)
        roll = Roll(gates, {str(gate.pid): gate for gate in gates})
        bad = name if name in _FAULTS else ""
        with Orchestrator(named, folder / "orders", bad) as orchestrator, repeated(roll.look, LOOK_S):
            async with Users(roll.front.url, users, QUESTION) as asking:
                began_at = time.monotonic()
                await asyncio.sleep(3.0)
                await asyncio.to_thread(roll.ask, "/roll/start", b"")
                problems = await _killed(roll) if name == "conductor" else []
                await until(roll.is_over, LIMIT_S, 0.5)
                took_s = time.monotonic() - began_at
        ended = await asyncio.to_thread(roll.now)
        ends = Counter(answer.end() for answer in asking.answers)
        problems += _problems(name, ended, orchestrator.restarts, roll.most_out)
        problems += [answer.why() for answer in asking.answers if answer.end() is not End.WHOLE]
        told = ", ".join(f"{count} {end.value}" for end, count in ends.items())
        print(
            f"{name}: {ended.get('status')} after {took_s:.0f} s, {len(orchestrator.restarts)} restarts, "
            f"at most {roll.most_out} out of rotation; {users} streams: {told}"
        )
        if ended.get("reason"):
            print(f"  {ended['reason']}")
        return problems


async def _killed(roll: Roll) -> list[str]:
    """Kill the conductor while a unit is at work; what was wrong with that."""
    await until(lambda: any(each["phase"] == "acting" for each in roll.now().get("units", ())), 60.0, 0.02)
    conductor = await asyncio.to_thread(roll.engine_controller)
    if conductor is None or conductor is roll.front:
        return ["the gate with the users conducted, so it could not be killed"]
    os.kill(conductor.pid, signal.SIGKILL)
    killed_at, name = time.monotonic(), roll.now()["conducted_by"]
    await until(lambda: roll.now().get("conducted_by") not in ("", name), 2 * TAKEOVER_S, 0.05)
    took_s = time.monotonic() - killed_at
    print(f"conductor: killed; another gate conducts after {took_s:.1f} s")
    return [f"another gate conducts only after {took_s:.1f} s"] if took_s > TAKEOVER_S else []


def _problems(name: str, roll: Mapping[str, Any], restarts: Sequence[tuple[str, str]], out: int) -> list[str]:
    new = [unit for unit, what in restarts if what == "new"]
    back = [unit for unit, what in restarts if what == "back"]
    problems = [f"unit {unit} restarted {n} times" for unit, n in Counter(new).items() if n > 1]
    if out > MAX_UNAVAILABLE:
        problems.append(f"{out} units were out of rotation")
    if name in _FAULTS:
        if roll.get("status") != "stopped" or len(new) != 1 or back != new:
            problems.append(f"not stopped after one unit: {roll.get('status')}, new {new}, back {back}")
    elif roll.get("status") != "done" or new != list(NAMES):
        problems.append(f"the roll is {roll.get('status')}: {roll.get('reason')}; new: {new}")
    return problems


def _gate(units: Sequence[SimUnit], redis: RedisServer, folder: Path, soak_s: float) -> GateProcess:
    def command(what: str) -> list[str]:
        return ["sh", "-c", f"echo {what} $CELLGATE_UNIT >> {folder}/orders"]

    roll = {
        "command": command("new"),
        "undo": command("back"),
        "audit": str(folder / "audit.jsonl"),
        "max_unavailable": MAX_UNAVAILABLE,
        "drain_s": 20.0,
        "soak_s": soak_s,
    }
    settings, operator = {"redis": redis.url}, {"roll": roll}
    return GateProcess(units, cell=lambda name: name[0], settings=settings, operator=operator)


@progress.shown("roll")
def main() -> int:
    """Roll in each way; 0 when all holds."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.roll", description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--users", type=int, default=64, help="streams at one time")
    args = parser.parse_args()
    problems: list[str] = []
    for name in args.parts:
        progress.phase(name)
        problems += uvloop.run(part(name, args.users))
    print(verdict(problems))
    print_problems(problems, 20)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
