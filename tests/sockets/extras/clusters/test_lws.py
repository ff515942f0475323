"""Units of a LeaderWorkerSet, asked of a server that answers what a test says."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from kubernetes_asyncio.config import incluster_config

from cellgate.extras import orchestrators
from cellgate.extras.clusters import lws
from cellgate.proxy.config.sources import LwsSource
from cellgate.proxy.discovery.base import Found, SourceError
from cellgate.router.nouns import Unit
from loadtests.kit.fake_kubernetes import FakeKubernetes, group_pod, pod
from tests.kubernetes_api import kubernetes_api, rights_given, rights_used

# Discovery of a LeaderWorkerSet by the official client, against an API server that speaks the protocol.

PATIENCE_S = 10.0
LIKE_SET = Unit(name="", cell="c", url="")


async def add_group(api: FakeKubernetes, number: int, *, size: int = 2) -> None:
    for rank in range(size):
        ip = f"127.0.{number}.{rank + 1}"
        await api.put(group_pod("big", number, rank, size=size, uid=f"{number}/{rank}", ip=ip))


def source(api: FakeKubernetes, folder: Path, **keys: Any) -> LwsSource:
    kubeconfig = api.kubeconfig(folder)
    return LwsSource(LIKE_SET, "big", 8000, namespace="prod", agent_port=9902, kubeconfig=kubeconfig, **keys)


async def told_of_set(follow: AsyncGenerator[Found, None]) -> Found:
    async with asyncio.timeout(PATIENCE_S):
        return await anext(follow)


def urls(found: Found) -> dict[str, str]:
    return {unit.name: unit.url for unit in found.units}


def held_against(found: Found) -> dict[str, str]:
    return {doubt.node: doubt.reason for doubt in found.suspicions}


async def test_groups_are_listed_as_units_with_their_nodes_and_agents(tmp_path: Path) -> None:
    async with kubernetes_api() as api:
        await add_group(api, 0)
        await api.put(pod("other-0", labels={}, annotations={}, uid="x", ip="127.0.9.9"))
        async with aclosing(lws.follow(source(api, tmp_path))) as follow:
            found = await told_of_set(follow)
    (unit,) = found.units
    assert (unit.name, unit.cell, unit.url) == ("big-0", "c", "http://127.0.0.1:8000")
    assert [(node.name, node.role.value, node.agent) for node in unit.nodes] == [
        ("big-0", "leader", "127.0.0.1:9902"),
        ("big-0-1", "follower", "127.0.0.2:9902"),
    ]
    assert not found.suspicions
    assert [name for name, _ in found.epochs] == ["big-0"]


async def test_each_change_of_a_pod_is_told_as_it_comes(tmp_path: Path) -> None:
    async with kubernetes_api() as api:
        await add_group(api, 0)
        async with aclosing(lws.follow(source(api, tmp_path))) as follow:
            await told_of_set(follow)
            await api.delete("big-0-1")
            assert held_against(await told_of_set(follow)) == {"big-0-1": "its pod is being deleted"}
            await api.remove("big-0-1")
            assert held_against(await told_of_set(follow)) == {"group": "1 pod, its size is 2 (missing: 1)"}
            await api.put(group_pod("big", 0, 1, size=2, uid="again", ip="127.0.0.3"))
            assert not (await told_of_set(follow)).suspicions
            await api.remove("big-0")
            assert urls(await told_of_set(follow)) == {"big-0": ""}
            await api.remove("big-0-1")
            assert (await told_of_set(follow)).units == ()
        assert api.lists == 1


async def test_a_watch_that_the_server_ends_goes_on_from_the_last_bookmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lws, "WATCH_S", 1)
    monkeypatch.setattr(lws, "SHORT_S", 0.1)
    async with kubernetes_api(bookmark_s=0.2) as api:
        await add_group(api, 0)
        async with aclosing(lws.follow(source(api, tmp_path))) as follow:
            await told_of_set(follow)
            # What others have done moves the version, and only a bookmark tells it.
            await api.put(pod("other-0", labels={}, annotations={}, uid="x"))
            change = asyncio.create_task(told_of_set(follow))
            await api.until_watched(2)
            api.compact()
            await api.delete("big-0")
            assert held_against(await change) == {"big-0": "its pod is being deleted"}
        assert (api.watched, api.lists) == (["2", "3"], 1)


async def test_a_version_that_is_gone_is_answered_with_a_new_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lws, "SHORT_S", 0.2)
    async with kubernetes_api() as api:
        await add_group(api, 0)
        async with aclosing(lws.follow(source(api, tmp_path))) as follow:
            await told_of_set(follow)
            change = asyncio.create_task(told_of_set(follow))
            await api.until_watched(1)
            api.cut()
            await add_group(api, 1)
            await api.remove("big-0")
            await api.remove("big-0-1")
            api.compact()
            assert urls(await change) == {"big-1": "http://127.0.1.1:8000"}
        assert api.lists == 2


async def test_a_watch_that_is_cut_goes_on_where_it_was_and_events_of_any_length_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lws, "SHORT_S", 0.05)
    async with kubernetes_api() as api:
        await add_group(api, 0)
        async with aclosing(lws.follow(source(api, tmp_path))) as follow:
            await told_of_set(follow)
            change = asyncio.create_task(told_of_set(follow))
            await api.until_watched(1)
            api.cut()
            await api.until_watched(2)
            long = group_pod("big", 0, 1, size=2, uid="again", ip="127.0.0.3")
            long["metadata"]["annotations"]["long"] = "x" * 3_000_000
            await api.put(long)
            assert (await change).units[0].nodes[1].agent == "127.0.0.3:9902"
        assert (api.watched, api.lists) == (["2", "2"], 1)


async def test_a_server_that_is_gone_or_refuses_is_a_loss_that_says_why(tmp_path: Path) -> None:
    async with kubernetes_api() as api:
        (tmp_path / "empty").write_text("")
        nowhere = LwsSource(LIKE_SET, "big", 8000, kubeconfig=str(tmp_path / "empty"))
        with pytest.raises(SourceError, match="no way to the API server is configured"):
            await told_of_set(lws.follow(nowhere))
        the_set = source(api, tmp_path)
        api.refuse_with = 403
        with pytest.raises(SourceError, match=r"refuses: 403 .*told to refuse"):
            await told_of_set(lws.follow(the_set))
        await api.stop()
        with pytest.raises(SourceError, match="cannot be reached"):
            await told_of_set(lws.follow(the_set))


async def test_in_a_cluster_the_pods_own_account_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("of-the-pod")
    (tmp_path / "namespace").write_text("prod\n")
    pem = Path(__file__).parents[3] / "wire" / "localhost.pem"
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(pem))
    monkeypatch.setattr(orchestrators, "_NAMESPACE_FILE", tmp_path / "namespace")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pem)
    api = await FakeKubernetes().start(tls)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
    try:
        await add_group(api, 0)
        async with aclosing(lws.follow(LwsSource(LIKE_SET, "big", 8000))) as follow:
            assert urls(await told_of_set(follow)) == {"big-0": "http://127.0.0.1:8000"}
    finally:
        await api.stop()
    assert api.callers == {("prod", "Bearer of-the-pod")}


def on_nodes(api: FakeKubernetes, first: int = 0) -> None:
    for number in range(first, 2):
        labels = {"topology.kubernetes.io/region": "r", "topology.kubernetes.io/zone": f"r-{number}"}
        api.objects.put("nodes", "", {"metadata": {"name": f"n-{number}", "labels": labels}})


async def placed(api: FakeKubernetes, folder: Path) -> list[list[tuple[str, ...]]]:
    """The places of a unit's nodes: at first, and after a change of another pod."""
    for number in range(2):
        made = group_pod("big", number, 0, size=1, uid=f"{number}/n", ip=f"127.0.{number}.1")
        made["spec"]["nodeName"] = f"n-{number}"
        await api.put(made)
    found = []
    async with aclosing(lws.follow(source(api, folder, places=True))) as follow:
        for _ in range(2):
            found.append([node.place for unit in (await told_of_set(follow)).units for node in unit.nodes])
            await api.ready("big-0", False)
    return found


async def test_nodes_have_the_places_that_labels_say_and_each_is_asked_for_once(tmp_path: Path) -> None:
    async with kubernetes_api() as api:
        on_nodes(api)
        found = await placed(api, tmp_path)
        assert found == [[("r", "r-0"), ("r", "r-1")]] * 2
        rules = Path(__file__).parents[4] / "deploy" / "kubernetes" / "node-places-rbac.yaml"
        assert rights_used(api) == rights_given(rules) | {("list", "", "pods"), ("watch", "", "pods")}
    # A node that is gone keeps no place from another.
    async with kubernetes_api() as api:
        on_nodes(api, first=1)
        assert await placed(api, tmp_path) == [[(), ("r", "r-1")]] * 2


async def test_without_the_right_to_get_nodes_units_are_found_without_places(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with kubernetes_api() as api:
        on_nodes(api)
        api.lacks = {("get", "nodes")}
        assert await placed(api, tmp_path) == [[(), ()]] * 2
    assert caplog.text.count("places of nodes are not known: the gate's account lacks a right") == 1
