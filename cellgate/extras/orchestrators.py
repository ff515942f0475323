"""The APIs of what runs units, Kubernetes and Amazon: how one is connected, and refusals; no decisions.

Tags of each task, from its service or its definition: `cellgate:unit` (the unit's name), `cellgate:role`
(leader or follower), `cellgate:size` (how many tasks make the unit), `cellgate:serves` (prefill, decode or
both; optional).
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from cellgate.router.nouns import Place

ApiObject = dict[str, Any]
ApiVerb = Literal["get", "list", "create", "update", "patch", "delete"]

REQUEST_S = 10.0
FORBIDDEN, NOT_FOUND, CONFLICT, GONE, TOO_MANY = 403, 404, 409, 410, 429
_METHODS: Mapping[ApiVerb, str] = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
}
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_ORCHESTRATOR_REASON_MAX = 300


@asynccontextmanager
async def connected(kubeconfig: str) -> AsyncIterator[Any]:
    """A client of kubernetes_asyncio. `kubeconfig` empty: what this pod was given, else the user's file.

    Raises ApiError when there is no way to the server.
    """
    # Imported late and in a thread: it takes half a second.
    client: Any = await asyncio.to_thread(importlib.import_module, "kubernetes_asyncio.client")
    config: Any = importlib.import_module("kubernetes_asyncio.config")
    settings = client.Configuration()
    try:
        if not kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=settings)
        else:
            await config.load_kube_config(config_file=kubeconfig or None, client_configuration=settings)
    except Exception as error:  # A file that is no kubeconfig makes the loader fail in many ways.
        raise ApiError(f"no way to the API server is configured: {error!r}") from None
    async with client.ApiClient(settings) as connection:
        yield connection


class Resource(NamedTuple):
    """A kind of objects, as rules of a Role and paths of the API name it. `group` is empty for the core."""

    plural: str
    group: str = ""
    version: str = "v1"


PODS, NODES, EVENTS = Resource("pods"), Resource("nodes"), Resource("events")
LEASES = Resource("leases", "coordination.k8s.io")
SETS = Resource("leaderworkersets", "leaderworkerset.x-k8s.io")
LWS_LABELS = "leaderworkerset.sigs.k8s.io/"
"""What labels of a LeaderWorkerSet's pods begin with."""


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request. `namespace` is empty for objects of the whole cluster."""

    verb: ApiVerb
    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    body: ApiObject | None = None

    @property
    def path(self) -> str:
        """Where it goes ("Kubernetes API Concepts", resource URIs)."""
        root = f"/apis/{self.resource.group}" if self.resource.group else "/api"
        parts = [root, self.resource.version]
        parts += ["namespaces", self.namespace] if self.namespace else []
        parts += [part for part in (self.resource.plural, self.name, self.subresource) if part]
        return "/".join(parts)

    @property
    def rule(self) -> str:
        """The rule of a Role that allows it, as YAML."""
        what = self.resource.plural + (f"/{self.subresource}" if self.subresource else "")
        return f'{{apiGroups: ["{self.resource.group}"], resources: [{what}], verbs: [{self.verb}]}}'


class ApiError(Exception):
    """A call failed; its text is one line. `status` is that of the answer, 0 without one."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


def own_namespace() -> str:
    """The namespace of the pod that this runs in, else `default`."""
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError:
        return "default"


async def ask(connection: Any, call: ApiCall) -> ApiObject:
    """The answer to a call. Raises ApiError."""
    import aiohttp  # Imported late: who asks Amazon alone does without its 10 MB.

    headers = {"Accept": "application/json"}
    if call.verb == "patch":
        headers["Content-Type"] = "application/merge-patch+json"
    try:
        response = await connection.call_api(
            call.path,
            _METHODS[call.verb],
            query_params=list(call.query.items()),
            header_params=headers,
            body=call.body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=(REQUEST_S, REQUEST_S),
        )
        text = await response.read()
        answer = orjson.loads(text) if text else {}
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise ApiError(f"the API server cannot be reached: {error!r}") from None
    if response.status >= 400:
        raise ApiError(_refusal(call, response.status, answer), response.status)
    return dict(answer)


def _refusal(call: ApiCall, status: int, answer: Any) -> str:
    """What a refusal means ("Status" objects of the API)."""
    if status == FORBIDDEN:
        where = f"in namespace {call.namespace}" if call.namespace else "in the cluster"
        return f"the gate's account lacks a right {where}: add the rule {call.rule} to its role"
    reported = answer if isinstance(answer, dict) else {}
    causes = reported.get("details", {}).get("causes", [])
    text = " ".join([str(reported.get("message", "")), *(str(each.get("message", "")) for each in causes)])
    return f"the API server refuses: {status} {' '.join(text.split())[:_ORCHESTRATOR_REASON_MAX]}".rstrip()


