"""The nouns of the gate: what a unit is, what a request needs, what is believed and why.

Everything here is immutable and knows neither clock nor network. Times are `loop.time()` seconds
(monotonic, arbitrary origin); durations end in `_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from math import inf
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    import random


class Role(Enum):
    """What a node does in its unit: the leader serves the API, followers compute with it."""

    LEADER = "leader"
    FOLLOWER = "follower"


@dataclass(frozen=True, slots=True)
class Node:
    """One machine (process group) of a unit, and how it is looked at.

    `agent` is the HOST:PORT of its `cellgate agent`; empty: it has none. `probes` are node probes (see
    probes/), which routing does not look into.
    """

    name: str
    role: Role
    agent: str = ""
    probes: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """Units that share fate and are rolled together.

    `spill_s` says how far away it is: a request comes here only when it would wait so much longer elsewhere.
    """

    name: str
    weight: float = 1.0
    spill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Unit:
    """The smallest thing that can answer: all its nodes or nothing.

    `url` is the leader's API without a trailing slash. `models` empty means: ask the unit.
    `weight` scales the share of load, `max_in_flight` bounds the leases held on it at once.
    `engine` and `canary` (which API a canary goes through) empty means: found out by the probes.
    `metrics_url` is where the engine shows its numbers, when that is not the engine's usual place.
    `api_key` is what probes send. `prefill_tokens_s` (uncached tokens a second) and `kv_tokens` (the size of
    the KV cache) are first estimates; 0 means: take the engine's word, or go by the unit's peers.
    """

    name: str
    cell: str
    url: str
    models: tuple[str, ...] = ()
    weight: float = 1.0
    max_in_flight: int = 256
    nodes: tuple[Node, ...] = ()
    engine: str = ""
    canary: str = ""
    metrics_url: str = ""
    api_key: str = field(default="", repr=False)
    prefill_tokens_s: float = 0.0
    kv_tokens: int = 0

    def is_probed_like(self, other: Unit) -> bool:
        """Whether both are looked at in the same way, wherever they are."""
        ways = [(u.nodes, u.engine, u.canary, u.metrics_url, u.api_key) for u in (self, other)]
        return ways[0] == ways[1]


class Ask(NamedTuple):
    """What a request needs, as far as routing cares. `model` None means any unit will do."""

    model: str | None = None
    stream: bool = False
    prompt_tokens: int = 0
    """An estimate: bytes of the prompt / 4."""
    unit: str | None = None
    """The only unit that can answer (a stored response lives where it was made)."""
    follows: str | None = None
    """The stored response this one goes on from."""
    prompt_bytes: int = 0
    blocks: tuple[int, ...] = ()
    """Chained hashes of the prompt's full blocks: what a prefix cache may hold of it."""
    session: str = ""
    tenant: str = ""
    priority: int = 0
    """Lower goes first."""
    deadline_at: float = inf
    """When its first token has to be there to be of use."""
    continuable: bool = False
    """Whether it asks for a stream of text alone, with which another unit can go on if its own breaks."""
    fingerprint: int = 0
    """Of what an engine is to compute: model, prompt, and fields that make it work otherwise; 0: none."""
    max_tokens: int = 0
    """The longest answer that it allows; 0: it does not say."""


class Sign(Enum):
    """Which way one observation points."""

    GOOD = "good"
    BAD = "bad"
    NEUTRAL = "neutral"


class Strength(IntEnum):
    """How much one observation weighs.

    WEAK counts as a rate in a window, STRONG raises suspicion at once, FATAL is believed at the first strike.
    """

    WEAK = 1
    STRONG = 2
    FATAL = 3


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation about a unit. `source` is who saw it, `reason` is for a person to read."""

    unit: str
    sign: Sign
    strength: Strength
    source: str
    reason: str
    at: float
    epoch: str | None = None
    node: str | None = None


class Verdict(Enum):
    """What is believed of a unit."""

    STARTING = "starting"
    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"
    PROBATION = "probation"

    # Enum's own hash is a Python function; members are singletons, so their identity does as well.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Case:
    """All the judge knows of one unit.

    `epochs` are the last readings, by who read them (a unit has several processes, and several may look);
    `reborn` is who first read that the incarnation is another one, and when;
    `window` holds the recent evidence, oldest first; `passes` counts the canaries passed since DOWN;
    `faults` are the (node, source) pairs that said a fatal thing and have not taken it back;
    `because` is the evidence behind the verdict; `acquitted` is the node and the source of the last
    suspicion that a canary has answered, and when that was.
    """

    verdict: Verdict
    since: float
    epochs: tuple[tuple[str, str], ...] = ()
    reborn: tuple[str, float] | None = None
    window: tuple[Evidence, ...] = ()
    passes: int = 0
    faults: frozenset[tuple[str, str]] = frozenset()
    because: Evidence | None = None
    acquitted: tuple[str | None, str, float] = (None, "", 0.0)


@dataclass(frozen=True, slots=True)
class Flip:
    """A change of verdict, with its reason: what /events and the log show."""

    unit: str
    cell: str
    before: Verdict
    after: Verdict
    at: float
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a unit says it is, and how old that knowledge is.

    `running` and `waiting` are the engine's own gauges, `own_in_flight` what this gate had there when
    they were read, so that only the rest is counted as other people's work. `progress` is the sum of
    the engine's step and token counters: when it grows, the engine lives; None: it shows none. `sighted`
    says that some of them grow with every step, so that standing still means something, too.
    """

    unit: str
    at: float
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    own_in_flight: int = 0
    progress: float | None = None
    sighted: bool = False
    epoch: str | None = None
    kv_tokens: int = 0
    """The size of the KV cache; 0: it does not tell."""

    @property
    def foreign(self) -> int:
        """Requests at the engine that did not come from this gate."""
        return max(0, self.running + self.waiting - self.own_in_flight)


