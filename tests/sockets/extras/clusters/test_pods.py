"""Plain pods as units: what their labels, their readiness and their end mean, by a fake API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from cellgate.extras.clusters import lws, pods
from cellgate.extras.clusters.pods import PoolOfPods, pool_of
from cellgate.proxy.config.sources import PodsSource
from cellgate.proxy.discovery.base import Found, SourceError
from cellgate.router.nouns import Unit
from loadtests.kit.fake_kubernetes import FakeKubernetes, Json, pod
from loadtests.kit.waiting import until as waits_until

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
    async with aclosing(pods.follow(source)) as follow:
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


Lost = list[str]
"""What the source has said of each loss."""
Trouble = Callable[[FakeKubernetes, Lost], Awaitable[object]]


def _refuses(status: int) -> Trouble:
    async def refuse(api: FakeKubernetes, lost: Lost) -> None:
        api.refuse_with = status
        api.cut()
        assert await waits_until(lambda: bool(lost), PATIENCE_S)
        api.refuse_with = 0
        assert str(status) in lost[0]

    return refuse


async def _is_away(api: FakeKubernetes, lost: Lost) -> None:
    await api.stop()
    assert await waits_until(lambda: bool(lost), PATIENCE_S)
    await api.start()


def _says(data: bytes) -> Trouble:
    return lambda api, _lost: api.say(data)


async def _comes_back_as_another(api: FakeKubernetes, _lost: Lost) -> None:
    api.cut()
    await api.remove("a")
    await api.put(engine("a", "127.0.0.1", uid="another"))


async def _is_cut_and_compacted(api: FakeKubernetes, _lost: Lost) -> None:
    api.cut()
    await api.put(pod("other", labels={}, annotations={}, uid="x"))
    api.compact()


async def _says_it_again(api: FakeKubernetes, _lost: Lost) -> None:
    old = orjson.dumps({"type": "MODIFIED", "object": api.pods()[0]}) + b"\n"
    await api.say(old + old)


def _error(status: int) -> bytes:
    said = {"kind": "Status", "code": status, "message": "etcd"}
    return orjson.dumps({"type": "ERROR", "object": said}) + b"\n"


async def _cuts(api: FakeKubernetes, _lost: Lost) -> None:
    api.cut()


TROUBLES: dict[str, Trouble] = {
    "a watch is cut": _cuts,
    "it is cut, and its version is gone": _is_cut_and_compacted,
    "its version is gone in the middle": _says(_error(410)),
    "the server is away": _is_away,
    "the server refuses": _refuses(403),
    "the server fails": _refuses(500),
    "the server has too much to do": _refuses(429),
    "an error in the middle": _says(_error(500)),
    "half an event": _says(b'{"type": "MOD'),
    "no JSON": _says(b"<html>\n"),
    "no event": _says(b"{}\n[]\nnull\n"),
    "an event again": _says_it_again,
    "a pod of the same name": _comes_back_as_another,
}


@pytest.mark.parametrize("by", ["selector", "pool"])
@pytest.mark.parametrize("trouble", TROUBLES)
async def test_whatever_befalls_a_watch_what_happened_meanwhile_is_told_and_nothing_else(
    tmp_path: Path, trouble: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lws, "SHORT_S", 0.05)
    monkeypatch.setattr(pods, "POOL_S", 0.1)
    spec: Json = {"selector": {"matchLabels": LABELS}, "targetPorts": [{"number": 8000}]}
    async with cluster("a", "b") as api, asyncio.timeout(2 * PATIENCE_S):
        api.objects.put("inferencepools", "prod", {"metadata": {"name": "llm"}, "spec": spec})
        keys = {"pool": "llm"} if by == "pool" else {}
        seen: list[list[str]] = []
        lost: Lost = []
        task = asyncio.create_task(_follow(tmp_path, api, keys, seen, lost))
        await api.until_watched(1)
        await TROUBLES[trouble](api, lost)
        await api.ready("a", ready=False)
        assert await waits_until(lambda: bool(seen) and seen[-1] == ["b"], PATIENCE_S)
        assert all(each in (["a", "b"], ["b"]) for each in seen), seen
        task.cancel()


async def _follow(folder: Path, api: FakeKubernetes, keys: Json, seen: list[list[str]], lost: Lost) -> None:
    """What a source tells; when it is lost it is asked again."""
    while True:
        async with following(folder, api, **keys) as follow:
            try:
                async for found in follow:
                    seen.append([unit.name for unit in found.units])
            except SourceError as error:
                lost.append(str(error))


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
