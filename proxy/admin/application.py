"""The application behind the admin port: what the gate believes, why, and the operator's hand on it.
All is answered from memory, and what load balancers ask most often not even here: see health_process.py.

Errors are JSON, `{"error": {"code", "message"}}`, and the message says what to do. Who may do what: auth.py.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from math import inf
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST

from cellgate.probes.canary import Canary
from cellgate.proxy.admin.auth import refusal
from cellgate.proxy.admin.http_server import AdminServer, Answer, Asked, Handler, Stream
from cellgate.proxy.admin.page import load_page
from cellgate.proxy.admin.status import status
from cellgate.proxy.admin.unit_view import unit_page, unit_view
from cellgate.proxy.config.trusted_peers import Peers
from cellgate.proxy.control.containment import Containment, name_of
from cellgate.proxy.control.containment_report import listing
from cellgate.proxy.ingress.envoy_health import Headers, readyz_headers, unit_headers
from cellgate.proxy.ingress.ready import as_json, readiness, unit_health
from cellgate.proxy.logs.events import Action, Event, EventLog
from cellgate.proxy.logs.log import log_line
from cellgate.proxy.metrics.metrics import Metrics
from cellgate.proxy.wire.failure import Failure
from cellgate.router.board import Board
from cellgate.router.unit_state import Desk

HEARTBEAT_S = 10.0
NAMES_SHOWN = 20

_CHALLENGE = (("WWW-Authenticate", "Bearer"),)
_NAME = "{name}"

Explain = Callable[[Mapping[str, str], bytes | None], dict[str, Any] | Failure]


def _nobody_looks(_unit: str, _probe: str) -> float | None:
    return None


@dataclass(frozen=True, slots=True)
class AdminView:
    """What the admin port needs. `set_drain(unit, drained)` is False when there is no such unit;
    `due_s(unit, probe)` is in how many seconds a probe looks again, None when it does not; `waiting` is how
    many requests wait for a unit; `full`: nobody can be accepted; `explain` is Choice.explain.
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
    poison: Containment | None = None
    full: Callable[[], bool] = bool


def admin_server(view: AdminView) -> AdminServer:
    """What answers the connections to the admin port."""
    return AdminServer(_Admin(view).answer)


class _NotHereError(Exception):
    """Nothing is known by the name that was asked for; the message says what is."""


