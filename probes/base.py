"""What every probe is, and what it may use.

A probe is one frozen dataclass in one file whose fields are its configuration. It looks once per call of
`look`, through the `fetch` of its patient, and brings findings home; period, jitter, timeout and the rule
that looks never overlap belong to the runner, hysteresis to the judge.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

from cellgate.router.nouns import Finding, Load, Node, Rules, Unit, Verdict

P = TypeVar("P", bound=asyncio.BaseProtocol)


@dataclass(frozen=True, slots=True)
class Reply:
    """A unit's whole answer. Header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Trouble(Enum):
    """Why there is no reply, by whose fault it may be."""

    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    BROKEN = "broken"
    """The unit answered garbage, too much, or closed early."""
    OWN = "own"
    """The gate's own fault: descriptors, buffers, resolver."""


class FetchError(Exception):
    """There is no reply. `str()` is one line that names the phase."""

    def __init__(self, trouble: Trouble, reason: str) -> None:
        super().__init__(reason)
        self.trouble = trouble


class Fetch(Protocol):
    """One bounded request to one unit. Raises FetchError, nothing else."""

    async def __call__(
        self,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        request_id: str = "",
        timeout_s: float,
        max_bytes: int = 1 << 20,
    ) -> Reply:
        """The reply to `method target` with a JSON `body` (if any); redirects are not followed."""
        ...


class Listener(Protocol):
    """Who follows a reply as it comes. Called by whoever reads it: no method may wait, or raise."""

    def on_head(self, status: int, *, is_stream: bool, body: bytes) -> None:
        """The head has come, with so much of the body. `is_stream`: nothing says how long that will be."""

    def on_body(self, part: bytes) -> None:
        """More of the body."""

    def on_over(self, reason: str, *, is_garbled: bool) -> None:
        """Nothing more comes. `is_garbled`: what came last is no HTTP."""


class Net(Protocol):
    """The way to addresses other than the unit's own: nodes, exporters, agents."""

    def fetch(self, url: str) -> Fetch:
        """A `Fetch` to another server, `http(s)://HOST:PORT` (a path in it is ignored)."""
        ...

    async def connect(
        self, address: str, factory: Callable[[], P], *, timeout_s: float
    ) -> tuple[asyncio.Transport, P]:
        """A connection to HOST:PORT, by TCP. Raises FetchError, nothing else."""
        ...

    def follow(
        self, address: str, target: str, listener: Listener, *, token: str = "", timeout_s: float
    ) -> AbstractAsyncContextManager[None]:
        """Within: GET `target` of HOST:PORT is asked, on a connection of its own, and `listener` hears the
        reply. Entering raises FetchError when there is no connection in `timeout_s`.
        """
        ...


class ProbeContext(Protocol):
    """What a probe sees of its unit, always current."""

    @property
    def unit(self) -> Unit: ...
    @property
    def node(self) -> Node | None:
        """The node looked at; None for a probe of the unit as a whole."""
        ...

    @property
    def verdict(self) -> Verdict: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def life_at(self) -> float:
        """When the unit last proved by work that it lives."""
        ...

    @property
    def is_peers_turn(self) -> bool:
        """True while another gate is to send the next canary, and to tell what became of it."""
        ...

    @property
    def load(self) -> Load | None:
        """The engine's last report of its load; None before the first."""
        ...

    @property
    def stall_limit_s(self) -> float:
        """How long the unit may at most show no life while it works, by what it has to do now."""
        ...

    @property
    def hides_work(self) -> bool:
        """Whether it may be busy with requests of ours, and could not show it."""
        ...

    @property
    def shows_work(self) -> bool:
        """Whether a stream of ours would move if it worked."""
        ...

    @property
    def held_down(self) -> bool:
        """True while the unit is DOWN for a fault of a node that stands: no canary can bring it back."""
        ...

    @property
    def engine(self) -> str:
        """A name in probes/engines.py, configured or found out; empty while nobody knows."""
        ...

    @property
    def models(self) -> frozenset[str]: ...
    @property
    def fetch(self) -> Fetch: ...
    @property
    def net(self) -> Net: ...
    @property
    def rules(self) -> Rules: ...
    @property
    def notes(self) -> dict[str, Any]:
        """What this probe wants to remember of this unit between looks; no other probe sees it."""
        ...

    def now(self) -> float:
        """The loop's time."""
        ...

    async def pause(self, pause_s: float) -> None:
        """Wait, on the loop's time."""
        ...

    def new_id(self) -> str:
        """A short unique id, for request ids and uncachable prompts."""
        ...

    def heard(self) -> None:
        """Note that something of the unit answered. Whoever fetches need not say so."""
        ...


class Probe(Protocol):
    """Looks at a unit, or at one of its nodes, once per call."""

    @property
    def name(self) -> str: ...

    def limit_s(self, context: ProbeContext, /) -> float:
        """How long one look may take at most, its timeouts included; inf for one that holds a stream."""
        ...

    def due_at(self, context: ProbeContext, last_at: float, /) -> float:
        """When to look again, after a look that began at `last_at` (-inf: never looked). Only reads."""
        ...

    def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        """What one look finds: none, one or several findings. Troubles of the fetch are findings too."""
        ...


def is_in_use(context: ProbeContext) -> bool:
    """Whether the unit is known to work on anything, of ours or of others."""
    load = context.load
    return context.in_flight > 0 or (load is not None and load.running + load.waiting > 0)
