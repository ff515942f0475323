"""Where the nodes of a Kubernetes cluster stand in the network, by their labels.

Each node is asked for once, when a pod is first seen on it. What cannot be asked changes nothing: units are
found all the same, and their places are unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress

from cellgate.proxy.logs.log import log_line
from cellgate.proxy.orchestrators.kubernetes_api import FORBIDDEN, NODES, ApiCall, ApiError, ask, connected
from cellgate.proxy.topology.node_files import places_by_labels
from cellgate.router.nouns import Place

LOOK_S = 3.0
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
                async with asyncio.timeout(LOOK_S):
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
                        if self._may_go_on(error):
                            continue
                        return
                    self._labels[node] = found["metadata"].get("labels", {})

    def _may_go_on(self, error: ApiError) -> bool:
        """Whether the next node may be asked for: one may be gone before its pods are."""
        if error.status == FORBIDDEN:
            self._may_ask = False
            log_line("warning", f"discovery: places of nodes are not known: {error}; units are found without")
        return self._may_ask and error.status > 0
