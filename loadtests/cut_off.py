"""Drill: nothing can be reached. Is it the units, or the gate that has been cut off?

`python -m loadtests.cut_off` wedges the one unit of a sidecar: /readyz must say so in time, and that is no
panic. Then, in a network namespace of its own (which needs root), it cuts the gate off from three units and
all their nodes at once: the gate must hold the rotation, say so, and let go after 30 s. The exit code is 1
when something of it does not hold.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import uvloop

from loadtests.kit import progress
from loadtests.kit.agents import Agents
from loadtests.kit.faults import FAULTS
from loadtests.kit.gate import GateProcess
from loadtests.kit.questions import End, Question
from loadtests.kit.report import print_problems, verdict
from loadtests.kit.users import Users
from loadtests.kit.waiting import until
from loadtests.simunit.process import SimUnit, sim_units

TIMING = {"step_ms": 50, "prefill_tokens_per_s": 100_000}
QUESTION = Question.between((50, 200), (8, 40))
SIDECAR_USERS = 16
FIND_LIMIT_S = {True: 3.0, False: 5.0}
"""Until /readyz says no: with users, and idle."""

USERS = 8
SHORT_CUT_S = 12.0
LONG_CUT_S = 45.0
PANIC_LIMIT_S = 5.0
HOLD_S = 30.0
HOLD_SLACK_S = 5.0
RECOVER_S = 15.0
HOSTS = ("127.0.0.11", "127.0.0.12", "127.0.0.13")
CUT = ("ip", "rule", "{}", "pref", "50", "from", "127.0.0.8/29", "blackhole")
"""Nothing that those addresses answer finds its way: neither a SYN-ACK, nor a reset, nor a byte."""

OWN_NETWORK = (
    ("ip", "link", "set", "lo", "up"),
    # The rule for local addresses comes first otherwise, whatever the number of another.
    ("ip", "rule", "add", "pref", "100", "lookup", "local"),
    ("ip", "rule", "del", "pref", "0"),
)


def sidecar(fault: str, *, load: bool) -> list[str]:
    """A gate with a single unit, which is wedged and healed; what was not as it must be."""
    return uvloop.run(_sidecar(fault, load))


async def _sidecar(fault: str, load: bool) -> list[str]:
    with ExitStack() as stack:
        unit = stack.enter_context(SimUnit.start("only", **TIMING))
        gate = stack.enter_context(GateProcess([unit]))
        async with Users(gate.url, SIDECAR_USERS if load else 0, QUESTION):
            await asyncio.sleep(3.0)
            began = time.monotonic()
            await asyncio.to_thread(FAULTS[fault].hurt, unit, 1)
            down_s = await _seconds_until(lambda: not gate.is_ready(), began, 20.0)
            await asyncio.sleep(2.0)
            await asyncio.to_thread(FAULTS[fault].heal, unit, 1)
            up_s = await _seconds_until(gate.is_ready, time.monotonic(), 30.0)
        panics = [event["line"] for event in gate.events() if event["kind"].startswith("panic")]
        print(f"sidecar, {fault}, {'load' if load else 'idle'}: not ready after {_s(down_s)}, ", end="")
        print(f"ready again {_s(up_s)} after it was healed", flush=True)
        problems = [f"a single unit is no reason to panic: {line}" for line in panics]
        if down_s is None or down_s > FIND_LIMIT_S[load]:
            problems.append(f"not ready after {_s(down_s)}, the limit is {FIND_LIMIT_S[load]} s")
        if up_s is None:
            problems.append("never ready again")
        return problems


async def network() -> list[str]:
    """Three units that the gate is cut off from, for a short time and for a long one."""
    with ExitStack() as stack:
        units = stack.enter_context(sim_units([f"u{n}" for n in range(len(HOSTS))], HOSTS, **TIMING))
        agents = stack.enter_context(Agents(units))
        gate = stack.enter_context(GateProcess(units, agents=agents))
        problems = []
        for seconds in (SHORT_CUT_S, LONG_CUT_S):
            async with Users(gate.url, USERS, QUESTION) as users:
                await asyncio.sleep(4.0)
                problems += [f"cut of {seconds:.0f} s: {each}" for each in await _cut(gate, seconds)]
                await asyncio.sleep(RECOVER_S)
                seen = len(users.answers)
                await asyncio.sleep(5.0)
            late = users.answers[seen:]
            whole = sum(answer.end() is End.WHOLE for answer in late)
            print(f"afterwards {whole} of {len(late)} requests answered whole; before, {_rest(users, seen)}")
            if not late or whole < len(late):
                problems.append(f"cut of {seconds:.0f} s: requests fail after it")
        return problems


async def _cut(gate: GateProcess, seconds: float) -> list[str]:
    """Cut, look, mend; what was not as it must be."""
    began, problems = time.time(), []
    with _no_way():
        began_at = time.monotonic()
        in_rotation: list[tuple[float, int, bool]] = []
        while (now_s := time.monotonic() - began_at) < seconds:
            units, ready = await asyncio.to_thread(gate.units), await asyncio.to_thread(gate.is_ready)
            in_rotation.append((now_s, sum(unit["usable"] for unit in units), ready))
            await asyncio.sleep(0.2)
    panics = [e for e in gate.events() if e["kind"].startswith("panic") and GateProcess.at(e) >= began]
    downs = [flip for flip in gate.flips(began) if flip["after"] == "down"]
    print(f"cut off for {seconds:.0f} s:")
    print(*(f"  {GateProcess.at(e) - began:5.1f} s  {e['line']}\n" for e in panics + downs), sep="", end="")
    panic_s = GateProcess.at(panics[0]) - began if panics else None
    if panic_s is None or panic_s > PANIC_LIMIT_S:
        problems.append(f"panic was told after {_s(panic_s)}, the limit is {PANIC_LIMIT_S} s")
    if too_few := [row for row in in_rotation if row[0] < HOLD_S and not (row[1] == len(HOSTS) and row[2])]:
        problems.append(f"{too_few[0][1]} units in rotation {too_few[0][0]:.1f} s after the cut")
    let_go_s = next((s for s, usable, ready in in_rotation if not usable and not ready), None)
    if seconds > HOLD_S + HOLD_SLACK_S and (let_go_s is None or let_go_s > HOLD_S + HOLD_SLACK_S):
        problems.append(f"the rotation was let go after {_s(let_go_s)}")
    return problems


@contextmanager
def _no_way() -> Iterator[None]:
    subprocess.run([part.format("add") for part in CUT], check=True)
    try:
        yield
    finally:
        subprocess.run([part.format("del") for part in CUT], check=True)


async def _seconds_until(holds: Callable[[], bool], began: float, patience_s: float) -> float | None:
    return time.monotonic() - began if await until(holds, patience_s) else None


def _rest(users: Users, seen: int) -> str:
    whole = sum(answer.end() is End.WHOLE for answer in users.answers[:seen])
    return f"{whole} of {seen}"


def _s(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.2f} s"


@progress.shown("cut-off")
def main() -> int:
    """Run both parts, or one; 0 when all is as it must be."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.cut_off", description=__doc__)
    parser.add_argument("part", nargs="?", choices=("sidecar", "network", "network-inside"))
    part = parser.parse_args().part
    problems: list[str] = []
    if part == "network-inside":
        for command in OWN_NETWORK:
            subprocess.run(list(command), check=True)
        problems += uvloop.run(network())
    if part in (None, "sidecar"):
        for fault in ("stop-follower", "freeze-engine", "stop-leader"):
            for load in (True, False):
                progress.phase(f"sidecar, {fault}, {'under load' if load else 'idle'}")
                problems += [f"sidecar, {fault}: {each}" for each in sidecar(fault, load=load)]
    if part in (None, "network"):
        again = ["unshare", "--net", sys.executable, "-m", "loadtests.cut_off", "network-inside"]
        if subprocess.run(again, check=False).returncode:
            problems.append("network: see above; without leave to `unshare --net` nothing is proven")
    print(verdict(problems))
    print_problems(problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
