"""A Kubernetes API server for tests and drills: pods are listed, watched, evicted; other objects are kept.

Its protocol is the real one ("Kubernetes API Concepts", efficient detection of changes): versions, bookmarks,
ends after timeoutSeconds, 410 for a version that is compacted away. It breaks off or refuses when told to.
"""

import asyncio
import itertools
import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp.web
import orjson
import yaml

from loadtests.kit.fake_objects import Asked, FakeObjects, asked, forbidden, merged, refusal

Json = dict[str, Any]
Answer = aiohttp.web.StreamResponse
Handler = Callable[[aiohttp.web.Request], Awaitable[Answer]]

_EVICTION = "Cannot evict pod as it would violate the pod's disruption budget."
_BUDGET = "The disruption budget big needs 2 healthy pods and has 2 currently"
PREFIX = "leaderworkerset.sigs.k8s.io/"


def pod(
    name: str,
    *,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    uid: str,
    ip: str = "",
    ready: bool = True,
) -> Json:
    """A pod with one container, that runs where it has an address."""
    state = {"running": {}} if ip else {"waiting": {"reason": "ContainerCreating"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "uid": uid, "labels": dict(labels), "annotations": dict(annotations)},
        "spec": {"containers": [{"name": "engine"}]},
        "status": {
            "phase": "Running" if ip else "Pending",
            **({"podIP": ip} if ip else {}),
            "conditions": [{"type": "Ready", "status": str(ready and bool(ip))}],
            "containerStatuses": [{"name": "engine", "ready": ready, "state": state}],
        },
    }


def group_pod(lws: str, group: int, rank: int, *, size: int, uid: str, key: str = "", **status: Any) -> Json:
    """A pod as the LeaderWorkerSet controller makes it; a group's key is usually made of its name alone."""
    name = f"{lws}-{group}" + (f"-{rank}" if rank else "")
    labels = {
        f"{PREFIX}name": lws,
        f"{PREFIX}group-index": str(group),
        f"{PREFIX}group-key": key or f"{lws}{group:08x}",
        f"{PREFIX}worker-index": str(rank),
    }
    return pod(name, labels=labels, annotations={f"{PREFIX}size": str(size)}, uid=uid, **status)


