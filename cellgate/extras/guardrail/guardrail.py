"""A guardrail before requests and on answers: a program of the operator's allows, denies or changes.

1. Requests for generations with a JSON body are shown to it, those on paths that the gate does not know, and
   the answers to all that may generate.
2. A request waits for a verdict before it asks for a unit. An answer is held by a `Screen`.
3. When there is no verdict in time, `fail` decides: open lets it through, closed refuses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from cellgate.extras.guardrail.guardrail_client import (
    ALLOWED,
    GuardAction,
    GuardrailVerdict,
    Hook,
    OnOpinion,
    WrittenText,
    denied,
)
from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.config.settings import GuardrailSettings
from cellgate.proxy.http.errors import Failure, FailureKind, shape_of
from cellgate.proxy.http.heads import own_response
from cellgate.proxy.http.sse import BOM
from cellgate.proxy.http.unit import MakeTls, Pool
from cellgate.proxy.observe.defects import guarded
from cellgate.proxy.request.body import is_large, read_ask
from cellgate.proxy.request.one_meaning import ONCE, why_repeated
from cellgate.proxy.request.routes import GENERATE, STICKY, UNLISTED
from cellgate.router.nouns import Ask

if TYPE_CHECKING:
    from cellgate.proxy.http.client import ClientExchange
    from cellgate.proxy.http.request import Request
    from cellgate.proxy.request.exchange import Exchange


class Guardrail:
    """The guardrail of a configuration."""

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

        def tell(opinion: GuardrailVerdict | Failure) -> None:
            exchange.stop_reading = None
            guarded(exchange, exchange.screened, _after(exchange, ask, opinion))

        if is_unknown and not _is_object(body):
            unread = self._hook.failed("request", "unreadable")
            if isinstance(unread, Failure):
                self._loop.call_soon(tell, unread)
            return isinstance(unread, Failure)
        most = LIMITS.json_bytes_on_loop

        def read(found: Ask | Failure | None) -> None:
            # What the guardrail allows is passed on byte for byte: an engine may read the other one.
            if isinstance(found, Failure):
                tell(found)
                return
            exchange.stop_reading = self._hook.ask(
                "request", about_request(exchange, ask), "body", body, tell, max_bytes=most, payer=ask.payer
            )

        if len(body) <= most and is_large(body):
            gate, request = exchange.gate, exchange.request
            exchange.stop_reading = gate.large_reads.start(request, ask.payer, lambda: None, ONCE, read)
        elif len(body) <= most and (twofold := why_repeated(body)) is not None:
            self._loop.call_soon(tell, twofold)
        else:
            read(None)
        return True

    def screen_answer(self, exchange: Exchange) -> None:
        """Hold the answer of a unit that is about to be sent."""
        if self._settings.answer != "off" and _is_seen(exchange):
            about = about_request(exchange, exchange.selection.ask)
            ask = partial(self._hook.ask, payer=exchange.selection.ask.payer)
            screen = Screen(exchange, self._hook, self._settings, self._loop, about, ask)
            exchange.response.go_through(screen)

    def tick(self, now: float) -> None:
        """Close connections that have been idle for too long."""
        self._hook.purge(now)

    def close(self) -> None:
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


def _after(exchange: Exchange, ask: Ask, opinion: GuardrailVerdict | Failure) -> Ask | Failure:
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
    fresh = read_ask(opinion.body, exchange.route.name, ask.payer)
    if isinstance(fresh, Failure):
        return changed
    exchange.request.body = opinion.body
    return fresh._replace(
        unit=ask.unit,
        session=ask.session,
        tenant=ask.tenant,
        priority=ask.priority,
        deadline_at=ask.deadline_at,
    )


# Holds the answer to one request until a guardrail allows it: as a whole, or window by window.
#
# It stands between a response and its client. What the response writes is kept as it is, and sent as it is
# once it is allowed, so the rest of the gate knows nothing of it. Rules:
# 1. One question at a time. A window is asked about when it has `window_bytes` of text, when its oldest part
#    is `window_s` old, and at the end; what comes meanwhile belongs to the next one.
# 2. A window ends with an event. Of an event that is not complete nothing is sent, because nobody has read
# it.
# 3. What is denied is never sent: an answer of which nothing was sent becomes an error, a stream ends with
# one.
# 4. What is held is bounded: the unit waits, or, if the whole answer has to be held, or one event is too
#    large, `fail` decides.


PHASE = "answer"
Asked = tuple[dict[str, Any], str, bytes]
"""What a question says of its request, the name of what it is about, and that."""
_BLANKS = BOM + b" \t\r\n"
CONTEXT_CHARS = 256
"""Of the text before a window, which is shown with it: what is denied may begin there."""


class Screen:
    """Of one answer. It has what a response uses of its client's connection."""

    def __init__(
        self,
        exchange: Exchange,
        hook: Hook,
        settings: GuardrailSettings,
        loop: asyncio.AbstractEventLoop,
        about: dict[str, Any],
        ask: Callable[..., object] | None = None,
    ) -> None:
        self._ask_hook = ask or hook.ask
        self._exchange = exchange
        self._client = client = exchange.client
        self.peer, self.secure, self.shows_internals = client.peer, client.secure, client.shows_internals
        self.look_at = 0.0
        self._hook = hook
        self._settings = settings
        self._loop = loop
        self._about = about
        self._has_sent = exchange.response.begun
        self._holds_all = settings.answer == "whole" or not exchange.response.is_events
        self._written = WrittenText(
            has_head=not self._has_sent,
            is_chunked=exchange.response.is_chunked,
            is_events=exchange.response.is_events,
        )
        self._held: list[bytes] = []
        self._size = self._complete = self._asked = 0
        """Bytes of all that is held; how many parts end with an event, and how many are asked about."""
        self._before = ""
        self._end: tuple[Request, bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = self._is_asking = self._in_event = False
        """Open: everything passes from now on. In an event: the client got a part of one, without verdict."""

    # -- what a response does with its client --------------------------------------------------------------

    def cut(self) -> None:
        self._client.cut()

    def send(self, data: bytes) -> None:
        """A part of the answer, whole chunks of it."""
        if self._is_open:
            self._client.send(data)
            return
        whole, begun = self._written.feed(data)
        self._size += len(whole) + len(begun)
        if whole:
            self._held.append(whole)
            self._complete = len(self._held)
        if begun:
            self._held.append(begun)
        if not self._holds_all:
            self._look()
        elif self._is_full and not self._is_asking:
            self._decide(self._reported_all)

    def hint(self, heads: bytes) -> None:
        """A screen stands behind the head of an answer."""

    def write(self, data: bytes, /) -> None:
        self.send(data)

    def abort(self, exchange: ClientExchange, request: Request) -> None:
        """The exchange has failed."""
        self._client.abort(exchange, request)

    def finish(self, request: Request, *, keep_alive: bool) -> None:
        """The answer is complete. Its client gets the next one when this one was allowed."""
        if self._is_open:
            self._client.finish(request, keep_alive=keep_alive)
            return
        self._end = request, keep_alive
        self._look()

    # -- windows -------------------------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        return self._size > LIMITS.guardrail_held_bytes

    def _look(self) -> None:
        """Ask, if it is time to."""
        size, is_full = self._written.size, self._is_full
        if is_full and self._end is None:
            self._exchange.buffer_full(True)
        if self._is_asking:
            return
        if self._end is not None or size >= self._settings.window_bytes or (is_full and size):
            self._ask()
        elif self._complete and not size and (self._has_sent or is_full):
            # Nothing of this was written by a model: comments, the begin of a message.
            self._release(self._complete)
            self._look()
        elif is_full:
            # Held is one event, of which nobody can be shown a part.
            self._asked = len(self._held)
            self._written.forget_begun()
            self._decide(self._reported_begun)
        elif self._timer is None and size:
            self._timer = self._loop.call_later(self._settings.window_s, self._due)

    def _due(self) -> None:
        self._timer = None
        if not self._is_asking and not self._is_open and self._written.size:
            self._ask()

    def _ask(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._end is not None:
            self._written.end()
            self._complete = len(self._held)
        asked, self._asked = self._question(), self._complete
        self._is_asking = True
        if isinstance(asked, GuardrailVerdict | Failure):
            # Later, because the response is in the middle of its work.
            self._loop.call_soon(self._reported, asked)
            return
        self._ask_hook(PHASE, *asked, self._reported)

    def _decide(self, tell: OnOpinion) -> None:
        """What is held is too large for a verdict."""
        reached("guardrail_held_bytes")
        self._is_asking = True
        # Later, because the response is in the middle of its work.
        self._loop.call_soon(tell, self._hook.failed(PHASE, "too_large"))

    def _question(self) -> Asked | GuardrailVerdict | Failure:
        """What to ask; or what follows when there is nothing that could be asked about."""
        if not self._exchange.response.is_events:
            return self._about_plain(self._written.plain())
        written = self._written.take()
        if written.is_unread and isinstance(failed := self._unread(), Failure):
            return failed
        return self._about_text("".join(written.run), written.beside)

    def _about_plain(self, body: bytes) -> Asked | GuardrailVerdict | Failure:
        if not body:
            return ALLOWED
        try:
            orjson.loads(body)
        except orjson.JSONDecodeError:
            # The begin of JSON, or what another parser may read as some.
            is_like = body.lstrip(_BLANKS).startswith((b"{", b"["))
            try:
                return self._about_text(body.decode("utf-8", "replace" if is_like else "strict"))
            except UnicodeDecodeError:
                return self._unread()
        return self._about, "body", body

    def _about_text(self, text: str, beside: Sequence[str] = ()) -> Asked:
        about = {**self._about, "final": self._end is not None, "context": self._before}
        self._before = (self._before + text)[-CONTEXT_CHARS:]
        return about, "text", orjson.dumps("\n".join((text, *beside)) if beside else text)

    def _unread(self) -> GuardrailVerdict | Failure:
        """It has something that a guardrail cannot read."""
        return self._hook.failed(PHASE, "unreadable")

    def _reported(self, opinion: GuardrailVerdict | Failure) -> None:
        self._is_asking = False
        if isinstance(opinion, GuardrailVerdict) and opinion.action is not GuardAction.DENY:
            self._release(self._asked)
            self._screen_on()
        else:
            self._refuse(denied(opinion, "answer") if isinstance(opinion, GuardrailVerdict) else opinion)

    def _reported_begun(self, failed: GuardrailVerdict | Failure) -> None:
        """One event is too large to be held, so there is no verdict on what has come of it."""
        if isinstance(failed, Failure):
            self._refuse(failed)
            return
        self._is_asking = False
        self._release(self._asked)
        self._in_event = True
        self._screen_on()

    def _reported_all(self, failed: GuardrailVerdict | Failure) -> None:
        """The answer cannot be held, so there is no verdict."""
        if isinstance(failed, Failure):
            self._refuse(failed)
            return
        self._pass_all()
        if self._end is not None:
            self._client.finish(self._end[0], keep_alive=self._end[1])

    def _release(self, count: int) -> None:
        """Send what was allowed."""
        allowed, self._held = self._held[:count], self._held[count:]
        self._in_event = self._in_event and not allowed
        self._complete = max(0, self._complete - count)
        self._size -= sum(map(len, allowed))
        self._has_sent = self._has_sent or bool(allowed)
        for each in allowed:
            self._client.send(each)
        if not self._is_full:
            self._exchange.buffer_full(False)

    def _screen_on(self) -> None:
        end = self._end
        if self._held:
            self._look()
        if end is None or self._held:
            return
        self._is_open = True
        self._client.finish(end[0], keep_alive=end[1])

    def _pass_all(self) -> None:
        self._is_open = True
        held, self._held = self._held, []
        for each in held:
            self._client.send(each)

    # -- the end of an answer that is not allowed ----------------------------------------------------------

    def _refuse(self, failure: Failure) -> None:
        self._is_open, self._held = True, []
        response, end = self._exchange.response, self._end
        if end is None:
            # Nothing of it has left the gate, so there is no head yet.
            response.begun, response.in_event = self._has_sent, self._in_event
            self._exchange.stop(failure)
            return
        shape, keep_alive = shape_of(response.route), end[1] and not self._has_sent
        if self._has_sent:
            event = shape.event(failure, 0)
            self._client.send(self._written.framed(b"\n\n" + event if self._in_event else event))
        else:
            id_line = b"x-request-id: %b\r\n%b" % (response.request_id, response.lines)
            row = failure.kind.row
            self._client.send(
                own_response(row.status, shape.body(failure), own=id_line, close=not keep_alive)
            )
        self._client.finish(end[0], keep_alive=keep_alive)
