"""The settings of a running gate, its addresses, limits and timeouts: the result of configuration, immutable,
in seconds and bytes.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from hashlib import sha256
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Literal

from cellgate.proxy.config.sources import Source
from cellgate.router.known_answers import KnownAnswerRules
from cellgate.router.nouns import FIXED, Fleet, Rules, Unit
from cellgate.router.queue import FairRules

KIB = 1024
MIB = 1024 * KIB

LogFormat = Literal["console", "json", "off"]
GuardrailAnswer = Literal["off", "whole", "windows"]
GuardrailFail = Literal["open", "closed"]
ShownTo = Literal["trusted", "all"]
Split = tuple[tuple[str, float], ...]
"""The models that serve a name, each with its weight, in the order of the configuration."""
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

    head_bytes: int = field(default=64 * KIB, metadata=FIXED)
    body_bytes: int = 64 * MIB
    bodies_bytes: int = 1024 * MIB
    head_timeout_s: float = field(default=10.0, metadata=FIXED)
    body_timeout_s: float = field(default=30.0, metadata=FIXED)
    idle_timeout_s: float = 75.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the gate waits for units.

    connect_s (3); head_hold_s (10): after it the client of a stream gets a head and comments while the
    request stays re-dispatchable; answer_s (600): from dispatch to commit, the last resort behind the judge;
    drain_delay_s (5): how long a stopping gate goes on accepting; drain_s (300): how long streams may finish.
    """

    connect_s: float = 3.0
    head_hold_s: float = field(default=10.0, metadata=FIXED)
    answer_s: float = 600.0
    drain_delay_s: float = 5.0
    drain_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificate files, PEM. `cert`/`key` serve clients; `ca` verifies units.

    `unit_cert`/`unit_key` show the units who we are. `admin_cert`/`admin_key` serve the admin port, whose
    callers may show a certificate of `admin_client_ca` instead of the token.
    """

    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    unit_cert: str | None = None
    unit_key: str | None = None
    admin_cert: str | None = None
    admin_key: str | None = None
    admin_client_ca: str | None = None


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

    sessions: who belongs together; of those that a request has the first of this list counts. A sub-agent
    has its own session in some clients and names the one above it, so that comes first: a session and its
    sub-agents are one. tenant (x-gateway-inference-fairness-id): who shares the queue fairly with whom;
    without it, the credentials tell. priority (x-priority): an integer, lower goes first.
    """

    sessions: tuple[str, ...] = (
        *("x-parent-session-id", "x-claude-code-session-id", "session-id"),
        *("x-session-affinity", "x-opencode-session", "x-session-id"),
    )
    tenant: str = "x-gateway-inference-fairness-id"
    priority: str = "x-priority"


@dataclass(frozen=True, slots=True)
class Cors:
    """Pages of these origins may use the gate in a browser (`*`: any)."""

    origins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GuardrailSettings:
    """A program that allows, denies or changes requests, and allows or denies answers.

    url is http://HOST:PORT/PATH or unix:///PATH. request (true): it sees requests. answer (off): it sees
    answers, `whole` or in `windows` of window_bytes (2 KiB) of text, or window_s (0.5). timeout_s (1): how
    long a verdict may take; without one, `fail` (closed) refuses the request, or (open) lets it through.
    """

    url: str
    request: bool = True
    answer: GuardrailAnswer = "off"
    window_bytes: int = field(default=2 * KIB, metadata=FIXED)
    window_s: float = field(default=0.5, metadata=FIXED)
    timeout_s: float = 1.0
    fail: GuardrailFail = "closed"

    @property
    def target(self) -> str:
        """The path that is asked."""
        return "/" if self.url.startswith("unix:") else "/" + self.url.split("/", 3)[3]


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """Where spans are sent by OTLP; of which share of requests, where clients do not say (1: all)."""

    endpoint: str
    sample_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class JwtSettings:
    """Which JWTs are keys as well: of this issuer, for this audience, signed by a key of the set at
    `jwks_url`. The claim `tenant_claim` names a tenant of the file of keys.
    """

    issuer: str
    audience: str
    jwks_url: str
    tenant_claim: str = "tenant"


OnRevoke = Literal["finish", "end"]


@dataclass(frozen=True, slots=True)
class KeySettings:
    """The file of keys (key_file.py), and what becomes of requests in flight whose key is revoked."""

    file: str
    on_revoke: OnRevoke = "finish"
    jwt: JwtSettings | None = None


