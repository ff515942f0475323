"""Where units are discovered, as it is configured: one value for each source. discovery/ follows them.

A value is its source: where equal ones are configured again, the source is the same and is followed on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from cellgate.router.nouns import FIXED, Unit

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class DnsSource:
    """Resolves `host` for `record` (A, AAAA, SRV); `like` has what all units have, `port` theirs (no SRV).

    `server` is the name server's HOST:PORT; empty: the system's.
    """

    kind: ClassVar[str] = "dns"
    gone_is_dead: ClassVar[bool] = False

    like: Unit
    host: str
    record: str = "A"
    port: int = 0
    scheme: str = "http"
    server: str = ""
    period_s: float = field(default=5.0, metadata=FIXED)

    @property
    def title(self) -> str:
        """The record and the name, and the port where that is ours to say."""
        return f"dns {self.record} {self.host}" + (f":{self.port}" if self.port else "")


@dataclass(frozen=True, slots=True)
class FileSource:
    """Looks at the file every `period_s`. Units get the cell of `like`, and its API key if they name none."""

    kind: ClassVar[str] = "file"
    gone_is_dead: ClassVar[bool] = False

    like: Unit
    path: str
    period_s: float = field(default=1.0, metadata=FIXED)

    @property
    def title(self) -> str:
        return f"file {self.path}"


@dataclass(frozen=True, slots=True)
class LwsSource:
    """Watches the pods of the set `name`. `like` has what all units have, `port` is the leaders' API.

    `namespace` empty: the gate's own. `agent_port` 0: there are no agents. `kubeconfig` empty: the pod's own
    service account, else the user's file. `places`: ask where the nodes of pods stand in the network.
    """

    kind: ClassVar[str] = "lws"
    gone_is_dead: ClassVar[bool] = True

    like: Unit
    name: str
    port: int
    namespace: str = ""
    agent_port: int = 0
    scheme: str = "http"
    kubeconfig: str = ""
    places: bool = False

    @property
    def title(self) -> str:
        return f"lws {self.namespace}/{self.name}" if self.namespace else f"lws {self.name}"


@dataclass(frozen=True, slots=True)
class PodsSource:
    """Watches the pods that `selector` names, or those of the InferencePool `pool`; each is a unit.

    `port` 0: that of the pool. The rest is as for LwsSource. A pod that has gone, or is not ready, gets no
    new requests; those that it has may end, if it lives.
    """

    kind: ClassVar[str] = "pods"
    gone_is_dead: ClassVar[bool] = False

    like: Unit
    selector: str = ""
    pool: str = ""
    port: int = 0
    namespace: str = ""
    scheme: str = "http"
    kubeconfig: str = ""
    places: bool = False

    @property
    def title(self) -> str:
        """The pool, or the labels."""
        what = f"pool {self.pool}" if self.pool else self.selector
        return f"pods {self.namespace}/{what}" if self.namespace else f"pods {what}"


@dataclass(frozen=True, slots=True)
class EcsSource:
    """Asks for the tasks of `cluster` every `period_s`: of these `services`, or of all (none named).

    `like` has what all units have, `port` is the leaders' API. `agent_port` 0: there are no agents.
    """

    kind: ClassVar[str] = "ecs"
    gone_is_dead: ClassVar[bool] = True

    like: Unit
    cluster: str
    port: int
    services: tuple[str, ...] = ()
    region: str = ""
    agent_port: int = 0
    scheme: str = "http"
    period_s: float = field(default=5.0, metadata=FIXED)

    @property
    def title(self) -> str:
        """The cluster, and which services."""
        return f"ecs {self.cluster}" + (f" {','.join(self.services)}" if self.services else "")


@dataclass(frozen=True, slots=True)
class RedisSource:
    """All units that other gates publish in Redis (docs/fleet.md). Where it is, there is no other."""

    kind: ClassVar[str] = "redis"
    gone_is_dead: ClassVar[bool] = False

    @property
    def title(self) -> str:
        return "redis"


SOURCES: dict[str, type[DnsSource | EcsSource | FileSource | LwsSource | PodsSource]] = {
    source.kind: source for source in (DnsSource, EcsSource, FileSource, LwsSource, PodsSource)
}
"""Those of one cell: `cells[].discover.from`."""
CLUSTER_SOURCES = ("ecs", "lws", "pods")
"""Those that an extra follows."""
PACKAGES: dict[str, tuple[str, str]] = {
    "dns": ("dns", "dns"),
    "lws": ("kubernetes_asyncio", "k8s"),
    "pods": ("kubernetes_asyncio", "k8s"),
    "ecs": ("boto3", "ecs"),
}
"""The module that a source needs beyond what is always there, and the extra that brings it."""


class Source(Protocol):
    """What is known of every source.

    `kind` is its name in a configuration and that of its evidence. `gone_is_dead`: a unit that is not found
    any more has no process left, so that requests there need not wait to find out.
    """

    kind: ClassVar[str]
    gone_is_dead: ClassVar[bool]

    @property
    def title(self) -> str:
        """Which one of its kind it is, in a few words for the log and for a metric's label."""
        ...
