"""Replaces all pods of a unit in Kubernetes: evicts or deletes them, and their owner makes new ones.

1. The pods are listed first, and go by their uids: one that was made again meanwhile is left alone.
2. The leader's goes first. A refused pod spares no other: a unit is all of its pods or nothing.
3. What is only told (an annotation on the leader's pod, an Event on the set or that pod, which pods were on
   cordoned nodes) never keeps a unit from its recovery: a right that is missing for it is a note in the log.

Eviction: "API-initiated Eviction", which heeds PodDisruptionBudgets. Labels: sigs.k8s.io/lws.

In this order: `replace_pods`, `selector_of`, `set_image`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from cellgate.extras.operator.action_settings import UNIT, ReplacePods, SetImage
from cellgate.extras.operator.plan import Incident, RecoveryReport, RecoveryResult
from cellgate.extras.orchestrators import (
    CONFLICT,
    EVENTS,
    LWS_LABELS,
    NODES,
    NOT_FOUND,
    PODS,
    SETS,
    ApiCall,
    ApiError,
    ApiObject,
    ask,
    connected,
    own_namespace,
)
from cellgate.proxy.observe.log import utc
from cellgate.proxy.observe.text import one_line

PODS_MAX = 256
"""A selector that chooses more is a mistake."""
VERDICT = "cellgate.io/verdict"
"""The annotation of a leader's pod."""
_MESSAGE_MAX = 1000


async def replace_pods(action: ReplacePods, about: Incident) -> RecoveryReport:
    """Replace the pods of the unit that `about` is about. Its caller bounds how long it takes."""
    namespace = action.namespace or own_namespace()
    try:
        selector = selector_of(action, about["unit"])
        async with connected(action.kubeconfig) as api:
            found = await ask(api, ApiCall("list", PODS, namespace, query={"labelSelector": selector}))
            pods = in_order(found["items"])
            if not 0 < len(pods) <= PODS_MAX:
                what = f"{len(pods)} pods with {selector} in namespace {namespace}, expected 1 to {PODS_MAX}"
                return RecoveryReport(RecoveryResult.REFUSED, f"{what}; nothing was done")
            return _report(await _replace(api, action, namespace, pods, about), len(pods), action)
    except (ApiError, ValueError) as error:
        return RecoveryReport(RecoveryResult.REFUSED, f"{error}; nothing was done")


class _Outcome(NamedTuple):
    """What became of each pod, in order, and what else is worth a word."""

    gone: list[str]
    refused: list[str]
    notes: list[str]


async def _replace(
    api: Any, action: ReplacePods, namespace: str, pods: Sequence[ApiObject], about: Incident
) -> _Outcome:
    leader = pods[0]
    written = [await _note(api, ApiCall("patch", PODS, namespace, _name(leader), body=verdict_of(about)))]
    nodes = sorted({node for pod in pods if (node := pod.get("spec", {}).get("nodeName"))})
    written += await asyncio.gather(*(_cordoned(api, node) for node in nodes))
    outcome = _Outcome([], [], [])
    for pod in pods:
        try:
            await ask(api, going(action, namespace, pod))
        except ApiError as error:
            # Otherwise it is gone already, or another pod has its name.
            if error.status not in (NOT_FOUND, CONFLICT):
                outcome.refused.append(f"{_name(pod)}: {error}")
                continue
        outcome.gone.append(_name(pod))
    if outcome.gone:
        regarding = leader if action.selector else await _set_of(api, namespace, leader)
        written.append(await _note(api, event_of(about, regarding, namespace, utc(time.time()))))
    outcome.notes.extend(dict.fromkeys(note for note in written if note))
    return outcome


async def _note(api: Any, call: ApiCall) -> str:
    """Why the call failed, or nothing: it only tells people something."""
    try:
        await ask(api, call)
    except ApiError as error:
        return str(error)
    return ""


async def _cordoned(api: Any, node: str) -> str:
    """A note on a node that gets no new pods."""
    try:
        found = await ask(api, ApiCall("get", NODES, name=node))
    except ApiError as error:
        return f"whether nodes are cordoned is not known: {error}"
    is_cordoned = found.get("spec", {}).get("unschedulable")
    return f"node {node} is cordoned, so its pod is placed elsewhere if there is room" if is_cordoned else ""


async def _set_of(api: Any, namespace: str, leader: ApiObject) -> ApiObject:
    """The LeaderWorkerSet of a pod, which outlives it; the pod itself where that cannot be read."""
    try:
        return await ask(
            api, ApiCall("get", SETS, namespace, leader["metadata"]["labels"][f"{LWS_LABELS}name"])
        )
    except ApiError:
        return leader


def _report(outcome: _Outcome, pods: int, action: ReplacePods) -> RecoveryReport:
    done = f"{'evicted' if action.evict else 'deleted'} {len(outcome.gone)} of {pods} pods"
    text = "\n".join(["gone: " + " ".join(outcome.gone), *outcome.refused])
    detail = "; ".join([done, *outcome.refused[:1], *outcome.notes])
    if not outcome.gone:
        return RecoveryReport(RecoveryResult.REFUSED, detail, text)
    return RecoveryReport(RecoveryResult.FAILED if outcome.refused else RecoveryResult.OK, detail, text)


# -- what is asked, pure -----------------------------------------------------------------------------------


def selector_of(action: ReplacePods, unit: str) -> str:
    """The labels of the unit's pods. Raises ValueError for a unit that is named after no group."""
    if action.selector:
        return action.selector.replace(UNIT, unit)
    lws, _, index = unit.rpartition("-")
    if not lws or not index.isdigit():
        raise ValueError(f"unit {unit} is not named SET-INDEX: give a selector")
    return f"{LWS_LABELS}name={lws},{LWS_LABELS}group-index={index}"