@dataclass(frozen=True, slots=True)
class Poison:
    """The rules for prompts that end units.

    ban_s (600): how long a prompt is refused that has ended two or three; 0: not at all.
    """

    ban_s: float = 600.0


BY_UNITS = {"reload": "units"}
BY_REQUESTS = {"reload": "requests"}
"""The marks of settings that a reload replaces: in the control plane, and where requests are."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a gate; some may be replaced while it runs (`after_reload`).

    `advertise` is the URL at which other gates reach this one (empty: where it listens).
    `sources` are what more units are discovered from, at SIGHUP again.
    `agent_check` is where HAProxy's agent checks are answered (None: nowhere); `trusted` are the networks
    whose word counts there, beside this machine's. `remedies`, by cell, are for units that stay DOWN; they,
    `alb`, `leases` and `roll` are of the extra `operator`.
    `admin_token` is what callers of the admin port show, `agent_token` what the gate shows to agents.
    `secret_files` hold tokens and keys: the configuration is read again when one changes.
    """

    fleet: Fleet = field(metadata=BY_UNITS)
    workers: int = 1
    """The number of processes that serve clients; with more than one there is also a control process."""
    listen: Address = Address("127.0.0.1", 8000)
    admin: Address = Address("127.0.0.1", 9901)
    sources: tuple[Source, ...] = field(default=(), metadata=BY_UNITS)
    agent_check: Address | None = None
    alb: Any = None
    """The target group whose weight the gate sets at a load balancer of AWS; None: none."""
    trusted: tuple[str, ...] = ()
    remedies: Mapping[str, Any] = field(default_factory=dict, metadata=BY_UNITS)
    redis: RedisAccess | None = None
    leases: Any = None
    """Where gates without Redis agree on who recovers units; None: nowhere."""
    advertise: str = ""
    admin_token: str | None = field(default=None, repr=False, metadata=BY_REQUESTS)
    agent_token: str | None = field(default=None, repr=False)
    fleet_secret: str | None = field(default=None, repr=False)
    """Signs what gates say in Redis; what is not signed by it is not believed. None: see `secret_of`."""
    secret_files: tuple[str, ...] = field(default=(), metadata=BY_UNITS)
    policy: str = "prefix_affinity"
    rules: Rules = field(default_factory=Rules)
    queue: FairRules = field(default_factory=FairRules)
    headers: HeaderNames = HeaderNames()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    tls: Tls = field(default=Tls(), metadata=BY_REQUESTS)
    poison: Poison = Poison()
    roll: Any = None
    access_log: LogFormat = "json"
    keys: KeySettings | None = None
    """Without them everyone may come in, and there are no limits."""
    usage_log: str | None = None
    """The file that gets a line for each request of a key."""
    tracing: TracingSettings | None = None
    otlp_metrics: str | None = None
    """Where metrics are sent by OTLP."""
    guardrail: GuardrailSettings | None = None
    realtime: bool = False
    """Whether clients may have WebSockets to units."""
    cors: Cors | None = field(default=None, metadata=BY_REQUESTS)
    internal_headers: ShownTo = "trusted"
    """Who gets the header lines that tell which unit answered and how busy the gate is."""
    pass_unlisted: bool = False
    models: Mapping[str, Split] = field(default_factory=dict, metadata=BY_REQUESTS)
    """Names of the gate's own, and the models that serve them."""
    fallback: Mapping[str, tuple[str, ...]] = field(default_factory=dict, metadata=BY_REQUESTS)
    """The names to try, in order, when no unit can serve a name."""
    no_continuation: tuple[str, ...] = ()
    """Models of which a broken stream is not continued by another unit; `*` stands for all."""
    continue_across_builds: bool = False
    """Whether a unit of another build may continue a broken stream."""
    known_answer: KnownAnswerRules = field(default_factory=KnownAnswerRules)

    @property
    def has_operator(self) -> bool:
        """Whether the gate acts on units, or on a load balancer, by itself."""
        return bool(self.remedies or self.roll or self.alb or self.leases)


OF_UNITS = tuple(each.name for each in fields(Settings) if each.metadata == BY_UNITS)
"""What a reload replaces in the control plane."""
OF_REQUESTS = tuple(each.name for each in fields(Settings) if each.metadata == BY_REQUESTS)
"""What it replaces where requests are, in each worker."""


def after_reload(running: Settings, fresh: Settings) -> Settings:
    """The settings of a running gate, with what a reload may replace from those that were read again."""
    return replace(running, **{name: getattr(fresh, name) for name in (*OF_UNITS, *OF_REQUESTS)})


