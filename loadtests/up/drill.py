"""`python -m loadtests.up --drill`: a follower is frozen under requests, alerts fire in the real Prometheus,
the follower is healed, they clear; then each expression of the dashboard is put to that Prometheus.

What must stay true: a figure that is printed was measured, and whatever did not happen ends it with 1.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from loadtests.kit import progress
from loadtests.kit.asking import asking
from loadtests.kit.waiting import wait_until
from loadtests.simunit.process import SimUnit
from loadtests.up.alerts import Prometheus, questions

OF_A_WEDGE = {"CellgateUnitDown", "CellgateWedgeFound"}
FIRES_WITHIN_S, CLEARS_WITHIN_S = 6 * 60, 12 * 60
"""By the rules as they are shipped; and MORE_S for what does not become faster with them."""
MORE_S = 60.0
LOOK_EVERY_S = 0.2
DOWNS = "cellgate_unit_downs_total"
USERS = 4
EMPTY = {
    "Agents": "no agents run here",
    "Nodes": "neither agents nor probes look at nodes here",
    "4xx by unit": "no request here is a client's mistake",
    "Waiting for a unit": "no request had to wait",
    "Sources of units": "units are configured, not discovered",
    "Refusals": "nobody was refused",
}
"""Panels that have nothing to show in this drill, and why that is right."""


class DrillError(RuntimeError):
    """Something did not happen."""


@progress.shown("drill")
def drill(prometheus: Prometheus, ingress: str, units: list[SimUnit], *, faster: int, scrape_s: int) -> int:
    """Freeze, wait, heal, wait, ask. `faster`: how much faster the rules are than those that are shipped."""
    hurt = units[0]
    began_at = time.monotonic()
    try:
        with asking(ingress, USERS) as asked:
            progress.phase("alerts fire, and clear", lambda: f"{len(asked)} answers")
            _until(lambda: prometheus.ask("query", query=DOWNS)["result"], MORE_S, "no metric")
            # A counter has to be seen before it grows.
            time.sleep(3 * scrape_s)
            if early := prometheus.alerts():
                raise DrillError(f"alerts fire before anything was done: {', '.join(early)}")
            hurt.signal_follower(signal.SIGSTOP)
            _tell(f"the follower of {hurt.name} is frozen; its leader's /health still says 200")
            _wait(prometheus, hurt.name, FIRES_WITHIN_S / faster + MORE_S, fires=True)
            hurt.signal_follower(signal.SIGCONT)
            _tell("healed")
            _wait(prometheus, hurt.name, CLEARS_WITHIN_S / faster + MORE_S, fires=False)
        _tell(f"{len(asked)} requests meanwhile, {asked.count(False)} of them without their whole answer")
        _ask_all(prometheus, time.monotonic() - began_at, rate_interval_s=4 * scrape_s)
        if not all(asked):
            raise DrillError("requests were lost")
    except (RuntimeError, OSError) as error:
        print(f"the drill failed: {error}", flush=True)
        return 1
    return 0


def _wait(prometheus: Prometheus, unit: str, limit_s: float, *, fires: bool) -> None:
    """Tell when each of the alerts of a wedge fires for `unit`, or clears."""
    since, left = time.monotonic(), set(OF_A_WEDGE)
    what = "fires" if fires else "has cleared"

    def look() -> bool:
        firing = prometheus.alerts()
        for alert in sorted(left):
            if (firing.get(alert) == unit) == fires:
                _tell(f"{alert} {what} after {time.monotonic() - since:.1f} s")
                left.discard(alert)
        return not left

    _until(look, limit_s, f"{' and '.join(sorted(OF_A_WEDGE))}: not all {what}")


def _ask_all(prometheus: Prometheus, last_s: float, *, rate_interval_s: int) -> None:
    """Put every expression of the dashboard to Prometheus."""
    asked = questions()
    empty = [
        each for each in asked if not prometheus.has_data(each.expr, last_s, rate_interval_s=rate_interval_s)
    ]
    _tell(f"{len(asked)} expressions of the dashboard: {len(asked) - len(empty)} have data")
    for each in empty:
        _tell(f"  empty: {each}: {EMPTY.get(each.panel, 'which is wrong')}")
    if wrong := [str(each) for each in empty if each.panel not in EMPTY]:
        raise DrillError(f"panels without data: {', '.join(wrong)}")


def _until(is_so: Callable[[], object], limit_s: float, what: str) -> None:
    if not wait_until(is_so, limit_s, LOOK_EVERY_S):
        raise DrillError(f"{what} in {limit_s:.0f} s")


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