class _Admin:
    """The handlers; they read the view and hold nothing."""

    def __init__(self, view: AdminView) -> None:
        self._view = view
        self._page, self._page_headers = load_page()
        self._routes: dict[str, dict[str, Handler]] = {
            "/": {"GET": self.page},
            "/livez": {"GET": self.livez},
            "/readyz": {"GET": self.readyz},
            "/metrics": {"GET": self.metrics},
            "/status": {"GET": self.status},
            "/units": {"GET": self.units},
            "/units/{name}": {"GET": self.unit},
            "/units/{name}/drain": {"POST": self.drain},
            "/units/{name}/undrain": {"POST": self.undrain},
            "/cells/{name}/drain": {"POST": self.drain_cell},
            "/cells/{name}/undrain": {"POST": self.undrain_cell},
            "/explain": {"GET": self.explain, "POST": self.explain},
            "/events": {"GET": self.events},
            "/healthz/unit/{name}": {"GET": self.unit_health},
        }
        if view.poison is not None:
            self._poison = view.poison
            self._routes["/poison"] = {"GET": self.poison}
            self._routes["/poison/clear"] = {"POST": self.clear_poison}
            self._routes["/poison/{name}/clear"] = {"POST": self.clear_poison}

    async def answer(self, asked: Asked) -> Answer | Stream:
        """Keep strangers out, and turn everything that goes wrong into one line of JSON."""
        view = self._view
        no = refusal(asked.method, asked.path, asked.peer, asked.headers, view.token, view.peers)
        if no is not None:
            return _error(*no, _CHALLENGE if no[0] is HTTPStatus.UNAUTHORIZED else ())
        try:
            return await self._routed(asked)
        except _NotHereError as error:
            return _error(HTTPStatus.NOT_FOUND, str(error))
        except Exception as error:
            log_line("error", f"admin port: {asked.method} {asked.path} failed: {error!r}")
            return _error(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"the gate failed at this: {error!r}; please report it"
            )

    async def _routed(self, asked: Asked) -> Answer | Stream:
        handlers, name = self._found(asked.path)
        # To a HEAD the server sends the head of what a GET gets; a stream has no end to wait for.
        is_head = asked.method == "HEAD" and self.events not in handlers.values()
        handler = handlers.get("GET" if is_head else asked.method)
        if handler is None:
            allow = ", ".join(handlers)
            message = f"{asked.path} takes {allow}, not {asked.method}"
            return _error(HTTPStatus.METHOD_NOT_ALLOWED, message, (("Allow", allow),))
        return await handler(replace(asked, name=name))

    def _found(self, path: str) -> tuple[dict[str, Handler], str]:
        """What a path takes, and the name in it."""
        for pattern, handlers in self._routes.items():
            if (name := _match(pattern, path)) is not None:
                return handlers, name
        raise _NotHereError(f"there is no {path} here; there are: {', '.join(self._routes)}")

    async def page(self, _: Asked) -> Answer:
        """The status page; what it shows it asks for at the other paths."""
        return Answer(self._page, content_type="text/html; charset=utf-8", headers=self._page_headers)

    async def status(self, _: Asked) -> Answer:
        """The fleet at a glance; not indented, because it is asked for every other second."""
        view = self._view
        glance = status(view.board, view.now(), waiting=view.waiting(), stopping=view.stopping())
        return Answer(orjson.dumps(glance))

    async def livez(self, _: Asked) -> Answer:
        """200: the event loop turns, or this would not be answered."""
        return Answer(b"ok\n", content_type="text/plain; charset=utf-8")

    async def readyz(self, _: Asked) -> Answer:
        """200 when there is somebody to send requests to."""
        ready, body = readiness(self._view.board, self._view.stopping(), full=self._view.full())
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        return _json(body, status, readyz_headers(self._view.board, stopping=self._view.stopping()))

    async def metrics(self, _: Asked) -> Answer:
        """Prometheus' text format."""
        body = await self._view.metrics.render()
        return Answer(body, content_type=CONTENT_TYPE_LATEST)

    async def units(self, _: Asked) -> Answer:
        """All units, in the order of the configuration."""
        now = self._view.now()
        return _json([unit_view(desk, now) for desk in self._view.board])

    async def unit(self, asked: Asked) -> Answer:
        """One unit, and in plain words why it is in or out of rotation."""
        desk = self._desk(asked)
        return _json(unit_page(desk, self._view.board, self._view.now(), self._canary_s(desk)))

    async def unit_health(self, asked: Asked) -> Answer:
        """One unit for a load balancer that addresses units itself."""
        name = asked.name
        status, reason = unit_health(self._view.board, name)
        return _json({"unit": name, "reason": reason}, status, unit_headers(self._view.board, name))

    async def drain(self, asked: Asked) -> Answer:
        """Take a unit out of rotation; what runs there finishes."""
        return self._drain_unit(asked, drained=True)

    async def undrain(self, asked: Asked) -> Answer:
        """Put a unit back into rotation."""
        return self._drain_unit(asked, drained=False)

    async def drain_cell(self, asked: Asked) -> Answer:
        """Take all units of a cell out of rotation, at once."""
        return self._drain_cell(asked, drained=True)

    async def undrain_cell(self, asked: Asked) -> Answer:
        """Put all units of a cell back into rotation."""
        return self._drain_cell(asked, drained=False)

    async def explain(self, asked: Asked) -> Answer:
        """What would become of a request now: of the one in the body, or of one like the parameters say."""
        found = self._view.explain(asked.query, asked.body if asked.method == "POST" else None)
        if isinstance(found, Failure):
            return _error(HTTPStatus.BAD_REQUEST, found.message)
        return _json(found)

    async def events(self, asked: Asked) -> Answer | Stream:
        """What happened last, or, when asked, what happens from now on."""
        if "text/event-stream" in asked.headers.get("Accept", "") or asked.query.get("follow") == "1":
            parts = _followed(self._view.events)
            return Stream(parts, "text/event-stream", (("Cache-Control", "no-store"),))
        return _json(self._view.events.last())

    async def poison(self, _: Asked) -> Answer:
        """The prompts that are refused because units have died of them."""
        return _json(listing(self._poison, self._view.now()))

    async def clear_poison(self, asked: Asked) -> Answer:
        """Refuse this prompt no more, or none of them."""
        known = {name_of(ban.fingerprint): ban.fingerprint for ban in self._poison.bans.all()}
        if asked.name and asked.name not in known:
            raise _unknown("refused prompt", asked.name, known)
        cleared = [asked.name] if asked.name else list(known)
        for name in cleared:
            self._poison.lift(known[name], asked.peer or "?")
        return _json({"cleared": cleared})

    def _drain_unit(self, asked: Asked, *, drained: bool) -> Answer:
        desk = self._desk(asked)
        if self._set_drain([desk], drained=drained):
            self._note(asked, drained=drained, unit=desk.unit.name)
        return _json(unit_view(desk, self._view.now()))

    def _drain_cell(self, asked: Asked, *, drained: bool) -> Answer:
        name, board = asked.name, self._view.board
        desks = [desk for desk in board if desk.unit.cell == name]
        if not desks:
            raise _unknown("cell", name, {desk.unit.cell: None for desk in board})
        # One event, however many units it has.
        if changed := self._set_drain(desks, drained=drained):
            self._note(asked, drained=drained, cell=name, detail=", ".join(changed))
        now = self._view.now()
        return _json({"cell": name, "units": [unit_view(desk, now) for desk in desks]})

    def _set_drain(self, desks: Sequence[Desk], *, drained: bool) -> list[str]:
        """Do what the operator wants; the units that it has changed anything for."""
        changed = [desk.unit.name for desk in desks if desk.drained is not drained]
        for desk in desks:
            self._view.set_drain(desk.unit.name, drained)
        return changed

    def _note(self, asked: Asked, *, drained: bool, **about: str) -> None:
        self._view.events.add(Action("drain" if drained else "undrain", asked.peer or "?", **about))

    def _canary_s(self, desk: Desk) -> float | None:
        due_s = self._view.due_s(desk.unit.name, Canary.name)
        return due_s if due_s is not None and due_s < inf else None

    def _desk(self, asked: Asked) -> Desk:
        name = asked.name
        desks = self._view.board.desks
        if name in desks:
            return desks[name]
        raise _unknown("unit", name, desks)


