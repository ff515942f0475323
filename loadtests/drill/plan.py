"""The nouns of a drill file: what is built, what load it gets, what befalls it, what must hold.

What must stay true: whatever is wrong with a file is found here, before anything is started.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from loadtests.drill.faults import FAULTS
from loadtests.drill.links import Pair
from loadtests.drill.mixes import MIXES
from loadtests.drill.promises import PROMISES
from loadtests.drill.routers import ROUTERS
from loadtests.simunit.sequence import Timing

TIMING = {each.name for each in fields(Timing)}
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=9)]
ServingRole = Literal["both", "prefill", "decode"]


class Keys(BaseModel):
    """A section of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Topology(Keys):
    """What is built. Cells are a, b, …, the units of cell a are a1, a2, …; `roles` are those of a cell's
    units, which then move KV blocks; `timing` are flags of simulated leaders, `gate` are keys of the gates'
    file.
    """

    engine: Literal["simulated", "vllm"] = "simulated"
    router: str = "cellgate"
    cells: Count = 2
    units: Count = 2
    roles: tuple[ServingRole, ...] = ()
    followers: Annotated[int, Field(ge=1, le=9)] = 1
    agents: bool = True
    gates: Count = 1
    redis: bool = False
    timing: dict[str, int | float] = {}
    gate: dict[str, object] = {}

    def has_own_workers(self) -> bool:
        """Whether the router takes no other units than its own."""
        return self.router == "dynamo"

    def unit_names(self) -> list[str]:
        """All units, in order."""
        return [f"{cell}{n}" for cell in "abcdefghi"[: self.cells] for n in range(1, self.units + 1)]

    def unit_roles(self) -> dict[str, ServingRole]:
        """The role of each unit, where they have roles."""
        return dict(zip(self.unit_names(), self.roles * self.cells, strict=False))

    def pairs(self) -> list[Pair]:
        """Every prefiller with every decoder of its cell."""
        roles = self.unit_roles()
        prefillers = [unit for unit, role in roles.items() if role != "decode"]
        decoders = [unit for unit, role in roles.items() if role != "prefill"]
        return [Pair(p, d) for p in prefillers for d in decoders if p != d and p[0] == d[0]]

    def node_names(self) -> list[str]:
        """What a unit's processes are called: `engine` is the leader's, which its API outlives."""
        return ["leader", "engine", *(f"follower-{rank}" for rank in range(1, self.followers + 1))]

    def targets(self) -> Iterator[str]:
        """Everything that a fault may name."""
        yield from (f"{unit}.{node}" for unit in self.unit_names() for node in self.node_names())
        yield from (f"{pair.prefiller}-{pair.decoder}.link" for pair in self.pairs())
        yield from ("units", "gates", "redis")


class Bursts(Keys):
    """`requests` short chats in the same instant, every `every_s`, on top of the streams."""

    every_s: Positive
    requests: Annotated[int, Field(ge=1)]


class Goal(Keys):
    """What goodput counts."""

    ttft_s: Positive = 2.0
    tpot_s: Positive = 0.1


class Load(Keys):
    """`streams` users in a closed loop, shared out by the weights of `mix`. No byte for `hang_s`: hung."""

    mix: Annotated[dict[str, int], Field(min_length=1)]
    streams: Annotated[int, Field(ge=1)]
    seconds: Positive
    hang_s: Positive = 10.5
    goal: Goal = Goal()
    bursts: Bursts | None = None


class Step(Keys):
    """One fault: when, what, to whom, and after what time it is undone; left out: never. Other keys are the
    fault's parameters.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    at_s: Annotated[float, Field(ge=0)]
    fault: str
    target: str
    heal_after_s: Positive | None = None

    @property
    def unit(self) -> str | None:
        """The unit it befalls, if it is a single one; of a link, both."""
        return self.target.partition(".")[0] if "." in self.target else None

    @property
    def node(self) -> str:
        """The part of the target behind the unit, or all of it."""
        return self.target.partition(".")[2] or self.target

    def parameters(self) -> dict[str, float]:
        """All parameters of the fault, those left out too."""
        return dict(FAULTS[self.fault].parameters) | {
            k: float(v) for k, v in (self.model_extra or {}).items()
        }


class Drill(Keys):
    """A whole file. The plan restarts every `repeat_s`, if there is one."""

    name: str
    about: str = ""
    topology: Topology = Topology()
    load: Load
    faults: tuple[Step, ...] = ()
    repeat_s: Positive | None = None
    promises: dict[str, float]

    def steps(self) -> list[Step]:
        """Every fault of the run, in order of time."""
        rounds = int(self.load.seconds // self.repeat_s) if self.repeat_s else 1
        again = [
            step.model_copy(update={"at_s": step.at_s + number * (self.repeat_s or 0.0)})
            for number in range(rounds)
            for step in self.faults
        ]
        return sorted((step for step in again if step.at_s < self.load.seconds), key=lambda step: step.at_s)


class UnknownError(ValueError):
    """A name that is none. `known`: what it might have been."""

    def __init__(self, place: tuple[str | int, ...], name: object, known: Iterator[str] | list[str]) -> None:
        super().__init__(f"unknown {name!r}")
        self.place, self.name, self.known = place, str(name), list(known)


def unknown_names(drill: Drill) -> Iterator[UnknownError]:
    """Names of routers, mixes, faults, targets, parameters and promises that do not exist."""
    if drill.topology.router not in ROUTERS:
        yield UnknownError(("topology", "router"), drill.topology.router, list(ROUTERS))
    for key in drill.topology.timing.keys() - TIMING:
        yield UnknownError(("topology", "timing", key), key, sorted(TIMING))
    for mix in drill.load.mix.keys() - MIXES.keys():
        yield UnknownError(("load", "mix", mix), mix, list(MIXES))
    for promise in drill.promises.keys() - PROMISES.keys():
        yield UnknownError(("promises", promise), promise, list(PROMISES))
    for number, step in enumerate(drill.faults):
        yield from _unknown_in_step(drill.topology, ("faults", number), step)


def _unknown_in_step(topology: Topology, place: tuple[str | int, ...], step: Step) -> Iterator[UnknownError]:
    if step.fault not in FAULTS:
        yield UnknownError((*place, "fault"), step.fault, list(FAULTS))
        return
    fault = FAULTS[step.fault]
    for key in (step.model_extra or {}).keys() - fault.parameters.keys():
        yield UnknownError((*place, key), key, [*Step.model_fields, *fault.parameters])
    targets = [target for target in topology.targets() if fault.fits(target, topology.engine)]
    if step.target not in targets:
        yield UnknownError((*place, "target"), step.target, targets)
