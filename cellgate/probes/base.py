"""What every probe is, and what it may use.

A probe is one frozen dataclass in one file whose fields are its configuration. Each run asks once, through
the `fetch` of its context: for one page, or as it likes. The runner has period, jitter, timeout and the
rule that runs never overlap; the judge has hysteresis.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from cellgate.router.nouns import (
    Build,
    Evidence,
    Finding,
    Load,
    Node,
    Rules,
    Sign,
    Unit,
    Urgency,
    Use,
    Verdict,
)

if TYPE_CHECKING:
    from cellgate.probes.agent_stream import AgentStream

P = TypeVar("P", bound=asyncio.BaseProtocol)


class Probe(Protocol):
    """Probes a unit, or one of its nodes, again and again: an AsyncProbe or an HttpPageProbe."""

    @property
    def name(self) -> str: ...

    def limit_s(self, context: ProbeContext, /) -> float:
        """How long one run may take at most, its timeouts included; inf for one that holds a stream."""
        ...

    def due_at(self, context: ProbeContext, last_at: float, /) -> float:
        """When to run again, after a run that began at `last_at` (-inf: never). Only reads."""
        ...


@dataclass(frozen=True, slots=True)
class Reply:
    """A unit's whole answer. Header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Trouble(Enum):
    """Why there is no reply."""

    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    BROKEN = "broken"
    """The unit answered garbage, too much, or closed early."""
    OWN = "own"
    """The gate's own fault: descriptors, buffers, resolver."""
    NAME = "name"
    """Its name is not found, and those of others are: no connection can be made, which proves no more."""


class FetchError(Exception):
    """There is no reply. `str()` is one line that names the phase."""

    def __init__(self, trouble: Trouble, reason: str) -> None:
        super().__init__(reason)
        self.trouble = trouble


class Fetch(Protocol):
    """One bounded request to one unit. Raises FetchError, nothing else.

    `answered_at` is when it last brought a reply. `is_held`: a connection is held open meanwhile, which tells
    at once when the server's process ends.
    """

    answered_at: float

    @property
    def is_held(self) -> bool: ...
    def hold(self, lost: Callable[[], None]) -> None:
        """Hold such a connection for the next minute; `lost` is called when the server has gone."""
        ...

    async def __call__(
        self,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        content_type: str = "application/json",
        request_id: str = "",
        rank: int | None = None,
        fresh: bool = False,
        timeout_s: float,
        max_bytes: int = 1 << 20,
    ) -> Reply:
        """The reply to `method target` with a `body` (if any); redirects are not followed. `rank`: the
        data parallel rank that is to answer. `fresh`: on a new connection.
        """
        ...

    def get(
        self, target: str, done: Callable[[Reply | FetchError], None], *, timeout_s: float, max_bytes: int
    ) -> PageWait:
        """A GET without a task: `done` is called once, in a later turn of the loop, unless abandoned."""
        ...


class PageWait(Protocol):
    """A request on its way."""

    def abandon(self) -> None:
        """Leave nothing of it behind; its answer is no longer wanted."""


class PageGet(NamedTuple):
    """A GET that a probe is made of: to which server, of what, and its bounds."""

    fetch: Fetch
    target: str
    timeout_s: float
    max_bytes: int = 1 << 20


