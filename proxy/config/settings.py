"""The settings of a running gate: the result of configuration, immutable, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cellgate.proxy.config.remedy import Remedy
from cellgate.proxy.config.sources import Source
from cellgate.router.fair_queue import FairRules
from cellgate.router.known_answers import KnownAnswerRules
from cellgate.router.nouns import Fleet, Rules

KIB = 1024
MIB = 1024 * KIB

LogFormat = Literal["console", "json", "off"]
PerUnit = Literal["counters", "histograms"]
REDIS_PREFIX = "cellgate:"
TICK_S = 0.25
"""The period of the gate's one timer, which checks all deadlines."""


@dataclass(frozen=True, slots=True)
class Address:
    """A place to listen on. Port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what a client may ask of the gate.

    head_bytes (64 KiB), body_bytes (64 MiB); bodies_bytes (a quarter of memory) is for all bodies together.
    head_timeout_s (10): from the first byte of a head to its end. body_timeout_s (30): for a whole body,
    plus a second for each 64 KiB received. idle_timeout_s (75): a kept-alive connection without a request;
    longer than the idle timeout of the load balancer in front, or it would race with our close.
    """

    head_bytes: int = 64 * KIB
    body_bytes: int = 64 * MIB
    bodies_bytes: int = 1024 * MIB
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the gate waits for units.

    connect_s (3); head_hold_s (10): after it the client of a stream gets a head and comments while the
    request stays re-dispatchable; answer_s (600): from dispatch to commit, the last resort behind the judge;
    drain_delay_s (5): how long a stopping gate goes on accepting; drain_s (300): how long streams may finish;
    handover_s (30): how long a successor may take until it accepts clients.
    """

    connect_s: float = 3.0
    head_hold_s: float = 10.0
    answer_s: float = 600.0
    drain_delay_s: float = 5.0
    drain_s: float = 300.0
    handover_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificate files, PEM. `cert`/`key` serve clients; `ca` verifies units.

    `unit_cert`/`unit_key` show the units who we are.
    """

    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    unit_cert: str | None = None
    unit_key: str | None = None


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """Where Redis is, and as whom the gate comes there. `prefix` begins each key and channel.

    `url` is as the operator wrote it, good or not: what is none must not keep a gate from serving.
    """

    url: str = field(repr=False)
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    prefix: str = REDIS_PREFIX


@dataclass(frozen=True, slots=True)
class HeaderNames:
    """Names of the header lines that route a request, in lower case.

    session (x-session-id): requests with the same value go to the same unit, with policy `session`.
    tenant (x-gateway-inference-fairness-id): who shares the queue fairly with whom; without it, the
    credentials tell. priority (x-priority): an integer, lower goes first.
    """

    session: str = "x-session-id"
    tenant: str = "x-gateway-inference-fairness-id"
    priority: str = "x-priority"


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """Where spans are sent by OTLP; of which share of requests, where clients do not say (1: all)."""

    endpoint: str
    sample_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Poison:
    """The rules for prompts that end units.

    ban_s (600): how long a prompt is refused that has ended two or three; 0: not at all.
    """

    ban_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a gate; `fleet` and `remedies` may be replaced while it runs (SIGHUP).

    `advertise` is the URL at which other gates reach this one (empty: where it listens).
    `sources` are what more units are discovered from, also anew by SIGHUP.
    `agent_check` is where HAProxy's agent checks are answered (None: nowhere); `trusted` are the networks
    whose word counts there, beside this machine's. `remedies`, by cell, are for units that stay DOWN.
    `admin_token` is what callers of the admin port show, `agent_token` what the gate shows to agents.
    """

    fleet: Fleet
    workers: int = 1
    """The number of processes that serve clients; with more than one there is also a control process."""
    listen: Address = Address("127.0.0.1", 8000)
    admin: Address = Address("127.0.0.1", 9901)
    sources: tuple[Source, ...] = ()
    agent_check: Address | None = None
    trusted: tuple[str, ...] = ()
    remedies: Mapping[str, Remedy] = field(default_factory=dict)
    redis: RedisAccess | None = None
    advertise: str = ""
    admin_token: str | None = field(default=None, repr=False)
    agent_token: str | None = field(default=None, repr=False)
    policy: str = "prefix_affinity"
    rules: Rules = field(default_factory=Rules)
    queue: FairRules = field(default_factory=FairRules)
    headers: HeaderNames = HeaderNames()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    tls: Tls = Tls()
    poison: Poison = Poison()
    access_log: LogFormat = "json"
    tracing: TracingSettings | None = None
    pool_metrics: bool = False
    """Whether /metrics also shows the gate as one engine."""
    per_unit_metrics: PerUnit = "counters"
    """What /metrics shows of the latencies of each unit: count and sum, or whole histograms."""
    pass_unlisted: bool = False
    no_continuation: tuple[str, ...] = ()
    """Models of which a broken stream is not continued by another unit; `*` stands for all."""
    continue_across_builds: bool = False
    """Whether a unit of another build may continue a broken stream."""
    known_answer: KnownAnswerRules = field(default_factory=KnownAnswerRules)


Reload = Callable[[], Settings]
"""Reads the configuration anew. Raises ConfigError."""