@dataclass(frozen=True, slots=True)
class Models:
    """The models a unit says it serves (`/v1/models`)."""

    unit: str
    names: tuple[str, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Served:
    """The engine that a unit turns out to run: a name in probes/engines.py."""

    unit: str
    engine: str
    at: float


Finding = Evidence | Load | Models | Served
"""What a probe may bring home."""


class Candidate(NamedTuple):
    """The row a policy ranks; a named tuple because one is made per unit per pick.

    `load` is in-flight requests here plus the engine's foreign ones, not yet divided by `weight`; both are
    given to policies that do not rank by seconds. `cost_s` is what the ask costs there, in predicted
    seconds. A unit without room may rank: when it ranks first, the ask waits for it. `held_blocks` of the
    prompt are believed to be in its prefix cache.
    """

    unit: str
    in_flight: int
    load: float
    weight: float
    cost_s: float = 0.0
    has_room: bool = True
    held_blocks: int = 0


class Refusal(Enum):
    """Why no lease could be given."""

    NO_UNIT = "no_unit"
    FULL = "full"
    LATE = "late"
    """It could not be answered before its deadline."""
    UNKNOWN_MODEL = "unknown_model"
    UNSURE = "unsure"
    """A unit that could take the request may have started anew: it is being asked."""
    POISON = "poison"
    """Units have died of what it asks."""
    HELD = "held"
    """Units may have died of what it asks: another one has to show first that they have not."""


class Outcome(Enum):
    """How an attempt on a unit ended; label of `cellgate_requests_total`."""

    OK = "ok"
    BUSY = "busy"
    CLIENT_ERROR = "client_error"
    CLIENT_LEFT = "client_left"
    UNIT_ERROR = "unit_error"
    TRUNCATED = "truncated"
    STREAM_ERROR = "stream_error"
    EVICTED = "evicted"
    GATE_ERROR = "gate_error"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Rules:
    """What the judge and the retry rule go by. Defaults in parentheses are those of the design.

    weak_window_s (10), weak_min (5), weak_rate (0.5): so much weak evidence in the window is a suspicion.
    passes (2): canaries in a row that bring a DOWN unit back.
    canary_idle_s (2): a unit that showed no life for so long gets a canary.
    canary_timeout_s (1.25), warm_up_timeout_s (60): how long a canary may take at least, by verdict.
    silent_min_s (1): while requests are there, nothing moving for less than this is never a suspicion.
    panic_min_units (3), panic_share (0.5), panic_max_s (30): when nothing answers any more of so many units,
    and of more than this share of all, the gate takes itself to be cut off and holds the rotation so long.
    slow_start_s (10): how long a unit that came up takes to get its full share.
    degraded_ratio (1.25): so many times slower a token than in the cell's other units is fail-slow.
    attempts (3), retry_budget (0.2), retry_min (3): retries caused by responses.
    evict_overcommit (0.25): how far above max_in_flight an evicted lease may go.
    """

    weak_window_s: float = 10.0
    weak_min: int = 5
    weak_rate: float = 0.5
    passes: int = 2
    canary_idle_s: float = 2.0
    canary_timeout_s: float = 1.25
    warm_up_timeout_s: float = 60.0
    silent_min_s: float = 1.0
    panic_min_units: int = 3
    panic_share: float = 0.5
    panic_max_s: float = 30.0
    slow_start_s: float = 10.0
    degraded_ratio: float = 1.25
    attempts: int = 3
    retry_budget: float = 0.2
    retry_min: int = 3
    evict_overcommit: float = 0.25


@dataclass(frozen=True, slots=True)
class Fleet:
    """Cells and units as configured; names are unique."""

    cells: tuple[Cell, ...] = ()
    units: tuple[Unit, ...] = field(default=())

    def cell(self, name: str) -> Cell:
        """The cell of that name; one with defaults, when it is not listed."""
        return next((cell for cell in self.cells if cell.name == name), Cell(name))


class Policy(Protocol):
    """Ranks candidates for an ask; never sees health, never drops one, holds no state beyond a cursor.

    `by_seconds`: it ranks by cost, so that an ask may wait for a unit that has no room yet; policies that do
    not are shown units with room only, as long as there is one. `by_cache`: what it ranks by counts what a
    unit's prefix cache holds of the prompt.
    """

    by_seconds: ClassVar[bool]
    by_cache: ClassVar[bool]

    def rank(self, ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Sequence[Candidate]:
        """All of `candidates` (at least one), best first, so that the next best needs no new call."""
        ...
