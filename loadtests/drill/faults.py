"""The table of faults: what each is done to, with what parameters, how it is done and undone.

What must stay true: processes are truly killed, stopped, cut off or made to spin; whoever heals leaves the
unit as it was.
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from loadtests.drill.links import Pair

UNIT_NODES = ("leader", "engine", "follower")


class Unit(Protocol):
    """A unit whose nodes can be hurt. `node` is "leader", "engine" or "follower-1"."""

    def signal(self, node: str, number: signal.Signals) -> None:
        """Send a signal to a process of the unit."""

    def command(self, fault: str, **parameters: float) -> None:
        """Let a simulated unit hurt itself; "heal" ends all of it."""

    def restart(self) -> None:
        """New processes in place of the old ones, dead or alive, on the same port."""

    def cut_off(self, *, undo: bool = False) -> None:
        """Nothing that its address answers reaches anyone."""

    def hurt_link(self, prefiller: str, fault: str, factor: float = 1.0) -> None:
        """What becomes of KV blocks that it fetches from a prefiller; "heal" ends it."""


class Place(Protocol):
    """What a fault can reach."""

    def unit(self, name: str) -> Unit:
        """A unit by its name."""

    def roll_units(self) -> None:
        """Restart every unit, one after the other, in good order."""

    def roll_gates(self) -> None:
        """Restart every gate, one after the other."""

    def stop_redis(self) -> None:
        """End Redis at once."""

    def start_redis(self) -> None:
        """Restart it."""


@dataclass(frozen=True, slots=True)
class Aim:
    """Whom a fault befalls: a place, and there a unit and its node, a link of two, or all of one kind."""

    place: Place
    unit_name: str
    node: str
    parameters: Mapping[str, float]

    @property
    def unit(self) -> Unit:
        """The unit."""
        return self.place.unit(self.unit_name)

    @property
    def rank(self) -> int:
        """Which follower."""
        return int(self.node.partition("-")[2])


Deed = Callable[[Aim], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """`targets`: kinds of node, or "link", "units", "gates", "redis". `takes_down`: the unit must come to be
    DOWN. `breaks`: nothing comes over the link. `simulated`: a real unit cannot be asked for it.
    """

    targets: tuple[str, ...]
    hurt: Deed
    heal: Deed
    parameters: Mapping[str, float] = field(default_factory=dict)
    takes_down: bool = False
    breaks: bool = False
    simulated: bool = False

    def fits(self, target: str, engine: str) -> bool:
        """Whether it can befall this target of such units."""
        kind = (target.partition(".")[2] or target).partition("-")[0]
        # A simulated engine lives in its leader's process, and can only stand still.
        alone = kind == "engine" and engine == "simulated" and self.hurt is not freeze
        return kind in self.targets and not alone and not (self.simulated and engine != "simulated")


def kill(aim: Aim) -> None:
    """SIGKILL."""
    aim.unit.signal(aim.node, signal.SIGKILL)


def freeze(aim: Aim) -> None:
    """SIGSTOP."""
    aim.unit.signal(aim.node, signal.SIGSTOP)


def _thaw(aim: Aim) -> None:
    aim.unit.signal(aim.node, signal.SIGCONT)


def _restart(aim: Aim) -> None:
    aim.unit.restart()


def _heal(aim: Aim) -> None:
    aim.unit.command("heal")


def _nothing(_: Aim) -> None:
    """It is over by itself."""


def _command(name: str, **parameters: float) -> Deed:
    """A fault of simulated units, whose parameters have the same names there."""
    whole = ("rank", "status", "after_tokens")

    def hurt(aim: Aim) -> None:
        given = {k: int(v) if k in whole else v for k, v in (parameters | dict(aim.parameters)).items()}
        aim.unit.command(name, **given)

    return hurt


def _link(name: str) -> Deed:
    """A fault of a link, which its decoder suffers."""

    def hurt(aim: Aim) -> None:
        pair = Pair.of(aim.unit_name)
        parameters = aim.parameters if name != "heal" else {}
        aim.place.unit(pair.decoder).hurt_link(pair.prefiller, name, **parameters)

    return hurt


def _command_of_rank(name: str) -> Deed:
    def hurt(aim: Aim) -> None:
        aim.unit.command(name, rank=aim.rank, **aim.parameters)

    return hurt


FAULTS: dict[str, Fault] = {
    "kill": Fault(UNIT_NODES, kill, _restart, takes_down=True),
    "freeze": Fault(UNIT_NODES, freeze, _thaw, takes_down=True),
    "spin": Fault(("follower",), _command_of_rank("spin"), _heal, takes_down=True, simulated=True),
    "drop_link": Fault(("follower",), _command("drop_link"), _heal, takes_down=True, simulated=True),
    "partition": Fault(
        ("leader",),
        lambda aim: aim.unit.cut_off(),
        lambda aim: aim.unit.cut_off(undo=True),
        takes_down=True,
        simulated=True,
    ),
    "slow": Fault(("leader",), _command("slow"), _heal, {"factor": 3.0}, simulated=True),
    "slow_rank": Fault(("follower",), _command_of_rank("slow_rank"), _heal, {"factor": 3.0}, simulated=True),
    "error_burst": Fault(
        ("leader",), _command("error_rate"), _heal, {"rate": 1.0, "status": 500}, simulated=True
    ),
    "lying_health": Fault(("leader",), _command("freeze_engine"), _heal, takes_down=True, simulated=True),
    "in_stream_error": Fault(
        ("leader",), _command("in_stream_error"), _heal, {"after_tokens": 4}, simulated=True
    ),
    "cut_link": Fault(("link",), _link("cut"), _link("heal"), breaks=True, simulated=True),
    "hang_link": Fault(("link",), _link("hang"), _link("heal"), breaks=True, simulated=True),
    "slow_link": Fault(("link",), _link("slow"), _link("heal"), {"factor": 20.0}, simulated=True),
    "rolling_restart": Fault(
        ("units", "gates"),
        lambda aim: aim.place.roll_units() if aim.node == "units" else aim.place.roll_gates(),
        _nothing,
    ),
    "redis_outage": Fault(
        ("redis",), lambda aim: aim.place.stop_redis(), lambda aim: aim.place.start_redis()
    ),
}
