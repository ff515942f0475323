"""An engine of two ranks with vLLM's fault tolerance, in front of a simulated unit that does the work.

As vLLM 0.32 does (`v1/fault_tolerance/engine_core_sentinel.py`, `entrypoints/serve/fault_tolerance/`): an
exception in the loop of one rank makes all of them `unhealthy`. What is in flight is aborted: a whole answer
ends 200 with `finish_reason` "abort" and no text, a stream with that, or `[DONE]` alone. New requests wait
and all other pages say 200. A rank takes `retry` only while it is unhealthy, under an id of its own; else its
status says `ft_error` and that id. It ends when all ranks have been asked, since they build their group anew
together; until then each waits for the others. Newer versions have the same under `/v1`, and say `recovering`
meanwhile, with the requests kept.
"""

import asyncio
import time
import uuid
from collections.abc import Coroutine
from typing import Any, Self

import aiohttp
from aiohttp import web

HOST = "127.0.0.1"
RETRY_S = 0.5
"""What it takes to build the group of the ranks anew."""
HEALTHY, UNHEALTHY, DEAD, RECOVERING = "healthy", "unhealthy", "dead", "recovering"
_ABORTED = (
    b'{"id":"x","object":"chat.completion","created":1,"model":"sim","choices":[{"index":0,"message":{"role":'
)
_ABORTED += (
    b'"assistant","content":""},"finish_reason":"abort"}],"usage":{"prompt_tokens":1,"completion_tokens":0}}'
)

_ABORTED_EVENT = (
    b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"sim","choices":[{"index":0,'
)
_ABORTED_EVENT += b'"delta":{},"finish_reason":"abort"}]}\n\n'


class RankedEngine:
    """Inside its context its ranks answer at `urls`, the leader's first. `path` is that of the status."""

    def __init__(self, upstream: str, *, path: str = "/fault_tolerance/status") -> None:
        self._upstream = upstream
        self._path = path
        self.status = [HEALTHY, HEALTHY]
        self.info = ""
        self.retries: list[tuple[int, str, float]] = []
        """The rank, the id of the round and the time of each accepted retry."""
        self.healed_at = 0.0
        self._refused: dict[int, dict[str, str]] = {}
        self.urls: list[str] = []
        self._works = asyncio.Event()
        self._works.set()
        self._broken = asyncio.Event()
        self._runners: list[web.AppRunner] = []

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        for rank in range(len(self.status)):
            self.urls.append(await self._serve(rank))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._works.set()
        self._broken.set()
        for runner in self._runners:
            await runner.cleanup()
        await self._session.close()

    def fail(self, error: str = "RuntimeError", *, is_late: bool = False) -> None:
        """An exception in the loop of a rank: the other one waits in the same collective, and fails too.
        Where that `is_late`, only once the first one has left their group, as it does for a `retry`.
        """
        self.status, self.info = [UNHEALTHY, HEALTHY if is_late else UNHEALTHY], error
        self._works.clear()
        broken, self._broken = self._broken, asyncio.Event()
        broken.set()

    def stand_still(self) -> None:
        """It recovers, and keeps its requests meanwhile."""
        self.status = [RECOVERING, RECOVERING]
        self._works.clear()

    def heal(self) -> None:
        """All ranks work again."""
        self.status, self.info = [HEALTHY, HEALTHY], ""
        self.healed_at = time.monotonic()
        self._works.set()

    async def _serve(self, rank: int) -> str:
        async def answer(request: web.Request) -> web.StreamResponse:
            if request.path == self._path:
                return web.json_response(self._told(rank))
            if request.path == self._path.replace("status", "apply"):
                return await self._apply(rank, request)
            if "fault_tolerance" in request.path:
                return web.json_response({"detail": "Not Found"}, status=404)
            return await self._relay(request)

        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        self._runners.append(runner)
        site = web.TCPSite(runner, HOST, 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        return f"http://{HOST}:{port}"

    def _told(self, rank: int) -> dict[str, object]:
        info = {"fault_info": self.info} if self.status[rank] == UNHEALTHY else {}
        engines = [{"id": rank, "status": self.status[rank], **info, **self._refused.get(rank, {})}]
        return {"schema_version": 1, "total_engines": 1, "engines": engines}

    async def _apply(self, rank: int, request: web.Request) -> web.Response:
        asked = await request.json()
        if asked.get("instruction") != "retry":
            return web.json_response({"error": {"message": "Invalid instruction", "code": 400}}, status=400)
        name = own = asked.get("request_id") or str(uuid.uuid4())
        if not self._path.startswith("/v1/"):
            own = str(uuid.uuid4())
        if self.status[rank] == UNHEALTHY:
            self.retries.append((rank, name, time.monotonic()))
            if {each for each, _, _ in self.retries} == set(range(len(self.status))):
                asyncio.get_running_loop().call_later(RETRY_S, self.heal)
            else:
                self.status = [UNHEALTHY] * len(self.status)
        else:
            error = f"[FT] Rejecting retry on engine {rank}: status is {self.status[rank].upper()}"
            self._refused[rank] = {"last_ft_request_id": own, "ft_error": error}
        told = {"message": "Request accepted; poll the status for updates.", "request_id": own}
        return web.json_response(told, status=202)

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        is_work = request.method == "POST" and request.path.startswith("/v1/")
        if is_work and not self._works.is_set():
            await self._works.wait()
        broken = self._broken
        url = self._upstream + request.path_qs
        head = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        async with self._session.request(request.method, url, data=body, headers=head) as reply:
            if "event-stream" not in reply.content_type:
                if (whole := await _before(reply.read(), broken)) is None:
                    return web.Response(body=_ABORTED, content_type="application/json")
                return web.Response(body=whole, status=reply.status, content_type=reply.content_type)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            await response.prepare(request)
            has_begun = False
            while (part := await _before(reply.content.readany(), broken)) != b"":
                if part is None:
                    await response.write((_ABORTED_EVENT if has_begun else b"") + b"data: [DONE]\n\n")
                    break
                await self._works.wait()
                await response.write(part)
                has_begun = True
            await response.write_eof()
            return response


async def _before(coming: Coroutine[Any, Any, bytes], broken: asyncio.Event) -> bytes | None:
    """What comes, unless the engine breaks before it."""
    reading = asyncio.create_task(coming)
    breaking = asyncio.create_task(broken.wait())
    await asyncio.wait((reading, breaking), return_when=asyncio.FIRST_COMPLETED)
    if breaking.done():
        reading.cancel()
        return None
    breaking.cancel()
    return reading.result()
