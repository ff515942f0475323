"""Plain pods as units: what their labels, their readiness and their end mean, by a fake API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cellgate.proxy.config.sources import PodsSource
from cellgate.proxy.discovery import kubernetes, pods
from cellgate.proxy.discovery.base import Found, SourceError
from cellgate.proxy.discovery.pods import PoolOfPods, follow_pods, pool_of
from cellgate.router.nouns import Unit
from loadtests.kit.fake_kubernetes import FakeKubernetes, Json, pod

PATIENCE_S = 20.0
LIKE = Unit("", "c", "", ("tiny",))
LABELS = {"app": "vllm", "role": "decode"}


@asynccontextmanager
async def following(
    folder: Path, api: FakeKubernetes, **keys: Any
) -> AsyncIterator[AsyncGenerator[Found, None]]:
    """The source of pods with these labels, or with other keys."""
    keys = keys or {"selector": "app=vllm,role=decode", "port": 8000}
    source = PodsSource(LIKE, namespace="prod", kubeconfig=api.kubeconfig(folder), **keys)
    async with aclosing(follow_pods(source)) as follow:
        yield follow


@asynccontextmanager
async def cluster(*names: str) -> AsyncIterator[FakeKubernetes]:
    """Pods that are ready, at 127.0.0.1 and on."""
    api = await FakeKubernetes(bookmark_s=0.2).start()
    try:
        for number, name in enumerate(names, 1):
            await api.put(engine(name, f"127.0.0.{number}"))
        yield api
    finally:
        await api.stop()


def engine(name: str, ip: str, uid: str = "", **changes: Any) -> Json:
    return pod(name, labels=LABELS, annotations={}, uid=uid or f"uid of {name}", ip=ip, **changes)


async def told(follow: AsyncGenerator[Found, None]) -> dict[str, str]:
    """The URL of each unit, the next time that they are told."""
    async with asyncio.timeout(PATIENCE_S):
        found = await anext(follow)
    assert [name for name, _ in found.epochs] == [unit.name for unit in found.units]
    return {unit.name: unit.url for unit in found.units}


async def test_each_ready_pod_with_the_labels_is_a_unit(tmp_path: Path) -> None:
    async with cluster("a", "b") as api, following(tmp_path, api) as follow:
        await api.put(pod("other", labels={"app": "vllm"}, annotations={}, uid="x", ip="127.0.9.9"))
        await api.put(engine("pending", ""))
        found = await told(follow)
        assert found == {"a": "http://127.0.0.1:8000", "b": "http://127.0.0.2:8000"}


async def test_a_pod_that_is_not_ready_goes_has_ended_or_lost_its_label_is_no_unit_from_then_on(
    tmp_path: Path,
) -> None:
    async with cluster("a", "b") as api, following(tmp_path, api) as follow:
        await told(follow)
        await api.ready("a", ready=False)
        assert list(await told(follow)) == ["b"]
        await api.ready("a")
        assert list(await told(follow)) == ["a", "b"]
        await api.change("b", lambda pod: pod["metadata"]["labels"].pop("role"))
        assert list(await told(follow)) == ["a"]
        await api.change("b", lambda pod: pod["metadata"]["labels"].update(role="decode"))
        assert list(await told(follow)) == ["a", "b"]
        await api.delete("a")
        assert list(await told(follow)) == ["b"]
        await api.remove("a")
        assert list(await told(follow)) == ["b"]
        # Canaries decide where nobody is ready.
        await api.ready("b", ready=False)
        assert list(await told(follow)) == ["b"]
        await api.change("b", lambda pod: pod["status"].update(phase="Failed"))
        assert await told(follow) == {}


async def test_an_address_that_another_pod_has_now_is_another_unit_s_with_another_epoch(
    tmp_path: Path,
) -> None:
    async with cluster("a") as api, following(tmp_path, api) as follow:
        assert await told(follow) == {"a": "http://127.0.0.1:8000"}
        await api.remove("a")
        assert await told(follow) == {}
        await api.put(engine("b", "127.0.0.1"))
        assert await told(follow) == {"b": "http://127.0.0.1:8000"}
        # Of a StatefulSet the next pod has the same name.
        await api.put(engine("b", "127.0.0.1", uid="another"))
        async with asyncio.timeout(PATIENCE_S):
            assert (await anext(follow)).epochs == (("b", "another"),)


@pytest.mark.parametrize("trouble", ["cut", "compacted", "restarted"])
async def test_whatever_befalls_a_watch_what_happened_meanwhile_is_told(
    tmp_path: Path, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "SHORT_S", 0.05)
    async with cluster("a", "b") as api, following(tmp_path, api) as follow:
        await told(follow)
        change = asyncio.create_task(told(follow))
        await api.until_watched(1)
        if trouble == "restarted":
            await api.stop()
            await api.ready("a", ready=False)
            with pytest.raises(SourceError):
                await change
            await api.start()
            async with following(tmp_path, api) as again:
                assert list(await told(again)) == ["b"]
            return
        api.cut()
        await api.ready("a", ready=False)
        if trouble == "compacted":
            api.compact()
        assert list(await change) == ["b"]


async def test_what_the_server_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    async with cluster("a") as api:
        api.refuse_with = 403
        async with following(tmp_path, api) as follow:
            with pytest.raises(SourceError, match="403"):
                await told(follow)
        async with following(tmp_path, api, pool="none") as follow:
            with pytest.raises(SourceError, match="none"):
                await told(follow)


async def test_a_pool_says_which_pods_and_which_ports_and_may_change_its_mind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "POOL_S", 0.1)
    spec: dict[str, Any] = {"selector": {"matchLabels": LABELS}, "targetPorts": [{"number": 8000}]}
    pool = {"metadata": {"name": "llm"}, "spec": spec}
    async with cluster("a") as api:
        api.objects.put("inferencepools", "prod", pool)
        async with following(tmp_path, api, pool="llm") as follow:
            assert await told(follow) == {"a": "http://127.0.0.1:8000"}
            spec["targetPorts"] = [{"number": 8000}, {"number": 8001}]
            api.objects.put("inferencepools", "prod", pool)
            assert await told(follow) == {
                "a-8000": "http://127.0.0.1:8000",
                "a-8001": "http://127.0.0.1:8001",
            }
            spec["selector"] = {"matchLabels": {"app": "sglang"}}
            api.objects.put("inferencepools", "prod", pool)
            assert await told(follow) == {}


def test_pools_of_both_versions_of_the_api_are_read() -> None:
    old = {"spec": {"selector": {"b": "2", "a": "1"}, "targetPortNumber": 8000}}
    assert pool_of(old) == PoolOfPods("a=1,b=2", (8000,))
    new = {"spec": {"selector": {"matchLabels": {"a": "1"}}, "targetPorts": [{"number": 8000}]}}
    assert pool_of(new) == PoolOfPods("a=1", (8000,))
    assert pool_of(new, 9000) == PoolOfPods("a=1", (9000,))
    for strange in ({}, {"spec": None}, {"spec": {"targetPorts": [{"number": "8000"}, {}]}}):
        assert pool_of(strange) == PoolOfPods("", ())
