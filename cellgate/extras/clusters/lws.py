"""Follows a LeaderWorkerSet of Kubernetes (LWS): each group of its pods is one.

1. The leader of a group has worker-index 0; a group is complete with as many pods as their size annotation
   says.
2. A pod that is deleted, or whose engine does not run, is fatal at once; one that is merely not ready is a
   suspicion: readiness probes time out on busy engines, and pods of an unreachable node are not ready.
3. The group-key of most sets never changes, so an epoch includes the uids of the pods.

Labels and annotations: sigs.k8s.io/lws, "Labels, Annotations and Environment Variables".

In this order: `follow`, `pods`, `NodePlaces`.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from typing import Any

import aiohttp
import orjson

from cellgate.extras.clusters.groups import Group, Member, NodePorts, together
from cellgate.extras.orchestrators import (
    FORBIDDEN,
    GONE,
    LWS_LABELS,
    NODES,
    REQUEST_S,
    ApiCall,
    ApiError,
    ask,
    connected,
    own_namespace,
    places_by_labels,
)
from cellgate.proxy.config.sources import LwsSource
from cellgate.proxy.discovery.base import Found, SourceError
from cellgate.proxy.observe.log import log_line
from cellgate.router.nouns import Place

SERVES = "disaggregatedset.x-k8s.io/role"
"""What a DisaggregatedSet labels the pods of its sets with."""
_MAIN = "kubectl.kubernetes.io/default-container"
_WATCH_MESSAGE_MAX = 160


async def follow(source: LwsSource) -> AsyncGenerator[Found, None]:
    """The units at each change of a pod."""
    namespace, selector = source.namespace or own_namespace(), f"{LWS_LABELS}name={source.name}"
    ports = NodePorts(source.port, source.agent_port, source.scheme)
    nodes = NodePlaces(source.kubeconfig) if source.places else None
    async for known in pods(source.kubeconfig, namespace, selector):
        places = await nodes.of(map(node_of, known.values())) if nodes is not None else {}
        made = groups(source.name, known.values(), places)
        yield together([group.found(source.like, ports) for group in made])


def groups(name: str, found: Any, places: Mapping[str, Place]) -> list[Group]:
    """The groups that these pods make, in order. `found` are pods as the API has them, `places` by node."""
    members: dict[str, list[Member]] = {}
    for pod in found:
        members.setdefault(_label(pod, "group-index"), []).append(member(pod, places))
    # Where the leaders are no StatefulSet, the index of a group is its key: a hash.
    return [
        Group(f"{name}-{index[:8]}".rstrip("-"), "pod", tuple(members[index]), numbered=True)
        for index in sorted(members, key=_in_order)
    ]


def member(pod: Mapping[str, Any], places: Mapping[str, Place]) -> Member:
    """What a pod is in its group."""
    meta, status = pod["metadata"], pod.get("status", {})
    trouble, fatal = _trouble(pod)
    return Member(
        name=meta["name"],
        incarnation=meta.get("uid", ""),
        rank=_number(_label(pod, "worker-index")),
        size=_number(meta.get("annotations", {}).get(f"{LWS_LABELS}size")),
        key=_label(pod, "group-key"),
        address=status.get("podIP", ""),
        trouble=trouble,
        fatal=fatal,
        serves=str(meta.get("labels", {}).get(SERVES, "")),
        place=places.get(node_of(pod), ()),
    )


def node_of(pod: Mapping[str, Any]) -> str:
    """The node that a pod runs on; empty before it has one."""
    return str(pod.get("spec", {}).get("nodeName", ""))


def _trouble(pod: Mapping[str, Any]) -> tuple[str, bool]:
    """The fault of a pod, and whether it is certain."""
    status = pod.get("status", {})
    if pod["metadata"].get("deletionTimestamp"):
        return "its pod is being deleted", True
    conditions = {one["type"]: one for one in status.get("conditions", ())}
    phase = status.get("phase", "Unknown")
    if phase == "Pending":
        return f"its pod is pending{_why(conditions.get('PodScheduled', {}))}", True
    if phase in ("Failed", "Succeeded"):
        return f"its pod has ended: {phase}{_why(status)}", True
    main = _main_container(pod)
    for container in status.get("containerStatuses", ()):
        state = container.get("state", {})
        halted = state.get("waiting") or state.get("terminated")
        if halted is not None:
            name, reason = container["name"], halted.get("reason", "unknown")
            return f"container {name} does not run: {reason}", name == main
    ready = conditions.get("Ready", {})
    if ready.get("status") != "True":
        return f"its pod is not ready{_why(ready)}", False
    return "", False


def _main_container(pod: Mapping[str, Any]) -> str:
    """The engine's container, by the rule of kubectl: the one that an annotation names, else the first."""
    named = pod["metadata"].get("annotations", {}).get(_MAIN)
    containers = pod.get("spec", {}).get("containers") or [{}]
    return str(named or containers[0].get("name", ""))


