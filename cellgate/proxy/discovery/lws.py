"""Units from a Kubernetes LeaderWorkerSet: each group of its pods is one.

1. The leader of a group has worker-index 0; a group is complete with as many pods as their size annotation
   says.
2. A pod that is deleted, or whose engine does not run, is fatal at once; one that is merely not ready is a
   suspicion: readiness probes time out on busy engines, and pods of an unreachable node are not ready.
3. The group-key of most sets never changes, so an epoch includes the uids of the pods.

Labels and annotations: sigs.k8s.io/lws, "Labels, Annotations and Environment Variables".
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from cellgate.proxy.config.sources import LwsSource
from cellgate.proxy.discovery.base import Found
from cellgate.proxy.discovery.groups import Group, Member, NodePorts, together
from cellgate.proxy.orchestrators.kubernetes_api import LWS_LABELS, own_namespace
from cellgate.router.nouns import Place

SERVES = "disaggregatedset.x-k8s.io/role"
"""What a DisaggregatedSet labels the pods of its sets with."""
_MAIN = "kubectl.kubernetes.io/default-container"
_MESSAGE_MAX = 160


async def follow(source: LwsSource) -> AsyncGenerator[Found, None]:
    """The units at each change of a pod."""
    # Imported late: it brings an HTTP client, which other gates and commands do not need.
    from cellgate.proxy.discovery.kubernetes import pods
    from cellgate.proxy.discovery.node_places import NodePlaces

    namespace, selector = source.namespace or own_namespace(), f"{LWS_LABELS}name={source.name}"
    ports = NodePorts(source.port, source.agent_port, source.scheme)
    nodes = NodePlaces(source.kubeconfig) if source.places else None
    async for known in pods(source.kubeconfig, namespace, selector):
        places = await nodes.of(map(_node_of, known.values())) if nodes is not None else {}
        made = groups(source.name, known.values(), places)
        yield together([group.found(source.like, ports) for group in made])


def groups(name: str, found: Any, places: Mapping[str, Place]) -> list[Group]:
    """The groups that these pods make, in their order. `found` are pods as the API has them, `places` are by
    node.
    """
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
        place=places.get(_node_of(pod), ()),
    )


def _node_of(pod: Mapping[str, Any]) -> str:
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
    return f" ({text[:_MESSAGE_MAX]})" if text and said.get("status") != "True" else ""


def _label(pod: Mapping[str, Any], name: str) -> str:
    return str(pod["metadata"].get("labels", {}).get(LWS_LABELS + name, ""))


def _number(text: object) -> int | None:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else None


def _in_order(index: str) -> tuple[bool, int, str]:
    number = _number(index)
    return number is None, number or 0, index
