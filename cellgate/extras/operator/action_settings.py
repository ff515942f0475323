"""What can be done to a unit as a whole, as it is configured: run a command, call a webhook, replace its pods
... extras/operator does it.

In this order: `ReplacePods`, `Remedy`, `RollPolicy`, `AlbTarget`.
"""

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


# What is done about the units of a cell that stay DOWN, as it is configured. recovery/ does it.


BACKOFF_MAX_S = 3600.0


@dataclass(frozen=True, slots=True)
class Remedy:
    """What is done about the units of one cell that stay DOWN.

    `audit` is the file that gets a line for all that is done.
    after_s (60): so long a unit is DOWN first; timeout_s (30): what takes longer is killed.
    max_parallel (1), max_share (0.5): so many units, and so large a share of the cell, at one time; one
    unit is always allowed. attempts (3): then the gate gives up.
    backoff_s (600): how long a unit is given to come back, doubled with each attempt. `dry_run` (off): all
    but the act.
    """

    audit: str
    action: UnitAction
    after_s: float = 60.0
    timeout_s: float = 30.0
    max_parallel: int = 1
    max_share: float = 0.5
    attempts: int = 3
    backoff_s: float = 600.0
    dry_run: bool = False

    def patience_s(self, tries: int) -> float:
        """How long a unit is given to come back after so many attempts; after none, as after the first."""
        return min(self.backoff_s * 2.0 ** max(0, tries - 1), max(self.backoff_s, BACKOFF_MAX_S))

    def has_room(self, busy: int, units: int) -> bool:
        """Whether one more unit of a cell of so many may be recovered, when `busy` of them are."""
        return busy < self.max_parallel and (busy == 0 or busy + 1 <= self.max_share * units)


@dataclass(frozen=True, slots=True)
class LeasePlace:
    """Where gates without Redis agree on who acts: a namespace of Kubernetes (empty: the gate's own).

    `kubeconfig` empty: the account of the gate's pod, else the user's file.
    """

    namespace: str = ""
    kubeconfig: str = ""


# How units get new software, as it is configured. rolling/ does it.


@dataclass(frozen=True, slots=True)
class RollPolicy:
    """How units get new software: an action for each, and the bounds of a roll.

    `action` brings the new software to a unit, `undo` (none) the old one back; `audit` is the file that gets
    a line for all that is done. timeout_s (30): an action that takes longer is given up.
    parallel (1): so many units of a cell at one time; max_unavailable (1): no unit is begun when more than so
    many would be out of rotation, for whatever reason. drain_s (60): how long requests of a unit may finish
    before its command. start_s (600): how long a unit may take until it is UP again. soak_s (60): how long it
    is watched with requests before the next one.
    max_errors (0.5), max_degraded (0.3): a unit with a larger recent share of failed requests (one is 0.5,
    two in a row are 0.75), or slower than its cell by more, fails the roll.
    """

    action: UnitAction
    audit: str
    undo: UnitAction | None = None
    timeout_s: float = 30.0
    parallel: int = 1
    max_unavailable: int = 1
    drain_s: float = 60.0
    start_s: float = 600.0
    soak_s: float = 60.0
    max_errors: float = 0.5
    max_degraded: float = 0.3

    @property
    def highest_first(self) -> bool:
        """Whether units have to be taken by their numbers, from the highest down, undone ones as well."""
        return isinstance(self.action, SetImage)


# The weight of a target group at AWS's Application Load Balancer, as it is configured.


@dataclass(frozen=True, slots=True)
class AlbTarget:
    """The target group of this gate in a rule of a load balancer, both by ARN.

    `rule` is one of a listener, or a listener, for its default action. weight (100): what the group has while
    all units are usable. `region` empty: as boto3 finds it.
    """

    rule: str
    target_group: str
    weight: int = 100
    region: str = ""
