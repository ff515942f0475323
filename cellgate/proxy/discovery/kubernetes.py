"""Objects of a Kubernetes cluster, listed and watched through the asyncio client.

1. A watch continues from the last version received, bookmarks included; only 410 Gone needs a new list.
2. A watch that ends or breaks is not a failure. The source fails when the next request fails.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import orjson

from cellgate.proxy.discovery.base import SourceError
from cellgate.proxy.orchestrators.kubernetes_api import GONE, REQUEST_S, ApiError, connected

WATCH_S = 60
"""How long one watch lasts: the server ends it, and the next continues from there."""
QUIET_S = 15.0
"""A server that sends nothing for this long beyond that counts as lost, even if the connection is open."""
SHORT_S = 1.0
"""The least time between the starts of two watches, to protect the server."""
Objects = dict[str, dict[str, Any]]
"""Objects by name."""


class _GoneError(Exception):
    """The version to continue from is too old: list everything again."""


async def pods(kubeconfig: str, namespace: str, selector: str) -> AsyncGenerator[Objects, None]:
    """The pods with these labels: once when listed, then at each change. The mapping is the same, changed.

    `kubeconfig` empty: what this pod was given, else the user's file. Raises SourceError.
    """
    try:
        async with connected(kubeconfig) as connection:
            client: Any = importlib.import_module("kubernetes_asyncio.client")
            api = client.CoreV1Api(connection)
            while True:
                try:
                    async for known in _list_and_watch(api, namespace, selector):
                        yield known
                except _GoneError:
                    continue
    except ApiError as error:
        raise SourceError(str(error)) from None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise SourceError(f"the API server cannot be reached: {error!r}") from None


async def _list_and_watch(api: Any, namespace: str, selector: str) -> AsyncGenerator[Objects, None]:
    listed = await _get(api, namespace, selector, (REQUEST_S, REQUEST_S))
    page = orjson.loads(await listed.read())
    known: Objects = {pod["metadata"]["name"]: pod for pod in page["items"]}
    version = page["metadata"]["resourceVersion"]
    yield known
    while True:
        began_at = asyncio.get_running_loop().time()
        async for events in _events(api, namespace, selector, version):
            version = events[-1]["object"]["metadata"]["resourceVersion"]
            changes = sum(_changes(known, event) for event in events)
            if changes:
                yield known
        if asyncio.get_running_loop().time() - began_at < SHORT_S:
            await asyncio.sleep(SHORT_S)


async def _events(api: Any, namespace: str, selector: str, version: str) -> AsyncGenerator[list[Any], None]:
    """The events of one watch, as many at once as have come. Ends with it; raises _GoneError."""
    options = {
        "watch": True,
        "resource_version": version,
        "allow_watch_bookmarks": True,
        "timeout_seconds": WATCH_S,
    }
    response = await _get(api, namespace, selector, (REQUEST_S, WATCH_S + QUIET_S), **options)
    rest = b""
    try:
        async for data in response.content.iter_any():
            *lines, rest = (rest + data).split(b"\n")
            events = [orjson.loads(line) for line in lines]
            for event in events:
                if event["type"] == "ERROR":
                    raise _refusal(event["object"].get("code"), event["object"].get("message"))
            if events:
                yield events
    except aiohttp.ClientPayloadError:
        # The connection broke: the next watch continues from there.
        return
    finally:
        response.close()


async def _get(api: Any, namespace: str, selector: str, timeouts: tuple[float, float], **options: Any) -> Any:
    """One request for pods. Timeouts: to connect, and between two reads."""
    response = await api.list_namespaced_pod(
        namespace, label_selector=selector, _preload_content=False, _request_timeout=timeouts, **options
    )
    if response.status != 200:
        reason = (await response.read())[:300].decode(errors="replace")
        response.close()
        raise _refusal(response.status, reason)
    return response


def _refusal(status: int | None, reason: object) -> Exception:
    if status == GONE:
        return _GoneError()
    return SourceError(f"the API server refuses: {status} {' '.join(str(reason).split())}")


def _changes(known: Objects, event: Any) -> bool:
    """Apply an event; False for one that changes nothing, such as a bookmark."""
    match event["type"]:
        case "ADDED" | "MODIFIED":
            known[event["object"]["metadata"]["name"]] = event["object"]
        case "DELETED":
            known.pop(event["object"]["metadata"]["name"], None)
        case _:
            return False
    return True
