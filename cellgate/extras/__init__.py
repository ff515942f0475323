"""The extras: what a gate can do without, a folder (or a file) each, and the table by which they are found.

The core imports none of them: it asks here for a part, by name, when it is wanted. To take an extra out,
delete its folder and its row. What asks for it then (a key, a command, a request) gets one line that says so.

In this order: `Extra`, `require`, `part_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Literal, NamedTuple, get_args

ExtraName = Literal[
    "agent",
    "answers",
    "clusters",
    "completion",
    "demo",
    "guardrail",
    "kv_events",
    "node_probes",
    "operator",
    "otlp",
    "planner",
    "realtime",
    "redis",
    "scaling",
    "top",
    "web_tokens",
    "workers",
]


class Extra(NamedTuple):
    """A row. `parts` are what the core asks for, and the module of each below this folder. Each gate has an
    extra with the part `plane`: its `attend` is called with the control plane.

    `settings` are the keys of the configuration that ask for it; `commands` what each does, its module below
    `cellgate`, and its verb there, if any; `routes` what it answers on the admin port, and `off` what is said
    there where it is not configured.
    """

    does: str
    parts: Mapping[str, str] = {}
    settings: tuple[str, ...] = ()
    commands: Mapping[str, tuple[str, str, str]] = {}
    routes: Mapping[str, str] = {}
    off: str = ""


EXTRAS: dict[str, Extra] = {
    "agent": Extra(
        "runs on each node of a unit, and tells gates what becomes of its processes",
        commands={"agent": ("watch the processes of one node of a unit", "extras.agent", "")},
    ),
    "answers": Extra(
        "takes out units that answer wrongly, by what they say to a known prompt",
        parts={"plane": "answers.answer_check", "probe": "answers.known_answer"},
    ),
    "clusters": Extra(
        "finds units in Kubernetes and in Amazon ECS",
        parts={"ecs": "clusters.ecs", "lws": "clusters.lws", "pods": "clusters.pods"},
        settings=("cells[].discover",),
    ),
    "completion": Extra(
        "completes commands and flags in a shell",
        commands={"completion": ("print the completions for a shell", "extras.completion", "completion")},
    ),
    "demo": Extra(
        "runs a gate with simulated units, to try it",
        commands={"demo": ("run a gate with simulated units, to try it", "extras.demo.demo", "")},
    ),
    "guardrail": Extra(
        "has a program of the operator's check requests and answers",
        parts={"guard": "guardrail.guardrail"},
        settings=("guardrail",),
    ),
    "kv_events": Extra(
        "follows what units publish of their KV caches",
        parts={"start": "kv_events.follow"},
        settings=("cells[].units[].kv_events",),
    ),
    "node_probes": Extra(
        "probes nodes by gRPC, and by the page of an exporter",
        parts={"exporter": "node_probes.exporter", "grpc": "node_probes.grpc_health"},
        settings=("cells[].units[].nodes[].probes[].probe",),
    ),
    "operator": Extra(
        "restarts units that stay DOWN, rolls out new software, sets a weight at a load balancer of AWS",
        parts={"start": "operator.start", "keys": "operator.operator_keys"},
        settings=("operator",),
        commands={
            "roll": (
                "bring new software to all units, cell by cell, and back",
                "extras.operator.roll_command",
                "roll",
            )
        },
        routes={"/roll": "GET", "/roll/{name}": "POST"},
        off="no roll is configured at this gate: `roll` in the operator's file has its command "
        "(docs/rolling.md)",
    ),
    "otlp": Extra(
        "sends spans of requests, and metrics, to a collector of OpenTelemetry",
        parts={"send": "otlp"},
        settings=("tracing", "otlp_metrics"),
    ),
    "planner": Extra(
        "computes how much of a model fits into a unit, and which free nodes should be units",
        commands={
            "plan": (
                "compute how much of a model fits into a unit, or propose units from free nodes",
                "extras.planner.plan_command",
                "plan",
            )
        },
    ),
    "realtime": Extra(
        "passes WebSockets of clients on to units", parts={"session": "realtime"}, settings=("realtime",)
    ),
    "redis": Extra(
        "shares between gates what each of them sees, through Redis; serves as the router of a fleet",
        parts={"link": "redis.link", "connect": "redis_client.connect"},
        settings=("redis",),
    ),
    "scaling": Extra(
        "tells autoscalers how many units there should be, and which is missed least",
        parts={"plane": "scaling.scaling_pages"},
        routes={"/scaling": "GET", "/scaling/drain": "POST"},
    ),
    "top": Extra(
        "draws the status page in a terminal",
        commands={"top": ("watch the units of a running gate, problems first", "extras.top", "top")},
    ),
    "web_tokens": Extra(
        "takes JSON Web Tokens in place of keys", parts={"tokens": "web_tokens"}, settings=("keys.jwt",)
    ),
    "workers": Extra(
        "runs a gate in several processes",
        parts={"supervisor": "workers.supervisor"},
        settings=("workers",),
    ),
}


class MissingExtraError(ValueError):
    """What is asked for needs an extra that this gate is without."""

    def __init__(self, name: str) -> None:
        super().__init__(f"needs the extra {name}, and this gate is without it (docs/architecture.md#extras)")


def require(name: ExtraName) -> None:
    """Raises MissingExtraError if the extra is not here."""
    if name not in EXTRAS:
        raise MissingExtraError(name)


def part_of(name: ExtraName, what: str) -> ModuleType:
    """The module of an extra's part. Raises MissingExtraError."""
    require(name)
    return import_module(f"{__name__}.{EXTRAS[name].parts[what]}")


def attending() -> list[ExtraName]:
    """The extras that each gate has, whatever its configuration says."""
    return [name for name in get_args(ExtraName) if name in EXTRAS and "plane" in EXTRAS[name].parts]


def taken_out() -> list[str]:
    """The extras that this gate is without."""
    return [name for name in get_args(ExtraName) if name not in EXTRAS]
