"""A LeaderWorkerSet of simulated units: pods at the fake API server, and processes behind each group.

What must stay true: as in a cluster, a pod that is deleted is announced first, its processes end `grace_s`
later, its address is never used again, and the group is made again as a whole.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from loadtests.kit import processes
from loadtests.kit.fake_kubernetes import FakeKubernetes, group_pod
from loadtests.simunit.process import SimUnit

LWS = "big"
NAMESPACE = "prod"


@dataclass(slots=True)
class Group:
    """One group: its number, how often it was made, and its processes while it has some."""

    number: int
    generation: int = 0
    unit: SimUnit | None = None

    @property
    def name(self) -> str:
        """Of the unit, and of the leader's pod."""
        return f"{LWS}-{self.number}"

    def pods(self, **status: Any) -> list[dict[str, Any]]:
        """Its pods; `status` as of `group_pod`, without addresses: as long as nothing runs."""
        return [
            group_pod(
                LWS,
                self.number,
                rank,
                size=2,
                uid=f"{self.name}-{rank}/{self.generation}",
                ip=self.host(rank) if self.unit is not None else "",
                **status,
            )
            for rank in range(2)
        ]

    def host(self, rank: int) -> str:
        """An address of this machine that nobody else has."""
        return f"127.{10 + self.generation}.{self.number}.{rank + 1}"


async def _passes(_: Group) -> None:
    """It listens, and that will do."""


class LwsCluster:
    """An async context manager: inside, all groups run and are ready. `timing` are flags of the units.

    `grace_s` is how long the processes of a pod go on that was told to go. `probe` is the leaders' readiness
    probe: it returns when that of a group passes.
    """

    def __init__(self, count: int, *, grace_s: float, **timing: object) -> None:
        self.api = FakeKubernetes()
        self.port = processes.free_port()
        self.groups = [Group(number) for number in range(count)]
        self.grace_s = grace_s
        self.probe: Callable[[Group], Awaitable[object]] = _passes
        self._timing = timing

    async def __aenter__(self) -> "LwsCluster":
        await self.api.start()
        try:
            await asyncio.gather(*map(self.start, self.groups))
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    def discover(self, kubeconfig: str) -> dict[str, object]:
        """`discover` of the gate's cell."""
        where = {"name": LWS, "namespace": NAMESPACE, "kubeconfig": kubeconfig}
        return {"from": "lws", "port": self.port, **where}

    async def start(self, group: Group) -> None:
        """The controller makes a group again, and it starts: pending pods, running ones, ready ones."""
        group.generation += 1
        for pod in group.pods():
            await self.api.put(pod)
        options = {"host": group.host(0), "port": self.port, "followers": 1, **self._timing}
        group.unit = await asyncio.to_thread(SimUnit.start, group.name, **options)
        for pod in group.pods(ready=False):
            await self.api.put(pod)
        await self.probe(group)
        for pod in group.pods():
            await self.api.put(pod)

    async def delete(self, group: Group, *ranks: int) -> None:
        """Tell pods of these ranks to go."""
        for rank in ranks:
            await self.api.delete(f"{group.name}-{rank}" if rank else group.name)

    async def end(self, group: Group) -> None:
        """The processes of a group end, and then its pods are gone."""
        assert group.unit is not None
        await asyncio.to_thread(group.unit.stop)
        group.unit = None
        for pod in group.pods():
            await self.api.remove(pod["metadata"]["name"])

    async def _stop(self) -> None:
        for group in self.groups:
            if group.unit is not None:
                await asyncio.to_thread(group.unit.stop)
        await self.api.stop()
