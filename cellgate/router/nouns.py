"""The nouns of the gate: units, requests, evidence and verdicts.

Everything here is immutable, without clock or network. Times are `loop.time()` seconds
(monotonic, arbitrary origin); durations end in `_s`.

In this order: `Ask`, `Build`, `Hold`, `UnitFacts`, `SplitPlan`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from math import inf
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import random


@dataclass(frozen=True, slots=True)
class Unit:
    """The smallest thing that can answer: all its nodes or nothing.

    `url` is the leader's API without a trailing slash. `models` empty means: ask the unit.
    `weight` scales the share of load, `max_in_flight` bounds the leases held on it at once.
    `engine` and `canary` (which API a canary goes through) empty means: found out by the probes.
    `metrics_url` is where the engine shows its numbers, when that is not the engine's usual place.
    `api_key` is what probes send.
    `kv_events` None: ask the unit, if the package is installed. `bootstrap_port`: SGLang's, of a prefiller.
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
    kv_events: KvEvents | None = None
    role: ServingRole = "both"
    bootstrap_port: int = 8998

    def is_probed_like(self, other: Unit) -> bool:
        """Whether both have the same probes, apart from their addresses."""
        ways = [(u.nodes, u.engine, u.canary, u.metrics_url, u.api_key, u.role) for u in (self, other)]
        return ways[0] == ways[1]


@dataclass(frozen=True, slots=True)
class Built:
    """The build that a unit reports; what is empty was not reported."""

    unit: str
    build: Build
    at: float


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to the known prompt. Only answers to the same `question` (API and model) are compared.

    No `tokens`: the unit answered, but gave no answer.
    """

    unit: str
    question: str
    tokens: tuple[AnswerToken, ...]
    at: float


@dataclass(frozen=True, slots=True)
class EnginePause:
    """What an engine says when it is asked whether it stands still on purpose; `kind` None: it does not."""

    unit: str
    kind: HoldKind | None
    at: float
    is_of_faults: bool = False
    """It is about a recovery from a fault, which an engine tells at another place than other pauses."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The report of one node's agent.

    `stack` is its software by name (docs/stacks.md), `counters` the error counters of its links and devices
    since they were last reset, `addresses` those of its interfaces. `communicators` are what its ranks say,
    the largest first; empty unless they were asked (`is_of_ranks`).
    """

    unit: str
    node: str
    at: float
    stack: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    addresses: frozenset[str] = frozenset()
    communicators: tuple[Communicator, ...] = ()
    is_of_ranks: bool = False


class RankFault(NamedTuple):
    """A rank that its engine says is not healthy: its number, the engine's word, what it says of the cause.
    `node` is whose API server says so; empty: the leader's.
    """

    rank: str
    status: str
    info: str
    node: str = ""


@dataclass(frozen=True, slots=True)
class RankFaults:
    """What an engine says of its ranks: those that are not healthy now; none: all are."""

    unit: str
    faults: tuple[RankFault, ...]


class Role(Enum):
    """What a node does in its unit: the leader serves the API, followers compute with it."""

    LEADER = "leader"
    FOLLOWER = "follower"


Place = tuple[str, ...]
"""Where a node stands in the network: from the widest layer (a zone) to the narrowest (a switch)."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine (process group) of a unit, and its probes.

    `agent` is the HOST:PORT of its `cellgate agent`; empty: it has none. `probes` are node probes (see
    probes/), which routing does not look into. `place` is empty where it is unknown.
    """

    name: str
    role: Role
    agent: str = ""
    probes: tuple[object, ...] = ()
    place: Place = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """Units that share fate and are rolled out together.

    `spill_s` is its distance: a request comes here only when it would wait that much longer elsewhere.
    `transfer` is how its units pass KV blocks to each other.
    """

    name: str
    weight: float = 1.0
    spill_s: float = 0.0
    transfer: Transfer = "none"


@dataclass(frozen=True, slots=True)
class KvEvents:
    """Where a unit publishes what its KV cache holds. Without `endpoint` its engine, `source`, is asked.

    `ranks` data-parallel ranks publish, each at the port behind the one before.
    """

    source: str
    endpoint: str = ""
    replay_endpoint: str = ""
    ranks: int = 1


class Ask(NamedTuple):
    """What routing needs to know of a request. `model` None means any unit."""

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
    """The deadline of its first token."""
    continuable: int = 0
    """How another unit could resume the stream that it asks for (see proxy/resume/eligible.py); 0: not."""
    fingerprint: int = 0
    """A hash of the engine's work: model, prompt, and fields that change it; 0: none."""
    max_tokens: int = 0
    """The longest answer that it allows; 0: not set."""
    build: str | None = None
    """The only build (`Build.key`) that may resume its stream; None: any."""
    splits: bool = False
    """Another unit may compute its prompt (see router/prefill_decode.py)."""
    answers: int = 1
    """How many answers it asks for, each of at most `max_tokens`."""
    wanted_id: str | None = None
    """What its client wants its response to be called; None: nothing of that."""
    models_beside: tuple[str, ...] = ()
    """Other models that its body names: adapters, fallbacks."""
    route: str = ""
    """The name of its path, if it has a JSON body."""
    payer: str = ""
    """Who pays for it: an address, or the tenant of a key (see router/shares.py); empty: unknown. It is
    the last field, and set by its place."""


