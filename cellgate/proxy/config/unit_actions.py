"""What can be done to a unit as a whole, as it is configured: one value for each way. recovery/ does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

UNIT = "{unit}"
"""Stands for the name of the unit in words of a configuration."""


@dataclass(frozen=True, slots=True)
class RunCommand:
    """A program with its arguments."""

    kind: ClassVar[str] = "command"
    words: tuple[str, ...]

    def in_words(self) -> str:
        """For people."""
        return " ".join(self.words)

    def audited(self) -> object:
        """For the audit log."""
        return list(self.words)


@dataclass(frozen=True, slots=True)
class CallWebhook:
    """A signed POST to `url`."""

    kind: ClassVar[str] = "webhook"
    url: str
    secret: str = field(default="", repr=False)

    def in_words(self) -> str:
        """For people."""
        return self.url

    def audited(self) -> object:
        """For the audit log."""
        return self.url


@dataclass(frozen=True, slots=True)
class ReplacePods:
    """All pods of the unit go, by the eviction API or (`evict` off) by deletion; their owner makes new ones.

    `selector` chooses them by labels, with {unit} for the unit's name; empty: the unit is a group of a
    LeaderWorkerSet, SET-INDEX. `namespace` empty: the gate's own. `kubeconfig` empty: the pod's own service
    account, else the user's file.
    """

    kind: ClassVar[str] = "kubernetes"
    namespace: str = ""
    selector: str = ""
    evict: bool = True
    kubeconfig: str = ""

    def in_words(self) -> str:
        """For people."""
        return f"{'evict' if self.evict else 'delete'} its pods"

    def audited(self) -> object:
        """For the audit log."""
        return {"namespace": self.namespace, "selector": self.selector, "evict": self.evict}


@dataclass(frozen=True, slots=True)
class SetImage:
    """The group of a LeaderWorkerSet that the unit is named after, SET-INDEX, gets another image.

    `container` empty: the engine's. `namespace`, `kubeconfig` as in ReplacePods.
    """

    kind: ClassVar[str] = "kubernetes"
    image: str
    namespace: str = ""
    container: str = ""
    kubeconfig: str = ""

    def in_words(self) -> str:
        """For people."""
        return f"set image {self.image}"

    def audited(self) -> object:
        """For the audit log."""
        return {"namespace": self.namespace, "image": self.image}


@dataclass(frozen=True, slots=True)
class ReplaceTasks:
    """All ECS tasks of the unit are stopped, their services start new ones; or (`deploy`) these services get
    the newest revision of their task definitions.

    The tasks are those of `cluster` with the tag `cellgate:unit`, of these `services` or of all (none named).
    `region` empty: as boto3 finds it.
    """

    kind: ClassVar[str] = "ecs"
    cluster: str
    services: tuple[str, ...] = ()
    region: str = ""
    deploy: bool = False

    def in_words(self) -> str:
        """For people."""
        return f"{'deploy its services' if self.deploy else 'stop its tasks'} in cluster {self.cluster}"

    def audited(self) -> object:
        """For the audit log."""
        return {"cluster": self.cluster, "region": self.region, "deploy": self.deploy}


@dataclass(frozen=True, slots=True)
class RestartService:
    """`systemctl restart` of a service of this machine; {unit} stands for the unit's name."""

    kind: ClassVar[str] = "systemd"
    service: str

    def in_words(self) -> str:
        """For people."""
        return f"restart {self.service}"

    def audited(self) -> object:
        """For the audit log."""
        return self.service

    def command(self, unit: str) -> RunCommand:
        """What is run. It need not wait: the gate sees for itself whether the unit comes back."""
        service = self.service.replace(UNIT, unit)
        return RunCommand(("systemctl", "--no-ask-password", "--no-block", "restart", "--", service))


UnitAction = RunCommand | CallWebhook | ReplacePods | SetImage | ReplaceTasks | RestartService

ACTION_PACKAGES: Mapping[str, tuple[str, str]] = {
    "kubernetes": ("kubernetes_asyncio", "k8s"),
    "ecs": ("boto3", "ecs"),
}
"""The module that a kind needs beyond what is always there, and the extra that brings it."""