def changes_of_reload(running: Settings, fresh: Settings) -> str:
    """What a reload changes beside units, and what it leaves until a new process; empty: nothing."""
    others = [
        each.name for each in fields(Settings) if getattr(running, each.name) != getattr(fresh, each.name)
    ]
    taken = [name for name in others if name in OF_REQUESTS]
    left = [name for name in others if name not in (*OF_REQUESTS, *OF_UNITS)]
    said = [f"{', '.join(taken)} changed"] if taken else []
    if left:
        said.append(
            f"NOT taken: {', '.join(left)}: only a new process does that (kill -USR2; docs/restart.md)"
        )
    return "; ".join(said)


def changes_of_unit(before: Unit, after: Unit) -> str:
    """What of a unit is configured otherwise now, for a person; empty: nothing. Never a key."""
    changed = [each.name for each in fields(Unit) if getattr(before, each.name) != getattr(after, each.name)]
    shown = (
        f"{name} {getattr(before, name)} -> {getattr(after, name)}" if name in _NUMBERS else name
        for name in changed
    )
    return f"{after.name}: {', '.join(shown)}" if changed else ""


_NUMBERS = ("max_in_flight", "weight", "cell", "role")


Reload = Callable[[], Settings]
"""Reads the configuration again. Raises ConfigError."""
KV_EVENTS_ENGINES = ("vllm", "sglang")
KV_EVENTS_PACKAGES = ("zmq", "msgpack")
"""The modules that KV events need, of the extra `kv-events`."""
SECRET_VARIABLE = "CELLGATE_WEBHOOK_SECRET"
"""What signs the webhooks of the operator's file."""


# Trusted peers: this machine, the networks that the configuration names, callers with the token. Pure.


Network = IPv4Network | IPv6Network
PEERS_KEPT = 4096
"""So many addresses are remembered, with whether they are trusted."""


class Peers:
    """Trusts loopback and `networks` (10.0.0.0/8, 2001:db8::/32, or a single address).

    Raises ValueError for what is no network, or has bits beyond its mask.
    """

    def __init__(self, networks: Iterable[str] = ()) -> None:
        self._networks: list[Network] = [ip_network(network) for network in networks]
        self.trusts = lru_cache(maxsize=PEERS_KEPT)(self._trusts)
        """Whether an address (no port) is trusted. What is no address is not. To read one takes half as long
        as to accept its connection.
        """

    def _trusts(self, peer: str) -> bool:
        try:
            address = ip_address(peer.partition("%")[0])
        except ValueError:
            return False
        # A socket that speaks both families shows an IPv4 peer like this.
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return address.is_loopback or any(address in network for network in self._networks)


def secret_of(settings: Settings) -> bytes:
    """What the gates of a fleet share: their secret, else one made of the admin token; empty: neither."""
    if settings.fleet_secret is not None:
        return settings.fleet_secret.encode()
    token = settings.admin_token
    return b"" if token is None else hmac.digest(_hash_of(token), b"cellgate fleet", "sha256")


def gates_token(secret: bytes, url: str) -> str:
    """What a router shows to the gate at a URL: good for naming a unit there, and nowhere else."""
    return hmac.new(secret, b"x-cellgate-unit " + url.encode(), "sha256").hexdigest()


def payer_at(peer: str, forwarded_for: str, peers: Peers) -> str:
    """The address that pays for what came from a peer: its own, or if it is trusted, the last one that it
    says it speaks for and that is not trusted itself. Of IPv6 the network of a customer (/64).
    """
    chain = [each.strip() for each in forwarded_for.split(",")] if forwarded_for else []
    address = peer
    while chain and peers.trusts(address):
        if not is_address(said := chain.pop()):
            break
        address = said
    return _customer(address)


def is_address(text: str) -> bool:
    """Whether this is an IP address, and no name."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _customer(text: str) -> str:
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return text
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return str(ip_network((address, 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


HASHED = "sha256:"
"""Before a hash in hex, in place of a token: who has the hash knows no token."""


def is_token(given: bytes, token: str) -> bool:
    """Whether this is the token, or the one of which `token` is the hash; compared in constant time."""
    return hmac.compare_digest(_hashed(given.strip()), _hash_of(token))


def _hash_of(token: str) -> bytes:
    return token.removeprefix(HASHED).encode() if token.startswith(HASHED) else _hashed(token.encode())


def _hashed(token: bytes) -> bytes:
    return sha256(token).hexdigest().encode()