def _why(said: Mapping[str, Any]) -> str:
    text = ": ".join(said[key] for key in ("reason", "message") if said.get(key))
    return f" ({text[:_WATCH_MESSAGE_MAX]})" if text and said.get("status") != "True" else ""


def _label(pod: Mapping[str, Any], name: str) -> str:
    return str(pod["metadata"].get("labels", {}).get(LWS_LABELS + name, ""))


def _number(text: object) -> int | None:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else None


def _in_order(index: str) -> tuple[bool, int, str]:
    number = _number(index)
    return number is None, number or 0, index


# Objects of a Kubernetes cluster, listed and watched through the asyncio client.
#
# 1. A watch continues from the last version received, bookmarks included; only 410 Gone needs a new list.
# 2. A watch that ends or breaks is not a failure. The source fails when the next request fails.


WATCH_S = 60
"""How long one watch lasts: the server ends it, and the next continues from there."""
WATCH_QUIET_S = 15.0
"""A server that sends nothing for this long beyond that counts as lost, even if the connection is open."""
SHORT_S = 1.0
"""The least time between the starts of two watches, to protect the server."""
Objects = dict[str, dict[str, Any]]
"""Objects by name."""


class _GoneError(Exception):
    """The version to continue from is too old: list everything again."""


async def pods(kubeconfig: str, namespace: str, selector: str) -> AsyncGenerator[Objects, None]:
    """The pods with these labels: once when listed, then at each change. The mapping is the same, changed.

    `kubeconfig` empty: what this pod was given, else the user's file. Raises SourceError.
    """
    try:
        async with connected(kubeconfig) as connection:
            client: Any = importlib.import_module("kubernetes_asyncio.client")
            api = client.CoreV1Api(connection)
            while True:
                try:
                    async for known in _list_and_watch(api, namespace, selector):
                        yield known
                except _GoneError:
                    continue
    except ApiError as error:
        raise SourceError(str(error)) from None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise SourceError(f"the API server cannot be reached: {error!r}") from None
    except (KeyError, TypeError) as error:
        raise SourceError(f"the API server sent something else than pods: {error!r}") from None


async def _list_and_watch(api: Any, namespace: str, selector: str) -> AsyncGenerator[Objects, None]:
    listed = await _get(api, namespace, selector, (REQUEST_S, REQUEST_S))
    page = orjson.loads(await listed.read())
    known: Objects = {pod["metadata"]["name"]: pod for pod in page["items"]}
    version = page["metadata"]["resourceVersion"]
    yield known
    while True:
        began_at = asyncio.get_running_loop().time()
        async for events in _events(api, namespace, selector, version):
            version = events[-1]["object"]["metadata"]["resourceVersion"]
            changes = sum(_changes(known, event) for event in events)
            if changes:
                yield known
        if asyncio.get_running_loop().time() - began_at < SHORT_S:
            await asyncio.sleep(SHORT_S)


