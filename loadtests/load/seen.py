"""What the gate says of itself while a load runs: units in rotation, streams resumed, units that went out.

What must stay true: a gate that cannot be asked, or does not answer, keeps no load from running.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import orjson

from loadtests.kit.gate import GateProcess, metric_sum
from loadtests.kit.waiting import repeated
from loadtests.wire.blocking import fetch

LOOK_S = 0.5
RESUMED = ("continued", "completed")


@dataclass(slots=True)
class Seen:
    """By the wall clock. `rotation`: units in rotation. `resumed`: streams resumed until then.
    `faults`: when a unit went out, and which.
    """

    rotation: list[tuple[float, float]] = field(default_factory=list)
    resumed: list[tuple[float, float]] = field(default_factory=list)
    faults: dict[float, str] = field(default_factory=dict)
    _last: float | None = None

    def look(self, admin: str) -> None:
        """Ask once."""
        with suppress(OSError, orjson.JSONDecodeError, LookupError, TypeError):
            page, at = fetch(f"{admin}/metrics", silence_s=2.0).body.decode(), time.time()
            total = sum(
                metric_sum(page, "cellgate_continuations_total", f'result="{how}"') for how in RESUMED
            )
            self.rotation.append((at, metric_sum(page, "cellgate_unit_verdict", 'verdict="up"')))
            # A gate that was started again counts from nothing.
            more = max(0.0, total - (total if self._last is None else self._last))
            self.resumed.append((at, more + (self.resumed[-1][1] if self.resumed else 0.0)))
            self._last = total
            # Only for those whom the gate trusts.
            for event in orjson.loads(fetch(f"{admin}/events", silence_s=2.0).body):
                if event["kind"] == "flip" and event["after"] == "down":
                    self.faults[GateProcess.at(event)] = f"{event['unit']} down"


@contextmanager
def watched(admin: str) -> Iterator[Seen]:
    """Inside, a thread looks at the gate, if there is one to ask."""
    seen, admin = Seen(), admin.rstrip("/")
    if not admin:
        yield seen
        return
    seen.look(admin)
    # What happened before is no fault of this load.
    began_at = time.time()
    with repeated(lambda: seen.look(admin), LOOK_S):
        yield seen
    seen.look(admin)
    seen.faults = {at: what for at, what in seen.faults.items() if at >= began_at}