class FakeKubernetes:
    """The server, on the running loop. `bookmark_s` is how often a watch is told the newest version."""

    def __init__(self, *, bookmark_s: float = 60.0) -> None:
        self.port = 0
        self.lists = 0
        self.watched: list[str] = []
        """The versions that watches went on from."""
        self.callers: set[tuple[str, str]] = set()
        """Who asked about which namespace: (namespace, Authorization)."""
        self.refuse_with = 0
        """A status with which every request is refused; 0: none."""
        self.asked: set[Asked] = set()
        """What was asked for, whether or not it was answered."""
        self.lacks: set[tuple[str, str]] = set()
        """Rights that the account does not have: (verb, resource)."""
        self.disruptions: int | None = None
        """How many pods may still be evicted; None: all."""
        self.objects = FakeObjects()
        self._bookmark_s = bookmark_s
        self._pods: dict[str, Json] = {}
        self._versions = itertools.count(1)
        self._version = 0
        self._history: list[tuple[int, str, Json]] = []
        self._oldest = 0
        self._changed = asyncio.Condition()
        self._streams: dict[aiohttp.web.StreamResponse, asyncio.Transport] = {}
        self._runner: aiohttp.web.AppRunner | None = None

    async def start(self, tls: ssl.SSLContext | None = None) -> Self:
        """Listen, on the port that it had before, if any."""
        app = aiohttp.web.Application(middlewares=[self._heed_rights])
        pods = "/api/v1/namespaces/{namespace}/pods"
        app.router.add_get(pods, self._answer)
        app.router.add_route("*", pods + "/{name}", self._change)
        app.router.add_post(pods + "/{name}/eviction", self._change)
        app.router.add_route("*", "/{path:.*}", self.objects.answer)
        self._runner = aiohttp.web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = aiohttp.web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True, ssl_context=tls)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        """Listen no more and break off what runs."""
        self.cut()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def kubeconfig(self, folder: Path) -> str:
        """The name of a file that leads here."""
        path = folder / "kubeconfig.yaml"
        here = {"name": "fake", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
        context = {"name": "fake", "context": {"cluster": "fake", "user": "nobody"}}
        keys = {"clusters": [here], "contexts": [context], "users": [{"name": "nobody", "user": {}}]}
        path.write_text(yaml.safe_dump({"kind": "Config", "current-context": "fake", **keys}))
        return str(path)

    # -- what happens in the cluster -----------------------------------------------------------------------

    async def put(self, pod: Json) -> None:
        """A pod is there, or is there again."""
        known = pod["metadata"]["name"] in self._pods
        await self._note("MODIFIED" if known else "ADDED", pod)

    async def change(self, name: str, change: Callable[[Json], object]) -> None:
        """Change a pod that is there."""
        pod: Json = orjson.loads(orjson.dumps(self._pods[name]))
        change(pod)
        await self._note("MODIFIED", pod)

    async def delete(self, name: str) -> None:
        """A pod is told to go: it is there until `remove`."""
        await self.change(name, lambda pod: pod["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"))

    async def ready(self, name: str, ready: bool = True) -> None:
        """A pod's readiness probe says so."""
        await self.change(name, lambda pod: pod["status"]["conditions"][0].update(status=str(ready)))

    async def remove(self, name: str) -> None:
        """A pod is gone."""
        await self._note("DELETED", self._pods[name])

    def pods(self) -> list[Json]:
        """Those that are there."""
        return list(self._pods.values())

    async def until_watched(self, times: int) -> None:
        """Return when there have been so many watches."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.watched) >= times)

    def compact(self) -> None:
        """Forget all that happened: whoever is not up to date gets 410."""
        self._history.clear()
        self._oldest = self._version

    def cut(self) -> None:
        """Break off every watch, in the middle."""
        for transport in self._streams.values():
            transport.abort()

    async def say(self, data: bytes) -> None:
        """Send this to every watch, whatever it means."""
        for response in list(self._streams):
            await response.write(data)

    async def _note(self, kind: str, pod: Json) -> None:
        self._version = next(self._versions)
        name = pod["metadata"]["name"]
        pod = pod | {"metadata": pod["metadata"] | {"resourceVersion": str(self._version)}}
        if kind == "DELETED":
            del self._pods[name]
        else:
            self._pods[name] = pod
        self._history.append((self._version, kind, pod))
        async with self._changed:
            self._changed.notify_all()

    # -- who asks ------------------------------------------------------------------------------------------

    @aiohttp.web.middleware
    async def _heed_rights(
        self, request: aiohttp.web.Request, handler: Handler
    ) -> aiohttp.web.StreamResponse:
        what = asked(request)
        self.asked.add(what)
        if (what.verb, what.resource) in self.lacks:
            return forbidden(what)
        return await handler(request)

    async def _change(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        """A pod is merged with a patch, or told to go: the owner of the pods makes new ones, or does not."""
        what, name = asked(request), request.match_info["name"]
        if (pod := self._pods.get(name)) is None:
            return refusal(404, "NotFound", f'pods "{name}" not found')
        body: Json = orjson.loads(await request.read())
        if what.verb == "patch":
            await self._note("MODIFIED", merged(pod, body))
            return aiohttp.web.json_response(self._pods[name])
        wanted = body.get("deleteOptions", body)["preconditions"]["uid"]
        if wanted != pod["metadata"]["uid"]:
            told = f"Precondition failed: UID in precondition: {wanted}, UID in object meta: "
            return refusal(409, "Conflict", told + pod["metadata"]["uid"])
        if what.verb == "create" and self.disruptions is not None:
            if not self.disruptions:
                cause = {"reason": "DisruptionBudget", "message": _BUDGET}
                return refusal(429, "TooManyRequests", _EVICTION, causes=[cause])
            self.disruptions -= 1
        await self.delete(name)
        return aiohttp.web.json_response({"kind": "Status", "status": "Success"}, status=201)

    async def _answer(self, request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        caller = request.match_info["namespace"], request.headers.get("Authorization", "")
        self.callers.add(caller)
        if self.refuse_with:
            status = {"kind": "Status", "code": self.refuse_with, "message": "told to refuse"}
            return aiohttp.web.json_response(status, status=self.refuse_with)
        if request.query.get("watch") != "True":
            self.lists += 1
            items = [pod for pod in self._pods.values() if _selected(pod, request)]
            version = {"resourceVersion": str(self._version)}
            return aiohttp.web.json_response({"kind": "PodList", "metadata": version, "items": items})
        async with self._changed:
            self.watched.append(request.query["resourceVersion"])
            self._changed.notify_all()
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "application/json;stream=watch"})
        await response.prepare(request)
        assert request.transport is not None
        self._streams[response] = request.transport
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                await self._stream(request, response)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            del self._streams[response]
        return response

    async def _stream(self, request: aiohttp.web.Request, response: aiohttp.web.StreamResponse) -> None:
        told = int(request.query["resourceVersion"])
        while True:
            if told < self._oldest:
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                return await _send(response, "ERROR", gone)
            for version, kind, pod in [one for one in self._history if one[0] > told]:
                if _selected(pod, request):
                    await _send(response, kind, pod)
                elif kind == "MODIFIED":
                    # What is selected no longer is gone for who watches.
                    await _send(response, "DELETED", pod)
                told = version
            try:
                async with asyncio.timeout(self._bookmark_s), self._changed:
                    while self._version == told:
                        await self._changed.wait()
            except TimeoutError:
                mark = {"kind": "Pod", "metadata": {"resourceVersion": str(self._version)}}
                if request.query.get("allowWatchBookmarks") == "True":
                    await _send(response, "BOOKMARK", mark)
                    told = self._version


def _selected(pod: Json, request: aiohttp.web.Request) -> bool:
    wanted = dict(part.split("=", 1) for part in request.query.get("labelSelector", "").split(",") if part)
    return all(pod["metadata"]["labels"].get(key) == value for key, value in wanted.items())


async def _send(response: aiohttp.web.StreamResponse, kind: str, thing: Json) -> None:
    await response.write(orjson.dumps({"type": kind, "object": thing}) + b"\n")
