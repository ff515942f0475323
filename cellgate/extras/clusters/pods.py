"""Follows plain pods of Kubernetes: each that is ready is a unit. By labels, or those of an InferencePool.

1. A pod that is not ready, is being deleted, has ended, or has lost a label is no unit any more: it gets no
   new requests, and those that it has may end. Where no pod is ready, all that run are units, and canaries
   decide: readiness probes of engines with much to do may time out.
2. A unit is named after its pod, and its epoch is the pod's uid: an address that another pod has now is
   another unit's, and is asked only after a canary.
3. A pool names the labels and the ports of its pods; it is read again every `POOL_S`.

InferencePool: `inference.networking.k8s.io/v1` of the Gateway API Inference Extension, and before that
`inference.networking.x-k8s.io/v1alpha2`. KServe's LLMInferenceService and llm-d make one.

In this order: `follow`, `PoolOfPods`, `units_of`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from cellgate.extras.clusters.lws import NodePlaces, Objects, node_of, pods
from cellgate.extras.orchestrators import (
    NOT_FOUND,
    ApiCall,
    ApiError,
    Resource,
    ask,
    connected,
    own_namespace,
)
from cellgate.proxy.config.sources import PodsSource
from cellgate.proxy.discovery.base import GROUP, Found, SourceError, Suspicion, named
from cellgate.router.nouns import Node, Place, Role, Unit

POOL_S = 15.0
POOLS = (
    Resource("inferencepools", "inference.networking.k8s.io"),
    Resource("inferencepools", "inference.networking.x-k8s.io", "v1alpha2"),
)
_NOT_READY = "its pod is not ready, and no other is"
PORTS_MAX = 8
"""A pool has no more."""


async def follow(source: PodsSource) -> AsyncGenerator[Found, None]:
    """The units at each change of a pod, or of the pool."""
    namespace = source.namespace or own_namespace()
    nodes = NodePlaces(source.kubeconfig) if source.places else None
    while True:
        wanted = await _wanted(source, namespace)
        feed = pods(source.kubeconfig, namespace, wanted.selector)
        try:
            async for known in _until_changed(feed, source, namespace, wanted):
                places = await nodes.of(map(node_of, known.values())) if nodes is not None else {}
                yield units_of(known.values(), source, wanted.ports, places)
        finally:
            await feed.aclose()


class PoolOfPods(NamedTuple):
    """Which pods are units, and the ports of each."""

    selector: str
    ports: tuple[int, ...]


async def _wanted(source: PodsSource, namespace: str) -> PoolOfPods:
    """Raises SourceError."""
    if not source.pool:
        return PoolOfPods(source.selector, (source.port,))
    try:
        async with connected(source.kubeconfig) as api:
            found = await _pool(api, source.pool, namespace)
    except ApiError as error:
        raise SourceError(str(error)) from None
    wanted = pool_of(found, source.port)
    if not wanted.selector or not wanted.ports:
        raise SourceError(f"the InferencePool {source.pool} names no labels of pods, or no port")
    return wanted


async def _pool(api: Any, name: str, namespace: str) -> dict[str, Any]:
    """The pool by the newest version of the API that the cluster has. Raises ApiError."""
    unknown: ApiError | None = None
    for resource in POOLS:
        try:
            return await ask(api, ApiCall("get", resource, namespace, name))
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            unknown = unknown or error
    assert unknown is not None
    raise unknown


def pool_of(pool: Mapping[str, Any], port: int = 0) -> PoolOfPods:
    """What an InferencePool says; `port` is used in place of its own."""
    spec = pool.get("spec") or {}
    labels = spec.get("selector") or {}
    labels = labels.get("matchLabels", labels)
    numbers = [each.get("number") for each in spec.get("targetPorts") or ()] or [spec.get("targetPortNumber")]
    ports = [port] if port else [each for each in numbers if type(each) is int and 0 < each < 1 << 16]
    selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return PoolOfPods(selector, tuple(ports[:PORTS_MAX]))


async def _until_changed(
    feed: AsyncGenerator[Objects, None], source: PodsSource, namespace: str, wanted: PoolOfPods
) -> AsyncGenerator[Objects, None]:
    """The pods at each change, until the pool wants others."""
    if not source.pool:
        async for known in feed:
            yield known
        return
    coming = asyncio.ensure_future(anext(feed))
    try:
        while True:
            done, _ = await asyncio.wait((coming,), timeout=POOL_S)
            if done:
                yield coming.result()
                coming = asyncio.ensure_future(anext(feed))
                continue
            # A pool that cannot be read changes nothing.
            with suppress(SourceError):
                if await _wanted(source, namespace) != wanted:
                    return
    finally:
        coming.cancel()
        with suppress(asyncio.CancelledError, StopAsyncIteration, SourceError):
            await coming


def units_of(
    found: Iterable[Mapping[str, Any]],
    source: PodsSource,
    ports: tuple[int, ...],
    places: Mapping[str, Place],
) -> Found:
    """The units that these pods are, as the API has them, in the order of their names."""
    living = [pod for pod in sorted(found, key=_name) if lives(pod)]
    ready = [pod for pod in living if is_ready(pod)]
    units: list[Unit] = []
    epochs: list[tuple[str, str]] = []
    for pod in ready or living:
        address, place = str(pod["status"]["podIP"]), places.get(node_of(pod), ())
        for port in ports:
            name = named(_name(pod) + (f"-{port}" if len(ports) > 1 else ""))
            at = f"[{address}]" if ":" in address else address
            nodes = (Node(name, Role.LEADER, place=place),)
            units.append(replace(source.like, name=name, url=f"{source.scheme}://{at}:{port}", nodes=nodes))
            epochs.append((name, str(pod["metadata"].get("uid", ""))[:8]))
    doubts = () if ready else tuple(Suspicion(unit.name, GROUP, _NOT_READY, fatal=False) for unit in units)
    return Found(tuple(units), suspicions=doubts, epochs=tuple(epochs))


def lives(pod: Mapping[str, Any]) -> bool:
    """Whether a pod runs and is to go on."""
    status = pod.get("status") or {}
    is_going = bool(pod["metadata"].get("deletionTimestamp"))
    return status.get("phase") == "Running" and not is_going and bool(status.get("podIP"))


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is to get requests, as a Service of Kubernetes would say."""
    conditions = pod["status"].get("conditions") or ()
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def _name(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["name"])
