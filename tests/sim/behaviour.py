"""What can be wrong with a simulated engine, as data. A fresh `Behaviour` is a healthy one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.http_server import Request
    from tests.sim.odd import Odd


class Break(Enum):
    """How a stream breaks in the middle."""

    ERROR = "an SSE error event under status 200"
    TRUNCATE = "the connection is closed"
    STALL = "nothing more comes, while the other streams go on"
    IDLE = "events without a word follow for ever, while the other streams go on"
    LOSE = "nothing more comes, for the engine has forgotten the request"


@dataclass(slots=True)
class Behaviour:
    """How an engine behaves at the moment; set a field to change it.

    wedged: the collective hangs. `/health` says 200, heads are sent, no token ever.
    spinning: the same, and `/metrics` stands still as well, for the engine's process is busy.
    silent: the leader itself is stopped. Connections are accepted, what is sent is answered when it goes on.
    follower_lost: at the next step all requests fail in the engine, and soon after the leader exits.
    slow: factor on every step and prefill.
    error_rate, error_status, error_words: this share of generations gets this error at once.
    busy_status: 429 or 503 for every generation: the engine is full of other people's work, and works.
    late_s: what probes ask (`/health`, `/metrics`, `/v1/models`) is answered so much later.
    breaks, breaks_after_events: each stream breaks after so many content events.
    garbage: generations are answered with what is no HTTP.
    keepalive_s: a `:` comment this often on every stream accepted from now on, tokens or not.
    torn: the events of a stream and its chunks do not coincide.
    close_delimited: streams end with their connection.
    template: what becomes of a rendered prompt.
    answers: a kind of nonsense (loadtests/simunit/nonsense.py) that generations get at once.
    answers_share: this share of them.
    spares_canaries: canaries get an honest answer.
    lacks: what a body must not contain, as bytes: it is refused with `lacks_status`.
    max_prompt: longer prompts, in characters, are refused with 400 (0: none is).
    oddly: what it answers instead of what it would generate (tests/sim/odd.py); None: nothing odd.
    says_paused: what it answers to `/is_paused`, whatever is so; the front end knows it by itself.
    weights: engines with different ones say different things.
    fingerprint: `system_fingerprint` of its answers.
    """

    wedged: bool = False
    spinning: bool = False
    silent: bool = False
    follower_lost: bool = False
    slow: float = 1.0
    error_rate: float = 0.0
    error_status: int = 500
    error_words: str = "simulated"
    busy_status: int | None = None
    late_s: float = 0.0
    breaks: Break | None = None
    breaks_after_events: int = 0
    garbage: bool = False
    keepalive_s: float | None = None
    torn: bool = False
    close_delimited: bool = False
    template: Callable[[str], str] = str
    answers: str = ""
    answers_share: float = 1.0
    spares_canaries: bool = False
    lacks: bytes = b""
    lacks_status: int = 400
    max_prompt: int = 0
    oddly: Callable[[Request], Odd | None] | None = None
    says_paused: bool | None = None
    weights: str = ""
    fingerprint: str = ""

    @property
    def is_stuck(self) -> bool:
        return self.wedged or self.spinning or self.silent