# Amazon's APIs: a client of boto3, and what is wrong in one line.
#
# boto3 blocks, so it runs in a thread. It reads credentials, and the region where none is given, as it always
# does.


class Service(NamedTuple):
    """One API: what people call it, what boto3 does, and what policies do."""

    spoken: str
    name: str
    policy: str


ECS = Service("ECS", "ecs", "ecs")
ELB = Service("the load balancer's API", "elbv2", "elasticloadbalancing")
_DENIED = ("AccessDeniedException", "AccessDenied")


class AwsError(Exception):
    """A call failed; its text is one line."""


def client(service: Service, region: str) -> Any:
    """A client. Raises AwsError."""
    boto3: Any = importlib.import_module("boto3")
    config: Any = importlib.import_module("botocore.config")
    limits = config.Config(connect_timeout=3, read_timeout=5, retries={"total_max_attempts": 2})
    with said_plainly(service):
        return boto3.session.Session(region_name=region or None).client(service.name, config=limits)


@contextmanager
def said_plainly(service: Service) -> Iterator[None]:
    """Turns what boto3 raises into AwsError; what was denied is named as policies name it."""
    errors: Any = importlib.import_module("botocore.exceptions")
    try:
        yield
    except errors.ClientError as error:
        text = " ".join(str(error).split())
        if error.response.get("Error", {}).get("Code") in _DENIED:
            action = f"{service.policy}:{error.operation_name}"
            raise AwsError(f"the gate's role lacks a right: allow {action} ({text})") from None
        raise AwsError(f"{service.spoken} refuses: {text}") from None
    except errors.BotoCoreError as error:
        raise AwsError(f"{service.spoken} cannot be reached: {' '.join(str(error).split())}") from None


UNIT_TAG, ROLE_TAG, SIZE_TAG = "cellgate:unit", "cellgate:role", "cellgate:size"
SERVES_TAG = "cellgate:serves"
DESCRIBED_AT_ONCE = 100
"""The API's limit (DescribeTasks)."""

Task = Mapping[str, Any]
"""A task as DescribeTasks has it."""


def connect(region: str) -> Any:
    """A client of boto3. Raises AwsError."""
    return client(ECS, region)


def running_tasks(client: Any, cluster: str, services: Sequence[str]) -> list[Task]:
    """The running tasks of these services (of all, without any). Raises AwsError."""
    tasks: list[Task] = []
    with in_one_line():
        arns = sorted(_arns(client, cluster, services))
        for first in range(0, len(arns), DESCRIBED_AT_ONCE):
            some = arns[first : first + DESCRIBED_AT_ONCE]
            tasks += client.describe_tasks(cluster=cluster, tasks=some, include=["TAGS"])["tasks"]
    return tasks


def tags_of(task: Task) -> dict[str, str]:
    return {tag["key"]: tag.get("value", "") for tag in task.get("tags", ())}


def _arns(client: Any, cluster: str, services: Sequence[str]) -> Iterator[str]:
    pages = client.get_paginator("list_tasks")
    for service in services or (None,):
        only = {"serviceName": service} if service is not None else {}
        for page in pages.paginate(cluster=cluster, desiredStatus="RUNNING", **only):
            yield from page["taskArns"]


def in_one_line() -> AbstractContextManager[None]:
    """Turns what boto3 raises into AwsError."""
    return said_plainly(ECS)


# Where nodes are in the network, by their labels.


SCHEMES: Mapping[str, Sequence[str]] = {
    "EKS, four layers": tuple(f"topology.k8s.aws/network-node-layer-{layer}" for layer in (1, 2, 3, 4)),
    "EKS": tuple(f"topology.k8s.aws/network-node-layer-{layer}" for layer in (1, 2, 3)),
    "Topograph": tuple(f"fabric.topograph.run/tier-{tier}" for tier in (2, 1, 0)),
    "Topograph 0": tuple(f"network.topology.nvidia.com/{layer}" for layer in ("core", "spine", "leaf")),
    "GKE": tuple(f"cloud.google.com/gce-topology-{layer}" for layer in ("block", "subblock", "host")),
    "zones": ("topology.kubernetes.io/region", "topology.kubernetes.io/zone"),
}
"""Labels of nodes, from the widest layer to the narrowest, the most exact scheme first."""


def places_by_labels(labels: Mapping[str, Mapping[str, str]]) -> dict[str, Place]:
    """The places of nodes, by name, from their labels. Raises ValueError when they have no common scheme."""
    for scheme in SCHEMES.values():
        if labels and all(label in of_node for of_node in labels.values() for label in scheme):
            return {name: tuple(of_node[label] for label in scheme) for name, of_node in labels.items()}
    known = "; ".join(", ".join(scheme) for scheme in SCHEMES.values())
    raise ValueError(f"not all nodes have the labels of one scheme: {known}")
