"""The words of the suite: an abuse, the place it is done at, and what its client got."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadtests.abuse.evil import EvilUnits
    from loadtests.kit.gate import GateProcess
    from loadtests.simunit.process import SimUnit

KEYS = {"neighbour": b"sk-neighbour", "abuser": b"sk-abuser"}
"""Where keys are asked for: whose they are, and how they are shown."""
USAGE_LOG = "usage.jsonl"
"""Beside the file of keys."""
Got = Counter[str]
"""How often each thing came of what was sent: "400 bad_json", "closed", "hang", …"""

ANSWERED = r"(1|2|4)\d\d|50[135]|left"
"""What is an answer, as a pattern of the beginning of an outcome: the gate's own word, or the client left by
its own will. 500 is a defect of the gate; 502 and 504 are allowed to rows whose unit misbehaves.
"""
UNIT_ANSWERED = ANSWERED + r"|50[24]|cut"
"""The same of rows whose unit misbehaves: the gate may also cut a reply that was begun."""
NO_ANSWER_POSSIBLE = ANSWERED + r"|closed|reset"
"""Of rows in which HTTP has no answer to give, or the client would not read one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an abuse is done. `kv_port`: where the gate expects the KV events of a unit; `keys`: the file of
    keys.
    """

    gate: GateProcess
    evil: EvilUnits
    kv_port: int
    units: tuple[SimUnit, ...] = ()
    keys: Path | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """How a gate is started for an abuse that needs its own. `files`: the most descriptors it may have;
    `unread_log`: what it prints goes into a pipe that nobody reads; `bodies_bytes`: the memory for all
    bodies, as on a machine with four times as much; `uses`: what is off by default and on here, of "agents",
    "guardrail", "keys", "kv_events", "realtime" and "roles" (evil units give and take KV blocks).
    `beside_evil`: the neighbour asks the evil units, as the abuser does; `same_address`: from where it does.
    """

    files: int | None = None
    unread_log: bool = False
    bodies_bytes: int | None = None
    uses: str = ""
    beside_evil: bool = False
    same_address: bool = False


DEFAULT = Surroundings()


@dataclass(frozen=True, slots=True)
class Abuse:
    """One row of the suite: `act` does it, `what` tells it in one line.

    `megabytes` is what it sends (or has a unit send), `requests` how many requests it makes that deserve an
    answer: both allow CPU (see verdict.py). `answers` is the pattern of outcomes that are right.
    """

    name: str
    what: str
    act: Callable[[Place], Awaitable[Got]]
    megabytes: float = 0.0
    requests: int = 0
    answers: str = ANSWERED
    surroundings: Surroundings = DEFAULT
    is_generated: bool = False
    """It asks for nothing that a unit alone does not have."""
