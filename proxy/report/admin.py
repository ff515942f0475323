"""The application behind the admin port: what the gate believes, why, and the operator's hand on it.
All is answered from memory, and what load balancers ask most often not even here: see herald.py.

Errors are JSON, `{"error": {"code", "message"}}`, and the message says what to do. Who may do what: trust.py.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from math import inf
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from probes.canary import Canary
from proxy.failure import Failure
from proxy.report.envoy_health import Headers, readyz_headers, unit_headers
from proxy.report.events import Action, Event, EventLog, Follower
from proxy.report.log import log_line
from proxy.report.metrics import Metrics
from proxy.report.page import load_page
from proxy.report.peers import Peers
from proxy.report.ready import as_json, readiness, unit_health
from proxy.report.status import status
from proxy.report.trust import refusal
from proxy.report.unit_view import unit_page, unit_view
from router.board import Board
from router.desk import Desk

HEARTBEAT_S = 10.0
SEND_TIMEOUT_S = 30.0
"""How long a follower of the live stream may not read at all before its connection is dropped."""

NAMES_SHOWN = 20

_CHALLENGE = {"WWW-Authenticate": "Bearer"}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Explain = Callable[[Mapping[str, str], bytes | None], dict[str, Any] | Failure]


def _nobody_looks(_unit: str, _probe: str) -> float | None:
    return None


@dataclass(frozen=True, slots=True)
class AdminView:
    """What the admin port needs. `set_drain(unit, drained)` is False when there is no such unit;
    `due_s(unit, probe)` is in how many seconds a probe looks again, None when it does not; `waiting` is how
    many requests wait for a unit; `explain` is Choice.explain (choice.py).
    """

    board: Board
    events: EventLog
    metrics: Metrics
    now: Callable[[], float]
    stopping: Callable[[], bool]
    set_drain: Callable[[str, bool], bool]
    token: str | None
    peers: Peers
    explain: Explain
    due_s: Callable[[str, str], float | None] = _nobody_looks
    waiting: Callable[[], int] = int


def make_admin(view: AdminView) -> web.Application:
    """The application behind the admin port."""
    admin = _Admin(view)
    app = web.Application(middlewares=[admin.guard])
    app.add_routes(
        [
            web.get("/", admin.page),
            web.get("/livez", admin.livez),
            web.get("/readyz", admin.readyz),
            web.get("/metrics", admin.metrics),
            web.get("/status", admin.status),
            web.get("/units", admin.units),
            web.get("/units/{name}", admin.unit),
            web.post("/units/{name}/drain", admin.drain),
            web.post("/units/{name}/undrain", admin.undrain),
            web.post("/cells/{name}/drain", admin.drain_cell),
            web.post("/cells/{name}/undrain", admin.undrain_cell),
            web.get("/explain", admin.explain),
            web.post("/explain", admin.explain),
            web.get("/events", admin.events, allow_head=False),
            web.get("/healthz/unit/{name}", admin.unit_health),
        ]
    )

    async def end_streams(_: web.Application) -> None:
        view.events.close()

    app.on_shutdown.append(end_streams)
    return app


def admin_runner(view: AdminView) -> web.AppRunner:
    """A runner for `make_admin`: without an access log, and a caller that leaves ends its stream."""
    return web.AppRunner(make_admin(view), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)


class _Admin:
    """The handlers; they read the view and hold nothing."""

    def __init__(self, view: AdminView) -> None:
        self._view = view
        self._page, self._page_headers = load_page()

    @web.middleware
    async def guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Keep strangers out, and turn everything that goes wrong into one line of JSON."""
        view = self._view
        no = refusal(request.method, request.path, request.remote, request.headers, view.token, view.peers)
        if no is not None:
            return _error(*no, _CHALLENGE if no[0] is HTTPStatus.UNAUTHORIZED else None)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _http_error(request, error)
        except ConnectionResetError:
            raise
        except Exception as error:
            log_line("error", f"admin port: {request.method} {request.path} failed: {error!r}")
            return _error(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"the gate failed at this: {error!r}; please report it"
            )

    async def page(self, _: web.Request) -> web.Response:
        """The status page; what it shows it asks for at the other paths."""
        return web.Response(body=self._page, headers=self._page_headers)

    async def status(self, _: web.Request) -> web.Response:
        """The fleet at a glance; not indented, because it is asked for every other second."""
        view = self._view
        glance = status(view.board, view.now(), waiting=view.waiting(), stopping=view.stopping())
        return web.Response(body=orjson.dumps(glance), content_type="application/json")

    async def livez(self, _: web.Request) -> web.Response:
        """200: the event loop turns, or this would not be answered."""
        return web.Response(text="ok\n")

    async def readyz(self, _: web.Request) -> web.Response:
        """200 when there is somebody to send requests to."""
        ready, body = readiness(self._view.board, self._view.stopping())
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        return _json(body, status, readyz_headers(self._view.board, stopping=self._view.stopping()))

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus' text format."""
        body = await self._view.metrics.render()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def units(self, _: web.Request) -> web.Response:
        """All units, in the order of the configuration."""
        now = self._view.now()
        return _json([unit_view(desk, now) for desk in self._view.board])

    async def unit(self, request: web.Request) -> web.Response:
        """One unit, and in plain words why it is in or out of rotation."""
        desk = self._desk(request)
        return _json(unit_page(desk, self._view.board, self._view.now(), self._canary_s(desk)))

    async def unit_health(self, request: web.Request) -> web.Response:
        """One unit for a load balancer that addresses units itself."""
        name = request.match_info["name"]
        status, reason = unit_health(self._view.board, name)
        return _json({"unit": name, "reason": reason}, status, unit_headers(self._view.board, name))

    async def drain(self, request: web.Request) -> web.Response:
        """Take a unit out of rotation; what runs there finishes."""
        return self._drain_unit(request, drained=True)

    async def undrain(self, request: web.Request) -> web.Response:
        """Put a unit back into rotation."""
        return self._drain_unit(request, drained=False)

    async def drain_cell(self, request: web.Request) -> web.Response:
        """Take all units of a cell out of rotation, at once."""
        return self._drain_cell(request, drained=True)

    async def undrain_cell(self, request: web.Request) -> web.Response:
        """Put all units of a cell back into rotation."""
        return self._drain_cell(request, drained=False)

    async def explain(self, request: web.Request) -> web.Response:
        """What would become of a request now: of the one in the body, or of one like the parameters say."""
        body = await request.read() if request.method == "POST" else None
        found = self._view.explain(request.query, body)
        if isinstance(found, Failure):
            return _error(HTTPStatus.BAD_REQUEST, found.message)
        return _json(found)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """What happened last, or, when asked, what happens from now on."""
        if (
            "text/event-stream" not in request.headers.get("Accept", "")
            and request.query.get("follow") != "1"
        ):
            return _json(self._view.events.last())
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        follower = self._view.events.subscribe()
        try:
            await response.prepare(request)
            await _stream(follower, response)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._view.events.unsubscribe(follower)
        return response

    def _drain_unit(self, request: web.Request, *, drained: bool) -> web.Response:
        desk = self._desk(request)
        if self._set_drain([desk], drained=drained):
            self._note(request, drained=drained, unit=desk.unit.name)
        return _json(unit_view(desk, self._view.now()))

    def _drain_cell(self, request: web.Request, *, drained: bool) -> web.Response:
        name, board = request.match_info["name"], self._view.board
        desks = [desk for desk in board if desk.unit.cell == name]
        if not desks:
            raise _unknown("cell", name, {desk.unit.cell: None for desk in board})
        # One event, however many units it has.
        if changed := self._set_drain(desks, drained=drained):
            self._note(request, drained=drained, cell=name, detail=", ".join(changed))
        now = self._view.now()
        return _json({"cell": name, "units": [unit_view(desk, now) for desk in desks]})

    def _set_drain(self, desks: Sequence[Desk], *, drained: bool) -> list[str]:
        """Do what the operator wants; the units that it has changed anything for."""
        changed = [desk.unit.name for desk in desks if desk.drained is not drained]
        for desk in desks:
            self._view.set_drain(desk.unit.name, drained)
        return changed

    def _note(self, request: web.Request, *, drained: bool, **about: str) -> None:
        self._view.events.add(Action("drain" if drained else "undrain", request.remote or "?", **about))

    def _canary_s(self, desk: Desk) -> float | None:
        due_s = self._view.due_s(desk.unit.name, Canary.name)
        return due_s if due_s is not None and due_s < inf else None

    def _desk(self, request: web.Request) -> Desk:
        name = request.match_info["name"]
        desks = self._view.board.desks
        if name in desks:
            return desks[name]
        raise _unknown("unit", name, desks)