class Use(NamedTuple):
    """A kind of request (see board.py): a path by its name, and the model; empty: none is named."""

    route: str
    stream: bool
    model: str


class Sign(Enum):
    """Which way one observation points."""

    GOOD = "good"
    BAD = "bad"
    NEUTRAL = "neutral"


class Strength(IntEnum):
    """How much one observation weighs.

    WEAK counts as a rate in a window, STRONG makes a unit suspect at once, FATAL makes it DOWN at once.
    """

    WEAK = 1
    STRONG = 2
    FATAL = 3


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation about a unit, by `source`; `reason` is for people.

    `is_unseen`: a time-out of ours, and nothing else that was seen of the unit speaks against it. `is_reply`:
    what the unit answered to a new request, which says nothing of those that it has. `is_refusal`:
    a canary was answered with 401, 403, 404 or the like, which may be the gate's own fault. `is_empty`: one
    was answered with nothing, which its model may do.
    """

    unit: str
    sign: Sign
    strength: Strength
    source: str
    reason: str
    at: float
    epoch: str | None = None
    node: str | None = None
    is_unseen: bool = False
    is_reply: bool = False
    is_refusal: bool = False
    is_empty: bool = False


class Verdict(Enum):
    """The verdict on a unit."""

    STARTING = "starting"
    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"
    PROBATION = "probation"

    # Enum's own hash is a Python function; members are singletons, so their identity does as well.
    __hash__ = object.__hash__


USABLE = (Verdict.UP, Verdict.SUSPECT)
"""With one of these verdicts a unit gets requests."""


@dataclass(frozen=True, slots=True)
class Case:
    """All the judge knows of one unit.

    `epochs` are the last readings by reader (a unit has several processes, and several readers);
    `restarted` is the reader that first saw the new incarnation, and when;
    `window` holds the recent evidence, oldest first; `passes` counts the canaries passed since DOWN;
    `faults` are the (node, source) pairs with an open fatal fault; node "" is the unit as a whole;
    `because` is the evidence behind the verdict; `cleared` is the node and the source of the last
    suspicion that a canary has cleared, and when.
    """

    verdict: Verdict
    since: float
    epochs: tuple[tuple[str, str], ...] = ()
    restarted: tuple[str, float] | None = None
    window: tuple[Evidence, ...] = ()
    passes: int = 0
    faults: frozenset[tuple[str, str]] = frozenset()
    because: Evidence | None = None
    cleared: tuple[str | None, str, float] = (None, "", 0.0)


class RankLoad(NamedTuple):
    """The load of one data parallel rank; `progress` is the sum of its step and token counters."""

    rank: int
    running: int = 0
    waiting: int = 0
    progress: float = 0.0

    @property
    def at_engine(self) -> int:
        """Requests at the rank."""
        return self.running + self.waiting


@dataclass(frozen=True, slots=True)
class Load:
    """The load that a unit's engine reports, and when.

    `running` and `waiting` are the engine's own gauges, `own_in_flight` what this gate had there when
    they were read, so that only the rest counts as work of others. `progress` is the sum of
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
    """The size of the KV cache; 0: unknown."""
    adapters: frozenset[str] = frozenset()
    """The LoRA adapters that its requests use, running or waiting."""
    adapter_places: int = 0
    """How many adapters it keeps loaded at once; 0: unknown."""
    corrupted: float = 0.0
    """The engine's own count of requests with numbers that are none (NaN)."""
    ranks: tuple[RankLoad, ...] = ()
    """Its data parallel ranks, in their order, if it has several."""

    @property
    def at_engine(self) -> int:
        """Requests at the engine."""
        return self.running + self.waiting

    @property
    def foreign(self) -> int:
        """Requests at the engine that did not come from this gate."""
        return max(0, self.at_engine - self.own_in_flight)


