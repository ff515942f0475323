"""The words of the suite: an abuse, the place it is done at, and what its client got."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadtests.abuse.evil import EvilUnits
    from loadtests.kit.gate import GateProcess

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
    """Where an abuse is done. `kv_port`: where the gate expects the KV events of an evil unit."""

    gate: GateProcess
    evil: EvilUnits
    kv_port: int


@dataclass(frozen=True, slots=True)
class Surroundings:
    """How a gate is started for an abuse that needs its own. `files`: the most descriptors it may have;
    `unread_log`: what it prints goes into a pipe that nobody reads; `bodies_bytes`: the memory for all
    bodies, as on a machine with four times as much; `uses`: what is off by default and on here, of "agents",
    "guardrail", "kv_events", "realtime" and "roles" (evil units give and take KV blocks).
    """

    files: int | None = None
    unread_log: bool = False
    bodies_bytes: int | None = None
    uses: str = ""


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