def in_order(pods: Sequence[ApiObject]) -> list[ApiObject]:
    """The leader's first, then by their places in the group, and by name."""

    def place(pod: ApiObject) -> tuple[int, str]:
        index = str(pod["metadata"].get("labels", {}).get(f"{LWS_LABELS}worker-index", ""))
        return (int(index) if index.isdigit() else 0, _name(pod))

    return sorted(pods, key=place)


def going(action: ReplacePods, namespace: str, pod: ApiObject) -> ApiCall:
    """The call that makes a pod go, and no other of its name."""
    name, only = _name(pod), {"preconditions": {"uid": pod["metadata"]["uid"]}}
    if not action.evict:
        return ApiCall("delete", PODS, namespace, name, body=only)
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": only,
    }
    return ApiCall("create", PODS, namespace, name, "eviction", body=body)


def verdict_of(about: Incident) -> ApiObject:
    """The change of the leader's pod that says what is known of the unit."""
    said = f"DOWN since {about['since']}: {one_line(about['reason'])}"
    return {"metadata": {"annotations": {VERDICT: said[:_MESSAGE_MAX]}}}


def event_of(about: Incident, regarding: ApiObject, namespace: str, at: str) -> ApiCall:
    """The Event of the core API that says what was done to a unit of `regarding`, and why."""
    said = f"unit {about['unit']} was DOWN since {about['since']}: {one_line(about['reason'])}; "
    meta = regarding["metadata"]
    body = {
        "metadata": {"generateName": f"{meta['name']}.", "namespace": namespace},
        "involvedObject": {
            # Items of a list do not say what they are.
            "apiVersion": regarding.get("apiVersion", "v1"),
            "kind": regarding.get("kind", "Pod"),
            "namespace": namespace,
            "name": meta["name"],
            "uid": meta["uid"],
        },
        "type": "Warning",
        "reason": "CellgateReplacedUnit",
        "message": f"{said}attempt {about['attempt']}, {about['id']}"[:_MESSAGE_MAX],
        "source": {"component": "cellgate"},
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
    return ApiCall("create", EVENTS, namespace, body=body)


def _name(pod: ApiObject) -> str:
    return str(pod["metadata"]["name"])


# Gives one group of a LeaderWorkerSet another image, by the partition of its rollout.
#
# A set has one template for all of its groups. Its controller brings it to the groups from `partition` on
# (their index), and to no others. So units are rolled from the highest index down, and a group is refused
# while one above it has another image: the controller would replace both, and nobody has drained the other
# one.
#
# Fields: sigs.k8s.io/lws, API reference, "RollingUpdateConfiguration" and "LeaderWorkerTemplate".


_MAIN = "kubectl.kubernetes.io/default-container"


async def set_image(action: SetImage, about: Incident) -> RecoveryReport:
    """Give the unit that `about` is about the image. Its caller bounds how long it takes."""
    namespace = action.namespace or own_namespace()
    name, _, number = about["unit"].rpartition("-")
    try:
        if not name or not number.isdigit():
            raise ValueError(f"unit {about['unit']} is not named SET-INDEX")
        async with connected(action.kubeconfig) as api:
            before = await ask(api, ApiCall("get", SETS, namespace, name))
            query = {"labelSelector": f"{LWS_LABELS}name={name}"}
            pods = (await ask(api, ApiCall("list", PODS, namespace, query=query)))["items"]
            after = rolled(before, pods, action, int(number))
            # Refused when somebody else has changed the set meanwhile: its version goes with it.
            await ask(api, ApiCall("update", SETS, namespace, name, body=after))
    except (ApiError, ValueError) as error:
        return RecoveryReport(RecoveryResult.REFUSED, f"{error}; nothing was done")
    detail = f"set {name} has image {action.image} from group {number} on"
    return RecoveryReport(RecoveryResult.OK, detail)


def rolled(before: ApiObject, pods: Sequence[ApiObject], action: SetImage, index: int) -> ApiObject:
    """The set with the image in its templates, for the groups from `index` on. Raises ValueError when that
    would change another group as well, or none.
    """
    for pod in pods:
        group = str(pod["metadata"]["labels"].get(f"{LWS_LABELS}group-index", ""))
        [container] = _engines(pod, action)
        if group.isdigit() and int(group) > index and container["image"] != action.image:
            other = f"group {group} above it has image {container['image']}"
            raise ValueError(f"{other}, and would be replaced too: roll from the highest group down")
    after = deepcopy(before)
    for template in _templates(after):
        for container in _engines(template, action):
            container["image"] = action.image
    # A field may be there and null.
    strategy = after["spec"].get("rolloutStrategy") or {"type": "RollingUpdate"}
    rolling = (strategy.get("rollingUpdateConfiguration") or {}) | {"partition": index}
    after["spec"]["rolloutStrategy"] = strategy | {"rollingUpdateConfiguration": rolling}
    if after["spec"] == before["spec"]:
        raise ValueError(f"groups from {index} on have image {action.image} already")
    return after


def _templates(lws: ApiObject) -> Iterator[ApiObject]:
    """The templates of the pods: the leader may have one of its own."""
    both = lws["spec"]["leaderWorkerTemplate"]
    yield from (both[key] for key in ("leaderTemplate", "workerTemplate") if both.get(key))


def _engines(template: ApiObject, action: SetImage) -> list[dict[str, Any]]:
    """The container of a pod, or of a template, that gets the image: the one that is named, else the engine's
    by the rule of kubectl. Raises ValueError when there is none.
    """
    containers = template["spec"]["containers"]
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    named = action.container or annotations.get(_MAIN)
    if not named:
        return list(containers[:1])
    found = [container for container in containers if container["name"] == named]
    if not found:
        raise ValueError(f"no container is named {named}")
    return found