ModelCards = Mapping[str, Mapping[str, str | int]]
"""What units say of models in their lists, by name: when it was made, its owner, its length."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models that a unit lists (`/v1/models`), LoRA adapters included.

    `bases` are the adapters among them, each with the model that it is for; `cards` what else is said of
    each model.
    """

    unit: str
    names: tuple[str, ...]
    at: float
    bases: Mapping[str, str] = field(default_factory=dict)
    cards: ModelCards = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Served:
    """The detected engine of a unit: a name in probes/engines.py."""

    unit: str
    engine: str
    at: float


Finding = Evidence | Load | Models | Served | EnginePause | Built | Answered | NodeFacts | RankFaults
"""What a probe may find."""


class Candidate(NamedTuple):
    """The row a policy ranks; a named tuple because one is made per unit per pick.

    `load` is in-flight requests here plus the engine's foreign ones, not yet divided by `weight`; both are
    given to policies that do not rank by seconds. `cost_s` is what the ask costs there, in predicted
    seconds. A unit without room may rank: when it ranks first, the ask waits for it. `cached_blocks` of the
    prompt are believed to be in its prefix cache.
    """

    unit: str
    in_flight: int
    load: float
    weight: float
    cost_s: float = 0.0
    has_room: bool = True
    cached_blocks: int = 0


class Kept(NamedTuple):
    """A unit that the configuration has no more stays since then, until one of the units `until` is up:
    nothing else serves these models (none: it may serve any).
    """

    since: float
    models: tuple[str, ...]
    until: tuple[str, ...]


BUSY_STATUSES = frozenset({429, 503})
"""A unit that answers one of these may have too much to do, and not be sick."""


class Refusal(Enum):
    """Why there is no lease."""

    NO_UNIT = "no_unit"
    FULL = "full"
    LATE = "late"
    """It could not be answered before its deadline."""
    UNKNOWN_MODEL = "unknown_model"
    UNSURE = "unsure"
    """A unit that could take the request may have restarted: a canary is sent."""
    POISON = "poison"
    """Units have died of its prompt."""
    HELD = "held"
    """Units may have died of its prompt: another request must clear it first."""
    ON_HOLD = "on_hold"
    """The units that could take it are paused, asleep or scaling."""
    STALLED = "stalled"
    """The units that could take it show nothing, which nobody does better; or have just gone on."""


class Outcome(Enum):
    """How an attempt on a unit ended; label of `cellgate_attempts_total`."""

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


FIXED = {"is_fixed": True}
"""The mark of a field of rules that no configuration changes: its default is what suits every fleet."""


