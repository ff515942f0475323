"""The pages of the admin port: the state of units with reasons, and operations such as drain.

In this order: `AdminPort`, `load_page`, `followed`, `drain_unit`, `act_on_unit`, `admin_server`.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import sys
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from importlib.resources import files
from math import inf
from typing import Any

import orjson
from aiohttp import web

from cellgate.extras import EXTRAS
from cellgate.probes.canary import Canary
from cellgate.proxy.admin.health_process import RETIRE, SharedStatus
from cellgate.proxy.admin.http import (
    AdminServer,
    Bodies,
    NotHereError,
    Stream,
    error_reply,
    link_of,
    refusal,
    reply,
    unencrypted,
    unknown,
)
from cellgate.proxy.admin.views import links_of, reduced, status, unit_page, unit_view
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.settings import Peers
from cellgate.proxy.control.containment import Containment, fingerprint_name, listing
from cellgate.proxy.control.engine_control import ONWARD, STILL, EngineAction, EngineControlError
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.ingress.reports import (
    HeaderPairs,
    as_json,
    readiness,
    readyz_headers,
    unit_headers,
    unit_health,
)
from cellgate.proxy.observe.counters import Metrics
from cellgate.proxy.observe.events import Action, EventLog, EventRecord
from cellgate.proxy.observe.exposition import pool_metrics
from cellgate.proxy.observe.families import PLAIN
from cellgate.proxy.observe.log import log_line
from cellgate.proxy.process.listeners import tls_options
from cellgate.router.board import Board
from cellgate.router.unit_state import UnitState

Explain = Callable[[Mapping[str, str], bytes | None], dict[str, Any] | Failure]
ActOnEngine = Callable[[UnitState, EngineAction, str], Awaitable[str]]
"""Has an operation done by the engine of a unit, in a mode (empty: the default); returns the mode."""


class AdminPort:
    """Listens between `open` and `close`. What /readyz says has to be published on `shared_status`. `tls` is
    for the next caller that wants it.
    """

    def __init__(
        self,
        view: AdminView,
        shared_status: SharedStatus,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        self._tls = tls
        self._server = admin_server(view)
        self._events = view.events
        self._shared_status = shared_status
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._arriving: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None

    async def open(self, listeners: Sequence[socket.socket]) -> None:
        self._listeners = list(listeners)
        self._key_check, self._doorstep = socket.socketpair()
        self._key_check.setblocking(False)
        self._loop.add_reader(self._key_check, self._receive)
        self._health_process = await self._start_health_process()
        self._keeper = self._loop.create_task(self._keep_health_process())

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listeners[0].getsockname()[:2]
        return host, port

    @property
    def health_pid(self) -> int:
        """The health process."""
        return self._health_process.pid

    def tick(self, now: float) -> None:
        """Close connections that send nothing."""
        self._server.tick(now)

    def retire(self) -> None:
        """Accept no more, as another process does on these listeners; connected clients are answered."""
        self._stop_listening()
        if self._keeper is not None:
            self._keeper.cancel()
        with suppress(OSError):
            self._key_check.send(RETIRE)

    async def close(self) -> None:
        """Stop listening, and end what is open."""
        self._stop_listening()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            self._loop.remove_reader(self._key_check)
            self._key_check.close()
            self._doorstep.close()
            await self._end_health_process()
        await asyncio.gather(*self._arriving)
        self._events.close()
        await self._server.close()
        self._shared_status.close()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def _start_health_process(self) -> asyncio.subprocess.Process:
        fds = [self._shared_status.fd, self._doorstep.fileno(), *(each.fileno() for each in self._listeners)]
        return await asyncio.create_subprocess_exec(
            *_PAGES_COMMAND, *map(str, fds), pass_fds=fds, stdin=asyncio.subprocess.DEVNULL
        )

    async def _keep_health_process(self) -> None:
        """Replace it whenever it dies."""
        while True:
            code = await self._health_process.wait()
            log_line("error", f"admin port: its process ended with {code}; another is started")
            await self._restart_health_process()

    async def _restart_health_process(self) -> None:
        while True:
            await asyncio.sleep(RESTART_S)
            try:
                self._health_process = await self._start_health_process()
            except OSError as error:
                log_line("error", f"admin port: no process can be started: {error.strerror}; it is retried")
            else:
                return

    async def _end_health_process(self) -> None:
        """It ends by itself because its socket is closed, unless it is stopped."""
        try:
            async with asyncio.timeout(PAGES_END_S):
                await self._health_process.wait()
        except TimeoutError:
            self._health_process.kill()
            await self._health_process.wait()

    def _receive(self) -> None:
        """The health process passes on connections of which nothing was read."""
        _, fds, _, _ = socket.recv_fds(self._key_check, _FDS_AT_ONCE, _FDS_AT_ONCE)
        for fd in fds:
            task = self._loop.create_task(self._serve(socket.socket(fileno=fd)))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    async def _serve(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            # What it sends first is still unread, and there already.
            wants_tls = sock.recv(1, socket.MSG_PEEK) == TLS_RECORD
            options = tls_options(self._tls() if wants_tls else None)
            await self._loop.connect_accepted_socket(self._server, sock, **options)
        except OSError:
            # It has left meanwhile.
            sock.close()


@dataclass(frozen=True, slots=True)
class AdminView:
    """`set_drain(unit, drained)` is False when there is no such unit; `due_s(unit, probe)` is in how many
    seconds a probe looks again, None when it does not; `queue_size` is how many requests wait for a unit;
    `full`: nobody can be accepted; `explain` is Choice.explain; `act_on_engine` is Conductor.conduct;
    `history` is History.shown; `troubles` is Helpers.shown;
    `reload` reads the configuration again for a caller, returns what changed and
    raises ConfigError; `needs_tls`: callers of other machines have to use TLS;
    `roll` is the one under way, or the last one; `pages` are what extras answer, by path.
    """

    board: Board
    events: EventLog
    metrics: Metrics
    now: Callable[[], float]
    stopping: Callable[[], bool]
    set_drain: Callable[[str, bool], bool]
    token: Callable[[], str | None]
    peers: Peers
    explain: Explain
    due_s: Callable[[str, str], float | None] = lambda _unit, _probe: None
    queue_size: Callable[[], int] = int
    poison: Containment | None = None
    full: Callable[[], bool] = bool
    act_on_engine: ActOnEngine | None = None
    history: Callable[[], dict[str, Any]] = dict
    troubles: Callable[[], list[dict[str, Any]]] = list
    reload: Callable[[str], Awaitable[str]] | None = None
    needs_tls: Callable[[], bool] = bool
    roll: Callable[[], dict[str, Any] | None] = lambda: None
    capacity: Callable[[], list[dict[str, Any]]] = list
    pages: Mapping[str, PageHandler] = field(default_factory=dict)


# The status page: page.html unchanged, with a Content-Security-Policy.
#
# The page holds no data and loads nothing from elsewhere. A browser knows its one script and one style by
# their hashes: text from outside could not run even if it became HTML.


_INLINE = r"<{0}>(.*?)</{0}>"


def load_page() -> tuple[bytes, HeaderPairs]:
    """The page's bytes and the headers that go with them."""
    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(text, 'script')}",
            f"style-src {_hash(text, 'style')}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return text.encode(), (
        ("Content-Security-Policy", policy),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
        ("Cache-Control", "no-cache"),
    )


