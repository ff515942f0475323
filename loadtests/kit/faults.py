"""What can befall a unit: how a drill does it, and how it undoes it.

What must stay true: the processes are real ones and truly killed, stopped, or made to spin.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass

from loadtests.simunit.process import SimUnit


@dataclass(frozen=True, slots=True)
class Fault:
    """`hurt` and `heal` take the unit and the rank of a follower, which only some of them need.

    `seen_by_agent`: whether who watches the processes can see it; sockets stay open and processes run in the
    others.
    """

    hurt: Callable[[SimUnit, int], object]
    heal: Callable[[SimUnit, int], object]
    seen_by_agent: bool


def _command(name: str) -> Fault:
    return Fault(lambda unit, _: unit.fault(name), lambda unit, _: unit.fault("heal"), seen_by_agent=False)


def _restart(unit: SimUnit, _: int) -> None:
    unit.restart()


FAULTS = {
    "kill-leader": Fault(lambda unit, _: unit.kill(), _restart, seen_by_agent=True),
    "kill-follower": Fault(
        lambda unit, rank: unit.signal_follower(signal.SIGKILL, rank), _restart, seen_by_agent=True
    ),
    "stop-leader": Fault(
        lambda unit, _: unit.signal_leader(signal.SIGSTOP),
        lambda unit, _: unit.signal_leader(signal.SIGCONT),
        seen_by_agent=True,
    ),
    "stop-follower": Fault(
        lambda unit, rank: unit.signal_follower(signal.SIGSTOP, rank),
        lambda unit, rank: unit.signal_follower(signal.SIGCONT, rank),
        seen_by_agent=True,
    ),
    "spin": Fault(
        lambda unit, rank: unit.fault("spin", rank=rank),
        lambda unit, _: unit.fault("heal"),
        seen_by_agent=False,
    ),
    "drop-link": _command("drop_link"),
    "freeze-engine": _command("freeze_engine"),
}