PANIC_UNITS, PANIC_SHARE, PANIC_MAX_S = 3, 0.5, 30.0
"""When this many units, and more than this share of all, do not answer at all, the gate assumes that it is
cut off and keeps them in rotation for so long."""
DEGRADED_TIMES = 1.25
"""A unit whose tokens take this many times as long as in its cell is degraded."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of the judge and of retries, with their defaults in parentheses.

    weak_window_s (10), weak_min (5), weak_rate (0.5): this much weak evidence in the window is a suspicion.
    passes (2): canaries in a row that bring a DOWN unit back.
    canary_idle_s (14): a unit without work and without progress for this long gets a canary; two thirds of it
    where the engine counts no steps.
    canary_timeout_s (1.25), warm_up_timeout_s (60): the least timeout of a canary, by verdict.
    silent_min_s (1): a shorter stall is never a suspicion.
    slow_start_s (10): how long until a unit that came up gets its full share.
    hold_limit_s (600): how long an engine may say that it is paused, asleep or scaling and be believed.
    attempts (3), retry_budget (0.2), retry_min (3): retries caused by responses.
    evict_overcommit (0.25): how far above max_in_flight an evicted lease may go.
    """

    weak_window_s: float = field(default=10.0, metadata=FIXED)
    weak_min: int = field(default=5, metadata=FIXED)
    weak_rate: float = field(default=0.5, metadata=FIXED)
    passes: int = field(default=2, metadata=FIXED)
    canary_idle_s: float = 14.0
    canary_timeout_s: float = 1.25
    warm_up_timeout_s: float = 60.0
    silent_min_s: float = field(default=1.0, metadata=FIXED)
    slow_start_s: float = 10.0
    hold_limit_s: float = field(default=600.0, metadata=FIXED)
    attempts: int = 3
    retry_budget: float = field(default=0.2, metadata=FIXED)
    retry_min: int = field(default=3, metadata=FIXED)
    evict_overcommit: float = field(default=0.25, metadata=FIXED)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Cells and units as configured; names are unique."""

    cells: tuple[Cell, ...] = ()
    units: tuple[Unit, ...] = field(default=())

    def cell(self, name: str) -> Cell:
        """The cell of that name; one with defaults, when it is not listed."""
        return next((cell for cell in self.cells if cell.name == name), Cell(name))


class Policy(Protocol):
    """Ranks candidates for an ask; never sees health, never drops one, has no state beyond a cursor.

    `by_seconds`: it ranks by cost, so that an ask may wait for a unit that has no room yet; policies that do
    not are shown units with room only, as long as there is one. `by_cache`: what it ranks by counts what a
    unit's prefix cache holds of the prompt.
    """

    by_seconds: ClassVar[bool]
    by_cache: ClassVar[bool]

    def rank(self, ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Sequence[Candidate]:
        """All of `candidates` (at least one), best first, so that the next best needs no new call."""
        ...


# Nouns of what engines say: which build they are, and the answer to the known prompt; both for an epoch.


CHANGES_MAX = 1
"""A fingerprint may change so often in an epoch: a fast restart of an engine is not always seen."""


class Build(NamedTuple):
    """What a unit's engine says that it is; empty: unknown.

    `fingerprint` is `system_fingerprint` of OpenAI's API. vLLM's has its version, its parallelism and a hash
    of its configuration, llama.cpp's is its build. `version` is what the engine shows on a page of its own.
    `changes`: how many times the fingerprint was another one than before. Engines, and proxies before them,
    that make up a new one for each answer say nothing by it: then it stays empty.
    """

    fingerprint: str = ""
    version: str = ""
    changes: int = 0

    @property
    def key(self) -> str:
        """What builds are compared by: the fingerprint, or the version of an engine without one."""
        return self.fingerprint or self.version

    def differs(self, other: Build) -> bool:
        """Whether both tell the same thing of themselves, and tell it differently. A unit that has only just
        started has told its version, and no fingerprint yet.
        """
        if self.fingerprint and other.fingerprint:
            return self.fingerprint != other.fingerprint
        return bool(self.version and other.version) and self.version != other.version

    def updated(self, news: Build) -> Build:
        """This build with what `news` tells; what that leaves empty stays."""
        changes = self.changes + (news.fingerprint not in ("", self.fingerprint) and self.fingerprint != "")
        fingerprint = "" if changes > CHANGES_MAX else news.fingerprint or self.fingerprint
        return Build(fingerprint, news.version or self.version, changes)


class AnswerToken(NamedTuple):
    """One token of an answer: its text, its log probability, and the next likely tokens with theirs.

    None: the engine does not say. NaN: it cannot say, because it computes no numbers.
    """

    token: str
    logprob: float | None = None
    others: tuple[tuple[str, float], ...] = ()


class Urgency(IntEnum):
    """How soon the known prompt is to be sent to a unit."""

    ROUTINE = 0
    SOON = 1
    """As soon as it is idle."""
    NOW = 2
    """Even if it has requests."""


UNKNOWN_BUILD = Build()


# The nouns of units on hold: what an engine says of standing still on purpose, and what is held of it.


class HoldKind(Enum):
    """What an engine is doing on purpose, instead of generating."""

    PAUSED = "paused"
    ASLEEP = "asleep"
    SCALING = "scaling"
    RECOVERING = "recovering"


@dataclass(frozen=True, slots=True)
class Hold:
    """A unit stands still on purpose, as its engine says. It is beside the verdict (see health.py).

    `said_at`: when the engine last said so; `ended_at`: when the hold ended (0: it lasts): from then on the
    unit has to show work before it gets requests.
    """

    kind: HoldKind
    since: float
    said_at: float
    ended_at: float = 0.0


# Nouns of what agents report of their nodes beside the state of processes, and what follows from it.


CALM_KEPT = 3
"""Reports of quiet times that are kept of each node: error counters are compared with the oldest."""


class RankPlace(NamedTuple):
    """Where a rank of a communicator runs. `host` is its address as NCCL knows it."""

    rank: int
    host: str
    pid: int


class Behind(NamedTuple):
    """A rank that has launched so many collectives of a kind, while another one has launched `most`."""

    place: RankPlace
    operation: str
    launched: int
    most: int


@dataclass(frozen=True, slots=True)
class Communicator:
    """One group of ranks, as NCCL's RAS service reports it.

    `launched` is the sum of all counts of all ranks. `missing` are ranks that do not answer RAS, and whether
    it considers them dead; `failed` are ranks with an error and its number.
    """

    id: str
    size: int
    launched: int = 0
    behind_count: int = 0
    behind: tuple[Behind, ...] = ()
    missing: tuple[tuple[RankPlace, bool], ...] = ()
    failed: tuple[tuple[RankPlace, int], ...] = ()

    @property
    def is_mostly_behind(self) -> bool:
        """More ranks are behind than in front."""
        return 2 * self.behind_count > self.size


AGENT = "agent"
"""The source of evidence from the agents of nodes."""


@dataclass(slots=True)
class UnitFacts:
    """What the nodes of a unit report, by node, and what was concluded from it; an empty text: nothing.

    `before` is the report before the last one. `mixed`: its nodes run different software. `odd`: it runs
    other software than units of its cell. `ranks`: what its ranks and their links say. `faults`: ranks that
    its engine says are not healthy.
    """

    nodes: dict[str, NodeFacts] = field(default_factory=dict)
    before: dict[str, NodeFacts] = field(default_factory=dict)
    mixed: str = ""
    odd: str = ""
    ranks: tuple[str, ...] = ()
    faults: tuple[RankFault, ...] = ()
    _calm: dict[str, deque[NodeFacts]] = field(default_factory=dict)

    def take(self, facts: NodeFacts) -> None:
        """A new report of a node."""
        if facts.node in self.nodes:
            self.before[facts.node] = self.nodes[facts.node]
        self.nodes[facts.node] = facts
        if not facts.is_of_ranks:
            self._calm.setdefault(facts.node, deque(maxlen=CALM_KEPT)).append(facts)

    def baseline(self, node: str) -> NodeFacts | None:
        """The report that error counters of a node are compared with; None: there is none."""
        calm = self._calm.get(node)
        return calm[0] if calm else None

    def node_of(self, host: str) -> str:
        """The node that has this address; the address itself where no agent has reported it."""
        return next((facts.node for facts in self.nodes.values() if host in facts.addresses), host)

    def forget(self) -> None:
        """Forget what was reported of the previous incarnation."""
        self.nodes.clear()
        self.before.clear()
        self._calm.clear()
        self.faults = ()


# The nouns of a split request: its prompt is computed by one unit, its answer by another.
#
# Strings and plain tuples, because workers get them over a socket.


ServingRole = Literal["both", "prefill", "decode"]
"""What a unit does for requests: all of it, only prompts for others, or whole requests and answers."""
Transfer = Literal["none", "nixl", "sglang"]
"""How KV blocks go from one unit of a cell to another; none: they do not."""


class SplitPlan(NamedTuple):
    """The plan of a request whose prompt `prefiller` computes for the unit of the lease.

    The prompt should be computed in `prefill_s`; then `tokens` of KV cache are to be moved. The first token
    should come `transfer_s` after the request was sent to the decoder; after `limit_s` without one the
    transfer counts as failed. `is_first`: nothing has gone over this link yet, and its engines have yet to
    connect, in which time the decoder may do nothing at all. `together`: both units get the request at the
    same time, and the decoder cannot compute a prompt. `may_wait`: the decoder may have no decode slot for it
    yet, or has prompts of its own to compute.
    """

    prefiller: str
    tokens: int
    prefill_s: float
    transfer_s: float
    limit_s: float
    is_first: bool = False
    together: bool = False
    may_wait: bool = False


class SplitStep(NamedTuple):
    """What became of one step of a split request, as it is reported.

    `kind` is one of STEPS; `seconds` is how long it took, where that is known.
    """

    kind: str
    prefiller: str
    decoder: str
    tokens: int = 0
    seconds: float = 0.0
    reason: str = ""


PREFILLED, LEG_LOST, TRANSFERRED, LINK_FAILED, UNFIT, ORPHANED, RELEASED = STEPS = (
    "prefilled",
    "prefill_lost",
    "transferred",
    "transfer_failed",
    "unfit",
    "orphaned",
    "released",
)
"""The prompt was computed; the prefiller failed; the decoder has sent its first token; the blocks did not
arrive; the request cannot be split; blocks were computed that nobody will fetch; those were released."""
UNCLAIMED_S = 30.0
"""Engines free blocks that nobody has fetched for this long (vLLM: kv_lease_duration)."""