def _unknown(noun: str, name: str, known: Iterable[str]) -> web.HTTPNotFound:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    some = ", ".join(names[:NAMES_SHOWN]) + (", …" if len(names) > NAMES_SHOWN else "")
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {some or 'none'}"
    return web.HTTPNotFound(text=f"no {noun} is named {name!r}{hint}")


async def _stream(follower: Follower, response: web.StreamResponse) -> None:
    """Send events as they come and a comment when none does. Raises TimeoutError when the reader is stuck."""
    await _send(response, b": what happens from now on; what happened before is in GET /events\n\n")
    while True:
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                event = await anext(follower)
        except TimeoutError:
            await _send(response, b": heartbeat\n\n")
        except StopAsyncIteration:
            return
        else:
            await _send(response, _sse(event))


async def _send(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await response.write(data)


def _sse(event: Event) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event["id"], event["kind"].encode(), orjson.dumps(event))


def _json(value: Any, status: HTTPStatus = HTTPStatus.OK, headers: Headers = ()) -> web.Response:
    return web.Response(
        body=as_json(value), status=status, content_type="application/json", headers=dict(headers)
    )


def _error(status: HTTPStatus, message: str, headers: dict[str, str] | None = None) -> web.Response:
    body = orjson.dumps(
        {"error": {"code": status.name.lower(), "message": message}}, option=orjson.OPT_APPEND_NEWLINE
    )
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    status = HTTPStatus(error.status)
    allow = error.headers.get("Allow")
    if allow is not None:
        return _error(status, f"{request.path} takes {allow}, not {request.method}", {"Allow": allow})
    if request.match_info.http_exception is None:
        return _error(status, error.text or status.phrase)
    return _error(status, f"there is no {request.path} here; there are: {', '.join(_paths(request.app))}")


def _paths(app: web.Application) -> list[str]:
    return [resource.canonical for resource in app.router.resources()]
