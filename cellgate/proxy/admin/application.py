"""The application of the admin port: the state of units with reasons, and operations such as drain.
Everything is answered from memory; /livez and /readyz are mostly answered by health_process.py.

Errors are JSON, `{"error": {"code", "message"}}`, with a message that says what to do. Permissions: auth.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from math import inf
from typing import Any

import orjson
from aiohttp import web

from cellgate.probes.canary import Canary
from cellgate.proxy.admin.admin_view import AdminView
from cellgate.proxy.admin.auth import refusal, unencrypted
from cellgate.proxy.admin.bodies import Bodies
from cellgate.proxy.admin.drain import drain_cell, drain_unit
from cellgate.proxy.admin.engine_control import conduct_unit
from cellgate.proxy.admin.error_replies import NotHereError, error_reply, unknown
from cellgate.proxy.admin.event_stream import followed
from cellgate.proxy.admin.http_server import AdminServer, link_of
from cellgate.proxy.admin.link_view import links_of
from cellgate.proxy.admin.page import load_page
from cellgate.proxy.admin.responses import Stream, reply
from cellgate.proxy.admin.roll import order_roll, roll_page
from cellgate.proxy.admin.scaling import drain_least_valued, scaling_page
from cellgate.proxy.admin.status import status
from cellgate.proxy.admin.unit_view import unit_page, unit_view
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.control.conduct import ONWARD, STILL, ConductError
from cellgate.proxy.control.containment import fingerprint_name
from cellgate.proxy.control.containment_report import listing
from cellgate.proxy.ingress.envoy_health import HeaderPairs, readyz_headers, unit_headers
from cellgate.proxy.ingress.ready import as_json, readiness, unit_health
from cellgate.proxy.logs.log import log_line
from cellgate.proxy.rolling.orders import VERBS
from cellgate.proxy.wire.failure import Failure

_CHALLENGE = (("WWW-Authenticate", "Bearer"),)
_NAME = "{name}"

PageHandler = Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]
"""Answers a request; the name is that of the unit or cell in its path."""


def admin_server(view: AdminView) -> AdminServer:
    """What answers the connections to the admin port."""
    return AdminServer(_Admin(view).answer)


class _Admin:
    """The handlers; they read the view and have no state."""

    def __init__(self, view: AdminView) -> None:
        self._view = view
        self._bodies = Bodies()
        self._page, self._page_headers = load_page()
        self._routes: dict[str, dict[str, PageHandler]] = {
            "/": {"GET": self.page},
            "/livez": {"GET": self.livez},
            "/readyz": {"GET": self.readyz},
            "/metrics": {"GET": self.metrics},
            "/status": {"GET": self.status},
            "/units": {"GET": self.units},
            "/units/{name}": {"GET": self.unit},
            "/units/{name}/drain": {"POST": partial(drain_unit, view, drained=True)},
            "/units/{name}/undrain": {"POST": partial(drain_unit, view, drained=False)},
            "/cells/{name}/drain": {"POST": partial(drain_cell, view, drained=True)},
            "/cells/{name}/undrain": {"POST": partial(drain_cell, view, drained=False)},
            "/explain": {"GET": self.explain, "POST": self.explain},
            "/events": {"GET": self.events},
            "/history": {"GET": self.history},
            "/healthz/unit/{name}": {"GET": self.unit_health},
            "/reload": {"POST": self.reload},
            "/roll": {"GET": partial(roll_page, view.roller)},
        }
        for verb in VERBS:
            self._routes[f"/roll/{verb}"] = {"POST": partial(order_roll, view.roller, verb=verb)}
        if view.conduct is not None:
            for deed in (*STILL, *ONWARD):
                conduct = partial(conduct_unit, view, view.conduct, deed=deed)
                self._routes[f"/units/{_NAME}/{deed}"] = {"POST": conduct}
        if view.scaling is not None:
            self._routes["/scaling"] = {"GET": partial(scaling_page, view.scaling)}
            self._routes["/scaling/drain"] = {"POST": partial(drain_least_valued, view, view.scaling)}
        if view.poison is not None:
            self._poison = view.poison
            self._routes["/poison"] = {"GET": self.poison}
            self._routes["/poison/clear"] = {"POST": self.clear_poison}
            self._routes["/poison/{name}/clear"] = {"POST": self.clear_poison}

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Check permissions, and answer every error with one line of JSON."""
        view = self._view
        secure, certified = link_of(request)
        if view.needs_tls() and not secure and (no := unencrypted(request.path, request.remote)) is not None:
            return error_reply(*no)
        no = refusal(
            request.method,
            request.path,
            request.remote,
            request.headers,
            view.token(),
            view.peers,
            certified=certified,
        )
        if no is not None:
            return error_reply(*no, _CHALLENGE if no[0] is HTTPStatus.UNAUTHORIZED else ())
        try:
            response = await self._routed(request)
            # What this page shows is published at the end of this turn: /readyz must not say less than it.
            await asyncio.sleep(0)
            return response
        except ConductError as error:
            return error_reply(error.status, str(error))
        except NotHereError as error:
            return error_reply(HTTPStatus.NOT_FOUND, str(error))
        except web.HTTPException:
            raise
        except Exception as error:
            log_line("error", f"admin port: {request.method} {request.path} failed: {error!r}")
            return error_reply(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"the gate failed at this: {error!r}; please report it"
            )

    async def _routed(self, request: web.BaseRequest) -> web.StreamResponse:
        pages, name = self._found(request.path)
        # aiohttp sends to a HEAD the head of what a GET gets; a stream has no end to wait for.
        is_head = request.method == "HEAD" and self.events not in pages.values()
        page = pages.get("GET" if is_head else request.method)
        if page is None:
            allow = ", ".join(pages)
            message = f"{request.path} takes {allow}, not {request.method}"
            return error_reply(HTTPStatus.METHOD_NOT_ALLOWED, message, (("Allow", allow),))
        return await page(request, name)

    def _found(self, path: str) -> tuple[dict[str, PageHandler], str]:
        """The handler of a path, and the name in it."""
        for pattern, pages in self._routes.items():
            if (name := _match(pattern, path)) is not None:
                return pages, name
        raise NotHereError(f"unknown path {path}; the paths are: {', '.join(self._routes)}")

    async def page(self, _request: web.BaseRequest, _name: str) -> web.Response:
        """The status page; it requests its data from the other paths."""
        return reply(self._page, content_type="text/html; charset=utf-8", headers=self._page_headers)

    async def status(self, _request: web.BaseRequest, _name: str) -> web.Response:
        """A summary of the fleet; not indented, because it is requested every two seconds."""
        view, roller = self._view, self._view.roller
        roll = roller.shown() if roller is not None else None
        glance = status(
            view.board, view.now(), waiting=view.queue_size(), stopping=view.stopping(), roll=roll
        )
        return reply(orjson.dumps(glance))

    async def livez(self, _request: web.BaseRequest, _name: str) -> web.Response:
        """200: the event loop turns, or this would not be answered."""
        return reply(b"ok\n", content_type="text/plain; charset=utf-8")

    async def readyz(self, _request: web.BaseRequest, _name: str) -> web.Response:
        """200 when at least one unit is usable."""
        ready, body = readiness(self._view.board, self._view.stopping(), full=self._view.full())
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        return _json(body, status, readyz_headers(self._view.board, stopping=self._view.stopping()))

    async def metrics(self, request: web.BaseRequest, _name: str) -> web.Response:
        """Prometheus' text format, or OpenMetrics while there are exemplars to show."""
        metrics = self._view.metrics
        encoding = metrics.encoding_for(request.headers.get("accept", ""))
        return reply(await metrics.render(encoding), content_type=encoding.content_type)

    async def units(self, _request: web.BaseRequest, _name: str) -> web.Response:
        """All units, in the order of the configuration."""
        board, now = self._view.board, self._view.now()
        return _json(
            [unit_view(state, now) | {"links": links_of(board, state.unit.name, now)} for state in board]
        )

    async def unit(self, _request: web.BaseRequest, name: str) -> web.Response:
        """One unit, with the reasons why it is in or out of rotation."""
        board = self._view.board
        state = board.units.get(name)
        if state is None:
            raise unknown("unit", name, board.units)
        return _json(unit_page(state, board, self._view.now(), self._canary_s(name)))

    async def unit_health(self, _request: web.BaseRequest, name: str) -> web.Response:
        """One unit for a load balancer that addresses units itself."""
        status, reason = unit_health(self._view.board, name)
        return _json({"unit": name, "reason": reason}, status, unit_headers(self._view.board, name))

    async def explain(self, request: web.BaseRequest, _name: str) -> web.Response:
        """What would happen to a request now: the one in the body, or one described by the parameters."""
        body = await self._bodies.read(request) if request.method == "POST" else None
        # Of a parameter that is there twice, the last counts.
        found = self._view.explain(dict(request.query.items()), body)
        if isinstance(found, Failure):
            return error_reply(HTTPStatus.BAD_REQUEST, found.message)
        return _json(found)

    async def events(self, request: web.BaseRequest, _name: str) -> web.StreamResponse:
        """The last events, or, on request, a stream of new ones."""
        if "text/event-stream" in request.headers.get("Accept", "") or request.query.get("follow") == "1":
            parts = followed(self._view.events)
            return Stream(parts, "text/event-stream", (("Cache-Control", "no-store"),))
        return _json(self._view.events.last())

    async def history(self, _request: web.BaseRequest, _name: str) -> web.Response:
        """The last hour, for the plots of the status page."""
        return reply(orjson.dumps(self._view.history()))

    async def poison(self, _request: web.BaseRequest, _name: str) -> web.Response:
        """The prompts that are refused because units have died of them."""
        return _json(listing(self._poison, self._view.now()))

    async def reload(self, request: web.BaseRequest, _name: str) -> web.Response:
        """Read the configuration again: what changed, or every mistake in it."""
        if self._view.reload is None:
            raise NotHereError("this gate has no configuration to read")
        try:
            changed = await self._view.reload(request.remote or "?")
        except ConfigError as error:
            return _json({"taken": False, "problems": error.problems}, HTTPStatus.UNPROCESSABLE_ENTITY)
        return _json({"taken": True, "changed": changed})

    async def clear_poison(self, request: web.BaseRequest, name: str) -> web.Response:
        """Allow this prompt again, or all of them."""
        known = {fingerprint_name(ban.fingerprint): ban.fingerprint for ban in self._poison.bans.all()}
        if name and name not in known:
            raise unknown("refused prompt", name, known)
        cleared = [name] if name else list(known)
        for each in cleared:
            self._poison.lift(known[each], request.remote or "?")
        return _json({"cleared": cleared})

    def _canary_s(self, unit: str) -> float | None:
        due_s = self._view.due_s(unit, Canary.name)
        return due_s if due_s is not None and due_s < inf else None


def _match(pattern: str, path: str) -> str | None:
    """What stands for the name in a path of this pattern; empty where there is none, None: it is another."""
    before, name, after = pattern.partition(_NAME)
    if not name:
        return "" if path == pattern else None
    found = path.removeprefix(before).removesuffix(after)
    return found if found and "/" not in found and path == before + found + after else None


def _json(value: Any, status: HTTPStatus = HTTPStatus.OK, headers: HeaderPairs = ()) -> web.Response:
    return reply(as_json(value), status, headers=headers)