class Net(Protocol):
    """Access to addresses other than the unit's own: nodes, exporters, agents."""

    def fetch(self, url: str, *, token: str = "") -> Fetch:
        """A `Fetch` to another server, `http(s)://HOST:PORT` (a path is ignored), with a token if any."""
        ...

    async def connect(
        self, address: str, factory: Callable[[], P], *, timeout_s: float
    ) -> tuple[asyncio.Transport, P]:
        """A connection to HOST:PORT, by TCP. Raises FetchError, nothing else."""
        ...

    def follow(
        self, address: str, target: str, stream: AgentStream, *, token: str = "", timeout_s: float
    ) -> AbstractAsyncContextManager[None]:
        """A context in which `stream` follows the reply to GET `target` of HOST:PORT, on a separate
        connection. Entering raises FetchError when there is no connection within `timeout_s`.
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
    def is_calm(self) -> bool:
        """Whether it may rest: only an idle unit of a large fleet may."""
        ...

    @property
    def is_of_many(self) -> bool:
        """Whether it is one of a large fleet, in which what is asked of each adds up."""
        ...

    def rest(self, at: float) -> float:
        """How many times as long as usual the pause that began then may be; 1 of a unit that is not calm."""
        ...

    def asks(self, at: float) -> None:
        """Record that something is asked of the unit, or of a node of it."""
        ...

    def says_again(self, said: Evidence) -> bool:
        """Record that a unit or a node which was well, and said so by weak evidence, says so again; False:
        that may change something.
        """
        ...

    def wake(self) -> None:
        """Something speaks against a unit that rests: it is asked as often as usual."""
        ...

    @property
    def progress_at(self) -> float:
        """When the unit last made progress."""
        ...

    @property
    def answered_at(self) -> float:
        """When its own address last answered a probe."""
        ...

    @property
    def is_peers_turn(self) -> bool:
        """True while another gate is to send the next canary, and to publish its result."""
        ...

    @property
    def uses(self) -> Sequence[Use]:
        """What clients ask of it and of other units of its models, the last kind first."""
        ...

    def takes_turn(self) -> Use | None:
        """The kind of request that waits there, and is to be asked next; once."""
        ...

    def answers_since(self, since: float) -> bool:
        """Whether a request that came after `since` was answered."""
        ...

    @property
    def load(self) -> Load | None:
        """The engine's last report of its load; None before the first."""
        ...

    @property
    def ranks(self) -> int:
        """How many data parallel ranks the unit is known to have; 0: its engine has one scheduler."""
        ...

    @property
    def stalled_rank(self) -> int | None:
        """The rank that has requests and makes no step, if there is one."""
        ...

    @property
    def stall_limit_s(self) -> float:
        """How long a unit with its present work may stall at most."""
        ...

    def hides_work(self, asked_at: float = ...) -> bool:
        """Whether requests of this gate may keep it busy without visible progress, so that a canary that was
        sent at `asked_at` waits for them.
        """
        ...

    @property
    def borne_until(self) -> float:
        """Until when no time-out speaks against a unit that shows nothing for its requests; -inf: it does."""
        ...

    @property
    def borne_s(self) -> float:
        """For how long a unit without requests may show nothing: it, or a peer, has lately paused for nearly
        as long and gone on; 0: none has.
        """
        ...

    def answered_beside(self, asked_at: float, late: int, waited_s: float) -> None:
        """Record that a canary sent at `asked_at` was answered, after so many late ones in a row, of which
        the last had waited for `waited_s` in vain.
        """
        ...

    def is_late_by_chance(self, late: int, *, is_young: bool, is_beside: bool) -> bool:
        """So many canaries in a row were late, and nothing explains them: whether equals show that it is
        chance, as far as nothing else tells of the unit (or others were answered, `is_beside` these); or
        nothing is known of equals, and the unit `is_young`.
        """
        ...

    def occupied_until(self, at: float) -> None:
        """Record that the gate itself keeps it busy, at most until then."""
        ...

    @property
    def is_seen_still(self) -> bool:
        """Whether its engine itself has work and counts no steps; or an agent says that it is stopped."""
        ...

    @property
    def held_down(self) -> bool:
        """True while the unit is DOWN because of an open fault of a node: no canary can bring it back."""
        ...

    @property
    def restarted(self) -> tuple[str, float] | None:
        """Its last restart, by whom and when it was seen; None: none was."""
        ...

    @property
    def is_on_hold(self) -> bool:
        """True while it says that it is paused, asleep or scaling, and is believed."""
        ...

    @property
    def engine(self) -> str:
        """A name in probes/engines.py, configured or detected; empty while unknown."""
        ...

    @property
    def build(self) -> Build:
        """What is known of the engine's build."""
        ...

    @property
    def urgency(self) -> Urgency:
        """How soon the known prompt is to be sent."""
        ...

    @property
    def models(self) -> frozenset[str]:
        """The models that the unit serves, without LoRA adapters."""
        ...

    @property
    def fetch(self) -> Fetch: ...
    @property
    def net(self) -> Net: ...
    @property
    def rules(self) -> Rules: ...
    @property
    def notes(self) -> dict[str, Any]:
        """The state of this probe for this unit between runs; no other probe sees it."""
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

    def received(self) -> None:
        """Record that something of the unit answered. A fetch does that by itself."""
        ...