def _hash(text: str, tag: str) -> str:
    """The source expression of CSP Level 3 for the one inline element of that tag."""
    (inside,) = re.findall(_INLINE.format(tag), text, re.DOTALL)
    return f"'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'"


PAGES_HEARTBEAT_S = 10.0


async def followed(events: EventLog) -> AsyncGenerator[bytes, None]:
    """New events, as server-sent events, and a heartbeat comment when there are none."""
    follower = events.subscribe()
    try:
        yield b": what happens from now on; what happened before is in GET /events\n\n"
        while True:
            try:
                async with asyncio.timeout(PAGES_HEARTBEAT_S):
                    event = await anext(follower)
            except TimeoutError:
                yield b": heartbeat\n\n"
            except StopAsyncIteration:
                return
            else:
                yield _sse(event)
    finally:
        events.unsubscribe(follower)


def _sse(event: EventRecord) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event["id"], event["kind"].encode(), orjson.dumps(event))


async def drain_unit(view: AdminView, request: web.BaseRequest, name: str, *, drained: bool) -> web.Response:
    """Drain a unit (its requests in flight finish), or undrain it. Raises NotHereError."""
    state = view.board.units.get(name)
    if state is None:
        raise unknown("unit", name, view.board.units)
    if _set_drain(view, [state], drained=drained):
        _note(view, request, drained=drained, unit=name)
    return reply(as_json(unit_view(state, view.now())))


async def drain_cell(view: AdminView, request: web.BaseRequest, name: str, *, drained: bool) -> web.Response:
    """The same for all units of a cell, at once. Raises NotHereError."""
    states = [state for state in view.board if state.unit.cell == name]
    if not states:
        raise unknown("cell", name, {state.unit.cell: None for state in view.board})
    # One event, however many units it has.
    if changed := _set_drain(view, states, drained=drained):
        _note(view, request, drained=drained, cell=name, detail=", ".join(changed))
    now = view.now()
    return reply(as_json({"cell": name, "units": [unit_view(state, now) for state in states]}))


