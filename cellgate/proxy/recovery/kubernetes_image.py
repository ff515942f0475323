"""Gives one group of a LeaderWorkerSet another image, by the partition of its rollout.

A set has one template for all of its groups. Its controller brings it to the groups from `partition` on
(their index), and to no others. So units are rolled from the highest index down, and a group is refused while
one above it has another image: the controller would replace both, and nobody has drained the other one.

Fields: sigs.k8s.io/lws, API reference, "RollingUpdateConfiguration" and "LeaderWorkerTemplate".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from cellgate.proxy.config.unit_actions import SetImage
from cellgate.proxy.orchestrators.kubernetes_api import (
    LWS_LABELS,
    PODS,
    SETS,
    ApiCall,
    ApiError,
    ApiObject,
    ask,
    connected,
    own_namespace,
)
from cellgate.proxy.recovery.nouns import Incident, RecoveryReport, RecoveryResult

_MAIN = "kubectl.kubernetes.io/default-container"


async def run(action: SetImage, about: Incident) -> RecoveryReport:
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
