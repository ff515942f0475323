"""The API server of a Kubernetes cluster: one connection, plain JSON, and what is wrong in one line.

Objects stay plain JSON: the client's own classes cost a millisecond each, on the loop. A refusal for want of
a right names the rule that is missing ("Using RBAC Authorization", rules of a Role).
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import aiohttp
import orjson

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
_REASON_MAX = 300


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


async def ask(connection: Any, call: ApiCall) -> ApiObject:
    """The answer to a call. Raises ApiError."""
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
    told = answer if isinstance(answer, dict) else {}
    causes = told.get("details", {}).get("causes", [])
    text = " ".join([str(told.get("message", "")), *(str(each.get("message", "")) for each in causes)])
    return f"the API server refuses: {status} {' '.join(text.split())[:_REASON_MAX]}".rstrip()