class AsyncProbe(Probe, Protocol):
    """Asks as it likes."""

    def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        """The findings of one run: none, one or several. Failures of the fetch are findings too."""
        ...


@runtime_checkable
class HttpPageProbe(Probe, Protocol):
    """Reads one page in each run. That is what most runs are, and they need not be more expensive."""

    def page(self, context: ProbeContext) -> PageGet:
        """What to ask for."""
        ...

    def read(
        self, context: ProbeContext, answer: Reply | FetchError
    ) -> Sequence[Finding] | AsyncGenerator[Finding, None]:
        """The findings of one run; as a generator when it has more to ask."""
        ...


REST_MAX_S = 10.0
"""The longest pause of a probe of a unit that rests, where its page alone tells of a fault."""
REST_LONG_S = 60.0
"""The same of what its canary shows as well, or what is of use to its next request only, which wakes it."""
REST_SAME_S = 600.0
"""The same of what stays as it is while the process does."""


def rested_s(
    context: ProbeContext, fetch: Fetch, last_at: float, pause_s: float, most_s: float = REST_MAX_S
) -> float:
    """The pause of a probe that asked by `fetch` at `last_at`: longer while its unit rests and a connection
    is held, `most_s` in the end.
    """
    rest = context.rest(last_at)
    return pause_s if rest <= 1.0 or not fetch.is_held else max(pause_s, min(rest * pause_s, most_s))


def is_in_use(context: ProbeContext) -> bool:
    """Whether the unit is known to have requests, of this gate or of others."""
    load = context.load
    return context.in_flight > 0 or (load is not None and load.at_engine > 0)


_ERROR_MESSAGE = re.compile(rb'"(?:message|detail|error)"\s*:\s*"((?:[^"\\]|\\.)+)"')
_WORDS_MAX = 80
_WORDS_WITHIN = 4096
_SHUTS_DOWN = re.compile(r"shut(?:s|ting)?[ -]?down|draining|terminating", re.IGNORECASE)


def words_in(body: bytes) -> str:
    """What an engine says of an error, in quotes, if its JSON has any words; else nothing."""
    said = _ERROR_MESSAGE.search(body[:_WORDS_WITHIN])
    return ascii(said[1][:_WORDS_MAX].decode("utf-8", "replace")) if said is not None else ""


def shuts_down(words: str) -> bool:
    """Whether an engine's error says that it shuts down: it takes nothing new, and finishes the rest."""
    return _SHUTS_DOWN.search(words) is not None


_GOOD_NOTE = "good"
"""Note: the last reply of a page, if it was good, and the evidence that it was."""


def said_before(context: ProbeContext, answer: Reply | FetchError) -> tuple[Evidence, ...] | None:
    """What a page tells that says what it said before, which was good: the same evidence, but for its time;
    nothing, where that changes nothing. None: it says something else.
    """
    last = context.notes.get(_GOOD_NOTE)
    if last is None or answer is not last[0]:
        return None
    good: Evidence = last[1]
    return () if context.says_again(good) else (replace(good, at=context.now()),)


def keep_good(context: ProbeContext, answer: Reply | FetchError, evidence: Evidence) -> None:
    """Keep what a page has told, for `said_before`."""
    context.notes[_GOOD_NOTE] = (answer, evidence) if evidence.sign is Sign.GOOD else None
