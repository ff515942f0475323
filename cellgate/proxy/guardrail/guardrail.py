"""A guardrail before requests and on answers: a program of the operator's allows, denies or changes.

1. Requests for generations with a JSON body are shown to it, those on paths that the gate does not know, and
   the answers to all that may generate.
2. A request waits for a verdict before it asks for a unit. An answer is held by a `Screen`.
3. When there is no verdict in time, `fail` decides: open lets it through, closed refuses it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.settings import GuardrailSettings
from cellgate.proxy.guardrail.hook import Hook
from cellgate.proxy.guardrail.opinion import GuardAction, Opinion, denied
from cellgate.proxy.guardrail.screen import Screen
from cellgate.proxy.logs.defects import guarded
from cellgate.proxy.request.ask import is_large, read_ask
from cellgate.proxy.request.routes import GENERATE, STICKY, UNLISTED
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.proxy.wire.pool import MakeTls, Pool
from cellgate.router.nouns import Ask

if TYPE_CHECKING:
    from cellgate.proxy.request.exchange import Exchange


class Guardrail:
    """The guardrail of a configuration; see proxy/request/guard.py."""

    def __init__(
        self, settings: GuardrailSettings, loop: asyncio.AbstractEventLoop, tls: MakeTls | None
    ) -> None:
        self._settings = settings
        self._loop = loop
        parts = urlsplit(settings.url)
        pool = Pool(
            settings.url if parts.scheme != "unix" else "http://localhost",
            loop,
            connect_timeout_s=settings.timeout_s,
            tls=tls,
            unix_path=parts.path if parts.scheme == "unix" else None,
        )
        self._hook = Hook(settings, pool, loop)

    def screen_request(self, exchange: Exchange, ask: Ask) -> bool:
        """Whether the request waits for a verdict."""
        route, body = exchange.route, exchange.request.body
        is_unknown = route.kind is UNLISTED and bool(body)
        if not self._settings.request or not (is_unknown or (route.kind is GENERATE and route.json)):
            return False

        def tell(opinion: Opinion | Failure) -> None:
            exchange.stop_reading = None
            guarded(exchange, exchange.screened, _after(exchange, ask, opinion))

        if is_unknown and not _is_object(body):
            unread = self._hook.failed("request", "unreadable")
            if isinstance(unread, Failure):
                self._loop.call_soon(tell, unread)
            return isinstance(unread, Failure)
        about, most = about_request(exchange, ask), LIMITS.json_bytes_on_loop
        exchange.stop_reading = self._hook.ask("request", about, "body", body, tell, max_bytes=most)
        return True

    def screen_answer(self, exchange: Exchange) -> None:
        """Hold the answer of a unit that is about to be sent."""
        if self._settings.answer != "off" and _is_seen(exchange):
            about = about_request(exchange, exchange.selection.ask)
            screen = Screen(exchange, self._hook, self._settings, self._loop, about)
            exchange.response.go_through(screen)

    def tick(self, now: float) -> None:
        """Close connections that have been idle for too long."""
        self._hook.purge(now)

    def close(self) -> None:
        """The gate ends."""
        self._hook.close()


def _is_seen(exchange: Exchange) -> bool:
    """Whether something may be generated, or was: also on a path that the gate does not know."""
    kind = exchange.route.kind
    return kind is GENERATE or kind is STICKY or (kind is UNLISTED and exchange.request.method == b"POST")


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(orjson.loads(body), dict) if not is_large(body) else body.lstrip()[:1] == b"{"
    except orjson.JSONDecodeError:
        return False


def about_request(exchange: Exchange, ask: Ask) -> dict[str, Any]:
    """What every question says of its request."""
    response = exchange.response
    return {
        "id": response.request_id.decode("latin-1"),
        "route": response.route,
        "model": ask.model,
        "tenant": ask.tenant,
    }


def _after(exchange: Exchange, ask: Ask, opinion: Opinion | Failure) -> Ask | Failure:
    """The ask after the verdict, or the failure for the client."""
    if isinstance(opinion, Failure):
        return opinion
    if opinion.action is GuardAction.DENY:
        return denied(opinion, "request")
    if opinion.action is GuardAction.ALLOW:
        return ask
    changed = Failure(FailureKind.GUARDRAIL_FAILED, "the guardrail wrote a request that cannot be read")
    if is_large(opinion.body) or orjson.loads(opinion.body).get("model") != ask.model:
        return changed
    anew = read_ask(opinion.body, exchange.route.name)
    if isinstance(anew, Failure):
        return changed
    exchange.request.body = opinion.body
    return anew._replace(
        unit=ask.unit,
        session=ask.session,
        tenant=ask.tenant,
        priority=ask.priority,
        deadline_at=ask.deadline_at,
    )


def make_guardrail(
    settings: GuardrailSettings | None, loop: asyncio.AbstractEventLoop, tls: MakeTls | None = None
) -> Guardrail | None:
    """None: none is configured."""
    return None if settings is None else Guardrail(settings, loop, tls)