def _match(pattern: str, path: str) -> str | None:
    """What stands for the name in a path of this pattern; empty where there is none, None: it is another."""
    before, name, after = pattern.partition(_NAME)
    if not name:
        return "" if path == pattern else None
    found = path.removeprefix(before).removesuffix(after)
    return found if found and "/" not in found and path == before + found + after else None


def _unknown(noun: str, name: str, known: Iterable[str]) -> _NotHereError:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    some = ", ".join(names[:NAMES_SHOWN]) + (", …" if len(names) > NAMES_SHOWN else "")
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {some or 'none'}"
    return _NotHereError(f"no {noun} is named {name!r}{hint}")


async def _followed(events: EventLog) -> AsyncGenerator[bytes, None]:
    """Events as they come, and a comment when none does."""
    follower = events.subscribe()
    try:
        yield b": what happens from now on; what happened before is in GET /events\n\n"
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    event = await anext(follower)
            except TimeoutError:
                yield b": heartbeat\n\n"
            except StopAsyncIteration:
                return
            else:
                yield _sse(event)
    finally:
        events.unsubscribe(follower)


def _sse(event: Event) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event["id"], event["kind"].encode(), orjson.dumps(event))


def _json(value: Any, status: HTTPStatus = HTTPStatus.OK, headers: Headers = ()) -> Answer:
    return Answer(as_json(value), status, headers=headers)


def _error(status: HTTPStatus, message: str, headers: Headers = ()) -> Answer:
    error = {"error": {"code": status.name.lower(), "message": message}}
    return Answer(orjson.dumps(error, option=orjson.OPT_APPEND_NEWLINE), status, headers=headers)
