"""Drill: each alert of deploy/monitoring/rules.yaml is fired by a real fault, and clears after it.

Real gates, Prometheus and Alertmanager, simulated units. The rules are those that are shipped, in which time
passes faster. What must stay true: an alert that is shipped and was not seen to fire and to clear ends it
with 1; so does one that fires for a fault that is not its own.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from loadtests.alerts.faults import ALONE, CROWDED, POISONED, SHARED, Fault, gate_stopped
from loadtests.alerts.world import SCRAPE_S, Scene, World, world
from loadtests.kit import progress
from loadtests.kit.asking import asking
from loadtests.kit.waiting import wait_until
from loadtests.up.alerts import RULES

PROGRAMS = ("prometheus", "prometheus-alertmanager", "redis-server")
FASTER = 30
FIRES_S, CLEARS_S = 120.0, 240.0
QUIET_S = 5.0
"""Users ask for this long before anything is done: a counter has to be seen before it grows."""
LOOK_S = 0.2
OF_THE_MACHINE = frozenset({"CellgateLagging"})
"""May fire at any time where the machine is busy."""
ABSENT = "CellgateAbsent"


@dataclass(slots=True)
class Seen:
    """What was seen of all faults."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    fired: set[str] = field(default_factory=set)

    def line(self, text: str) -> None:
        """One fact."""
        self.lines.append(text)
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all faults; 1 when an alert did not do what it should."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.alerts", description=__doc__)
    parser.add_argument(
        "--faster", type=int, default=FASTER, metavar="N", help=f"time in the rules ({FASTER})"
    )
    options = parser.parse_args(arguments)
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        told = f"{', '.join(missing)} is not installed; type:  apt-get install {' '.join(missing)}"
        print(f"alerts: {told}", file=sys.stderr)
        return 1
    seen = Seen()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cellgate-alerts-"))
        stack.enter_context(progress.shown("alerts"))
        here = stack.enter_context(world(Path(folder), faster=options.faster))
        if not wait_until(lambda: _is_quiet(here), FIRES_S, LOOK_S):
            print("alerts: an alert fires before anything was done", file=sys.stderr)
            return 1
        progress.figures(lambda: f"{len(seen.fired)} alerts have fired")
        _all_scenes(here, seen)
        _no_gate(here, seen)
    shipped = {rule["alert"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]}
    seen.problems += [f"{alert} has not fired" for alert in sorted(shipped - seen.fired)]
    for problem in seen.problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    fired = f"{len(shipped & seen.fired)} of {len(shipped)} alerts fired and cleared"
    print(f"{fired}, {len(seen.problems)} problems")
    return 1 if seen.problems else 0


def _is_quiet(here: World) -> bool:
    """Whether every gate was scraped, and no alert fires."""
    scraped = here.prometheus.ask("query", query="cellgate_build_info")["result"]
    return len(scraped) == len(here.scenes()) and not any(
        here.prometheus.firing(scene.instance) for scene in here.scenes()
    )


def _all_scenes(here: World, seen: Seen) -> None:
    plans = zip(here.scenes(), (SHARED, ALONE, CROWDED, POISONED), strict=True)
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(_scene, here, scene, faults, seen) for scene, faults in plans]:
            done.result()


def _scene(here: World, scene: Scene, faults: Sequence[Fault], seen: Seen) -> None:
    """The faults of one gate, one after the other."""
    for fault in faults:
        with asking(scene.gate.url, fault.users):
            time.sleep(QUIET_S * SCRAPE_S)
            _one(here, scene, fault, seen)


def _one(here: World, scene: Scene, fault: Fault, seen: Seen) -> None:
    since, fired_s = time.monotonic(), dict[str, float]()
    strange, inhibited = set[str](), set[str]()

    def look() -> bool:
        now = here.prometheus.firing(scene.instance)
        for alert in sorted(now & fault.alerts):
            fired_s.setdefault(alert, time.monotonic() - since)
        strange.update(now - fault.alerts - fault.besides - OF_THE_MACHINE)
        if fault.inhibited:
            inhibited.update(here.alertmanager.inhibited(scene.instance))
        return fired_s.keys() == fault.alerts and fault.inhibited <= inhibited

    with fault.begin(scene):
        wait_until(look, FIRES_S, LOOK_S)
    healed = time.monotonic()
    left = wait_until(
        lambda: not (here.prometheus.firing(scene.instance) - OF_THE_MACHINE.difference(fault.alerts)),
        CLEARS_S,
        LOOK_S,
    )
    seen.fired |= fired_s.keys()
    fires = ", ".join(f"{alert} after {after_s:.0f} s" for alert, after_s in fired_s.items())
    seen.line(
        f"{fault.name}: {fires or 'no alert'}; all clear {time.monotonic() - healed:.0f} s after its end"
    )
    seen.problems += list(_wrong(fault, set(fired_s), strange, inhibited, cleared=left))


def _wrong(
    fault: Fault, fired: set[str], strange: set[str], inhibited: set[str], *, cleared: bool
) -> Iterator[str]:
    if missing := fault.alerts - fired:
        yield f"{fault.name}: {', '.join(sorted(missing))} did not fire in {FIRES_S:g} s"
    if strange:
        yield f"{fault.name}: {', '.join(sorted(strange))} fired as well"
    if passed := fault.inhibited - inhibited:
        yield f"{fault.name}: {', '.join(sorted(passed))} was not inhibited"
    if not cleared:
        yield f"{fault.name}: an alert still fires {CLEARS_S:g} s after its end"


def _no_gate(here: World, seen: Seen) -> None:
    """No gate answers."""

    def absent() -> bool:
        return ABSENT in here.prometheus.firing(here.shared.instance)

    since = time.monotonic()
    with ExitStack() as stack:
        for scene in here.scenes():
            stack.enter_context(gate_stopped(scene))
        if wait_until(absent, FIRES_S, LOOK_S):
            seen.fired.add(ABSENT)
            seen.line(f"all gates stand still: {ABSENT} after {time.monotonic() - since:.0f} s")
    if not wait_until(lambda: not absent(), CLEARS_S, LOOK_S):
        seen.problems.append(f"{ABSENT} still fires {CLEARS_S:g} s after its end")


if __name__ == "__main__":
    raise SystemExit(main())
