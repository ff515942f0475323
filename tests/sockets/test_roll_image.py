"""Groups of a LeaderWorkerSet get another image, by the official client, from the highest group down."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cellgate.proxy.config.action_settings import SetImage
from cellgate.proxy.extras.operator import kubernetes
from cellgate.proxy.extras.operator.plan import RecoveryReport, RecoveryResult
from loadtests.kit.fake_kubernetes import FakeKubernetes, group_pod
from tests.sockets.test_recovery_pods import rights_given, rights_used

RULES = Path(__file__).parents[2] / "deploy" / "recovery" / "kubernetes-roll-rbac.yaml"
OLD, NEW = "engine:1", "engine:2"

Roll = Callable[..., Awaitable[RecoveryReport]]


class Cluster:
    """A set of three groups of one pod, and its controller, which heeds the partition."""

    def __init__(self, api: FakeKubernetes, folder: Path) -> None:
        self.api, self._kubeconfig = api, api.kubeconfig(folder)

    async def fill(self) -> None:
        main = {"metadata": {"annotations": {"kubectl.kubernetes.io/default-container": "engine"}}}
        containers = [{"name": "sidecar", "image": "other"}, {"name": "engine", "image": OLD}]
        templates = {"leaderTemplate": main | {"spec": {"containers": containers}}}
        templates["workerTemplate"] = {"spec": {"containers": [{"name": "engine", "image": OLD}]}}
        spec = {"replicas": 3, "leaderWorkerTemplate": templates}
        self.api.objects.put("leaderworkersets", "prod", {"metadata": {"name": "big"}, "spec": spec})
        for number in range(3):
            await self.pod(number, OLD)

    async def pod(self, number: int, image: str) -> None:
        made = group_pod("big", number, 0, size=1, uid=f"{number}{image}", ip="127.0.0.1")
        made["spec"]["containers"][0]["image"] = image
        await self.api.put(made)

    async def roll(self, number: int, image: str = NEW) -> RecoveryReport:
        action = SetImage(image, "prod", kubeconfig=self._kubeconfig)
        report = await kubernetes.set_image(action, {"unit": f"big-{number}"})
        if report.result is RecoveryResult.OK:
            for at in range(self.partition, 3):
                await self.pod(at, image)
        return report

    @property
    def spec(self) -> dict[str, Any]:
        (lws,) = self.api.objects.all("leaderworkersets")
        return dict(lws["spec"])

    @property
    def partition(self) -> int:
        return int(self.spec["rolloutStrategy"]["rollingUpdateConfiguration"]["partition"])


def in_cluster(folder: Path, scenario: Callable[[Cluster], Awaitable[None]]) -> None:
    async def main() -> None:
        api = await FakeKubernetes().start()
        try:
            cluster = Cluster(api, folder)
            await cluster.fill()
            await scenario(cluster)
        finally:
            await api.stop()

    asyncio.run(main())


def images(cluster: Cluster) -> list[str]:
    return [pod["spec"]["containers"][0]["image"] for pod in cluster.api.pods()]


def test_groups_get_the_image_one_by_one_from_the_highest_down_and_back(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        report = await cluster.roll(2)
        assert (report.result, report.detail) == (
            RecoveryResult.OK,
            "set big has image engine:2 from group 2 on",
        )
        assert images(cluster) == [OLD, OLD, NEW]
        templates = cluster.spec["leaderWorkerTemplate"]
        assert [one["image"] for one in templates["leaderTemplate"]["spec"]["containers"]] == ["other", NEW]
        assert templates["workerTemplate"]["spec"]["containers"][0]["image"] == NEW
        await cluster.roll(1)
        assert (images(cluster), cluster.partition) == ([OLD, NEW, NEW], 1)
        await cluster.roll(2, OLD)
        assert (images(cluster), cluster.partition) == ([OLD, NEW, OLD], 2)
        await cluster.roll(1, OLD)
        assert images(cluster) == [OLD, OLD, OLD]

    in_cluster(tmp_path, scenario)


@pytest.mark.parametrize(
    ("unit", "image", "said"),
    [
        (
            0,
            NEW,
            "group 1 above it has image engine:1, and would be replaced too: roll from the highest group",
        ),
        (7, NEW, "groups from 7 on"),
    ],
)
def test_what_would_change_another_group_is_refused(tmp_path: Path, unit: int, image: str, said: str) -> None:
    async def scenario(cluster: Cluster) -> None:
        if unit > 2:
            await cluster.roll(unit, image)
        report = await cluster.roll(unit, image)
        assert report.result is RecoveryResult.REFUSED
        assert report.detail.startswith(said)
        assert report.detail.endswith("nothing was done")
        assert images(cluster) == [OLD, OLD, OLD]

    in_cluster(tmp_path, scenario)


def test_a_set_that_was_changed_meanwhile_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(cluster: Cluster) -> None:
        rolled = kubernetes.rolled

        def meddled(before: Any, *rest: Any) -> Any:
            cluster.api.objects.put(
                "leaderworkersets", "prod", {**before, "spec": cluster.spec | {"replicas": 4}}
            )
            return rolled(before, *rest)

        monkeypatch.setattr(kubernetes, "rolled", meddled)
        report = await cluster.roll(2)
        assert report.result is RecoveryResult.REFUSED
        assert "409 Operation cannot be fulfilled" in report.detail
        assert cluster.spec["replicas"] == 4

    in_cluster(tmp_path, scenario)


def test_the_rights_in_deploy_are_exactly_those_that_are_used(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.roll(2)
        assert rights_used(cluster.api) == rights_given(RULES)
        cluster.api.lacks = {("update", "leaderworkersets")}
        report = await cluster.roll(1)
        rule = '{apiGroups: ["leaderworkerset.x-k8s.io"], resources: [leaderworkersets], verbs: [update]}'
        assert rule in report.detail

    in_cluster(tmp_path, scenario)