async def _events(api: Any, namespace: str, selector: str, version: str) -> AsyncGenerator[list[Any], None]:
    """The events of one watch, as many at once as have come. Ends with it; raises _GoneError."""
    options = {
        "watch": True,
        "resource_version": version,
        "allow_watch_bookmarks": True,
        "timeout_seconds": WATCH_S,
    }
    response = await _get(api, namespace, selector, (REQUEST_S, WATCH_S + WATCH_QUIET_S), **options)
    rest = b""
    try:
        async for data in response.content.iter_any():
            *lines, rest = (rest + data).split(b"\n")
            events = [orjson.loads(line) for line in lines]
            for event in events:
                if event["type"] == "ERROR":
                    raise _refusal(event["object"].get("code"), event["object"].get("message"))
            if events:
                yield events
    except aiohttp.ClientPayloadError:
        # The connection broke: the next watch continues from there.
        return
    finally:
        response.close()


async def _get(api: Any, namespace: str, selector: str, timeouts: tuple[float, float], **options: Any) -> Any:
    """One request for pods. Timeouts: to connect, and between two reads."""
    response = await api.list_namespaced_pod(
        namespace, label_selector=selector, _preload_content=False, _request_timeout=timeouts, **options
    )
    if response.status != 200:
        reason = (await response.read())[:300].decode(errors="replace")
        response.close()
        raise _refusal(response.status, reason)
    return response


def _refusal(status: int | None, reason: object) -> Exception:
    if status == GONE:
        return _GoneError()
    return SourceError(f"the API server refuses: {status} {' '.join(str(reason).split())}")


def _changes(known: Objects, event: Any) -> bool:
    """Apply an event; False for one that changes nothing, such as a bookmark."""
    match event["type"]:
        case "ADDED" | "MODIFIED":
            known[event["object"]["metadata"]["name"]] = event["object"]
        case "DELETED":
            known.pop(event["object"]["metadata"]["name"], None)
        case _:
            return False
    return True


# Where the nodes of a Kubernetes cluster stand in the network, by their labels.
#
# Each node is asked for once, when a pod is first seen on it. What cannot be asked changes nothing: units are
# found all the same, and their places are unknown.


WATCH_LOOK_S = 3.0
"""The news of pods wait no longer for places."""
NODES_A_LOOK = 128


class NodePlaces:
    """The places of nodes that pods run on."""

    def __init__(self, kubeconfig: str) -> None:
        self._kubeconfig = kubeconfig
        self._labels: dict[str, Mapping[str, str]] = {}
        self._may_ask = True

    async def of(self, nodes: Iterable[str]) -> Mapping[str, Place]:
        """The places of these nodes, as far as they are known."""
        wanted = {node for node in nodes if node}
        if self._may_ask and (new := sorted(wanted - self._labels.keys())):
            # What has not come in time is asked for again with the next change of a pod.
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_LOOK_S):
                    await self._look_up(new[:NODES_A_LOOK])
        self._labels = {node: labels for node, labels in self._labels.items() if node in wanted}
        try:
            return places_by_labels(self._labels)
        except ValueError:
            return {}

    async def _look_up(self, nodes: Iterable[str]) -> None:
        with suppress(ApiError):
            async with connected(self._kubeconfig) as api:
                for node in nodes:
                    try:
                        found = await ask(api, ApiCall("get", NODES, name=node))
                    except ApiError as error:
                        if self._may_retry(error):
                            continue
                        return
                    self._labels[node] = found["metadata"].get("labels", {})

    def _may_retry(self, error: ApiError) -> bool:
        """Whether the next node may be asked for: one may be gone before its pods are."""
        if error.status == FORBIDDEN:
            self._may_ask = False
            log_line("warning", f"discovery: places of nodes are not known: {error}; units are found without")
        return self._may_ask and error.status > 0