def _set_drain(view: AdminView, states: Sequence[UnitState], *, drained: bool) -> list[str]:
    """Drain or undrain; returns the units that changed."""
    changed = [state.unit.name for state in states if state.drained is not drained]
    for state in states:
        view.set_drain(state.unit.name, drained)
    return changed


def _note(view: AdminView, request: web.BaseRequest, *, drained: bool, **about: str) -> None:
    view.events.add(Action("drain" if drained else "undrain", request.remote or "?", **about))


async def act_on_unit(
    view: AdminView, act_on_engine: ActOnEngine, request: web.BaseRequest, name: str, *, action: EngineAction
) -> web.Response:
    """Let the engine of a unit do it, in the mode of the query. Raises NotHereError, ConductError."""
    state = view.board.units.get(name)
    if state is None:
        raise unknown("unit", name, view.board.units)
    mode = await act_on_engine(state, action, request.query.get("mode", ""))
    detail = f"mode {mode}" if mode else ""
    view.events.add(Action(action, request.remote or "?", unit=name, detail=detail))
    return reply(as_json(unit_view(state, view.now()) | {"mode": mode}))


# The application of the admin port: the state of units with reasons, and operations such as drain.
# Everything is answered from memory; /livez and /readyz are mostly answered by health_process.py.
#
# Errors are JSON, `{"error": {"code", "message"}}`, with a message that says what to do. Permissions
# are in http.py.


_PAGES_CHALLENGE = (("WWW-Authenticate", "Bearer"),)
_PAGES_NAME = "{name}"

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
            "/metrics/engine": {"GET": self.metrics_of_pool},
            "/status": {"GET": self.status},
            "/models": {"GET": self.models},
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
        }
        for extra in EXTRAS.values():
            for path, method in extra.routes.items():
                self._routes[path] = {method: view.pages.get(path, partial(_not_configured, extra.off))}
        if view.act_on_engine is not None:
            for action in (*STILL, *ONWARD):
                act_on_engine = partial(act_on_unit, view, view.act_on_engine, action=action)
                self._routes[f"/units/{_PAGES_NAME}/{action}"] = {"POST": act_on_engine}
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
            return error_reply(*no, _PAGES_CHALLENGE if no[0] is HTTPStatus.UNAUTHORIZED else ())
        try:
            response = await self._routed(request)
            # What this page shows is published at the end of this turn: /readyz must not say less than it.
            await asyncio.sleep(0)
            return response
        except EngineControlError as error:
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
        view = self._view
        glance = status(
            view.board, view.now(), waiting=view.queue_size(), stopping=view.stopping(), roll=view.roll()
        )
        more = {"models": reduced(view.capacity()), "troubles": view.troubles()}
        return reply(orjson.dumps(glance | more))

    async def models(self, _request: web.BaseRequest, _name: str) -> web.Response:
        """How many units serve each model, who is missing, and why."""
        return reply(orjson.dumps(self._view.capacity(), option=orjson.OPT_INDENT_2))

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

    async def metrics_of_pool(self, _request: web.BaseRequest, _name: str) -> web.Response:
        """The gate as one engine, for an endpoint picker."""
        pool = pool_metrics(self._view.board, self._view.queue_size)
        return reply(PLAIN.text(pool), content_type=PLAIN.content_type)

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


async def _not_configured(why: str, _request: web.BaseRequest, _name: str) -> web.Response:
    return error_reply(HTTPStatus.CONFLICT, why)


def _match(pattern: str, path: str) -> str | None:
    """What stands for the name in a path of this pattern; empty where there is none, None: it is another."""
    before, name, after = pattern.partition(_PAGES_NAME)
    if not name:
        return "" if path == pattern else None
    found = path.removeprefix(before).removesuffix(after)
    return found if found and "/" not in found and path == before + found + after else None


def _json(value: Any, status: HTTPStatus = HTTPStatus.OK, headers: HeaderPairs = ()) -> web.Response:
    return reply(as_json(value), status, headers=headers)


# The admin port: the health process in front, the application behind it on the event loop.
#
# Both processes hold the listeners, so that no caller is refused while a health process that died is
# replaced.


RESTART_S = 1.0
PAGES_END_S = 2.0
TLS_RECORD = b"\x16"
"""A connection that speaks TLS begins with this: a handshake (RFC 8446, 5.1). No HTTP does."""
_FDS_AT_ONCE = 32
_PAGES_COMMAND = (sys.executable, "-m", "cellgate.proxy.admin.health_process")
