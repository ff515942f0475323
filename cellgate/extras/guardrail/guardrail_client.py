"""One hook of a guardrail, and its calls: bounded in time, number and size. What goes wrong is counted.

It is reached by HTTP, on a port or a Unix socket, with kept connections.

In this order: `Hook`, `InvalidReplyError`, `WrittenText`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import orjson

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.config.settings import GuardrailSettings
from cellgate.proxy.http.call import Call
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.reply import CHUNKED, LAST_CHUNK, unframed
from cellgate.proxy.http.sse import end_of_events, payload, split
from cellgate.proxy.http.unit import Pool
from cellgate.proxy.observe.counters import GUARDRAIL, tally


class Hook:
    """The guardrail of a configuration, reached through `pool`."""

    def __init__(self, settings: GuardrailSettings, pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
        self._settings = settings
        self._pool = pool
        self._loop = loop
        self._head = b"POST %b HTTP/1.1\r\n%bcontent-type: application/json\r\ncontent-length: " % (
            settings.target.encode(),
            pool.lines,
        )
        self.calls: set[HookCall] = set()
        self.bytes = 0
        """What these calls ask about."""
        self._shares: dict[str, tuple[int, int]] = {}
        """How many of them a payer has, and their bytes."""

    def ask(
        self,
        phase: str,
        about: dict[str, Any],
        name: str,
        content: bytes,
        tell: OnOpinion,
        *,
        max_bytes: int = 0,
        payer: str = "",
    ) -> Callable[[], None]:
        """Ask about `content`, which stands under `name` (see `question`); `tell` gets the verdict, or the
        failure for the client, once. Returns what stops it.

        `max_bytes`: of a body that it may write instead; 0: it may not. `payer` has no more questions in
        flight, nor bytes of them, than are left for others.
        """
        if how := self._why_not(len(content), payer):
            # Later, because the asker may not be ready for it.
            return self._loop.call_soon(tell, self.failed(phase, how)).cancel
        asked = question(phase, about, name, content)
        sent = self._pool, self._head + b"%d\r\n\r\n" % len(asked), asked
        call = HookCall(self, phase, tell, max_bytes, len(content), payer, sent)
        self.calls.add(call)
        self.bytes += call.size
        count, size = self._shares.get(payer, (0, 0))
        self._shares[payer] = count + 1, size + call.size
        call.begin()
        return call.stop

    def _why_not(self, size: int, payer: str) -> str:
        """Why it is not asked about so many bytes; empty: it is."""
        if size > LIMITS.guardrail_body_bytes:
            reached("guardrail_body_bytes")
            return "too_large"
        count, held = self._shares.get(payer, (0, 0)) if payer else (0, 0)
        # With half of all a payer has its part, so that there is room for whoever comes next.
        if count >= LIMITS.guardrail_calls - len(self.calls):
            reached("guardrail_calls")
            return "too_many"
        if self.bytes + size + held > LIMITS.guardrail_bytes:
            reached("guardrail_bytes")
            return "too_many"
        return ""

    def over(self, call: HookCall) -> None:
        """A question has its answer, or needs none any more."""
        if call in self.calls:
            self.calls.remove(call)
            self.bytes -= call.size
            count, size = self._shares.pop(call.payer)
            if count > 1:
                self._shares[call.payer] = count - 1, size - call.size

    def failed(self, phase: str, how: str) -> GuardrailVerdict | Failure:
        """What follows when there is no verdict."""
        tally(GUARDRAIL, phase, how)
        if self._settings.fail == "open":
            return ALLOWED
        if how == "unreadable":
            return UNREADABLE
        if how != "too_large":
            return GUARDRAIL_FAILED
        return REQUEST_TOO_LARGE if phase == "request" else ANSWER_TOO_LARGE

    def after(self, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Call it when the hook has had its time."""
        return self._loop.call_later(self._settings.timeout_s, call)

    def purge(self, now: float) -> None:
        """Close connections that have been idle for too long."""
        self._pool.purge(now)

    def close(self) -> None:
        """Close idle connections."""
        self._pool.close()


class GuardAction(Enum):
    """What a guardrail wants to be done."""

    ALLOW = "allow"
    DENY = "deny"
    CHANGE = "change"


class GuardrailVerdict(NamedTuple):
    """The answer of a guardrail. `reason` is for the client, `body` replaces that of the request."""

    action: GuardAction
    reason: str = ""
    body: bytes = b""


OnOpinion = Callable[[GuardrailVerdict | Failure], None]
GUARDRAIL_FAILED = Failure(
    FailureKind.GUARDRAIL_FAILED, "the guardrail of this gate gave no verdict in time; retry later"
)
"""What a client gets for a hook that fails, where requests are not let through without its verdict."""
UNREADABLE = Failure(
    FailureKind.GUARDRAIL_FAILED,
    "this has something that the guardrail of this gate cannot read, such as numbers of tokens, a sound or a "
    "picture; ask for text",
)
"""The same for what is no text."""
REQUEST_TOO_LARGE = Failure(
    FailureKind.GUARDRAIL_TOO_LARGE,
    f"the guardrail of this gate takes no request above {LIMITS.guardrail_body_bytes} bytes",
)
ANSWER_TOO_LARGE = Failure(
    FailureKind.GUARDRAIL_FAILED, "the answer is too large for the guardrail of this gate"
)
"""The same for what the hook cannot be asked about."""


class HookCall:
    """One question, about `size` bytes; `sent` are the pool of the hook, the head and the body."""

    __slots__ = ("_call", "_hook", "_max_bytes", "_phase", "_tell", "_timer", "payer", "size")

    def __init__(
        self,
        hook: Hook,
        phase: str,
        tell: OnOpinion,
        max_bytes: int,
        size: int,
        payer: str,
        sent: tuple[Pool, bytes, bytes],
    ) -> None:
        self._hook = hook
        self._phase = phase
        self._tell = tell
        self._max_bytes = max_bytes
        self.size = size
        self.payer = payer
        self._call = Call(self, *sent, max_bytes=max_bytes + LIMITS.guardrail_reply_bytes)
        self._timer = hook.after(partial(self._fail, "timeout"))

    def begin(self) -> None:
        self._call.begin()

    def stop(self) -> None:
        """The verdict is not wanted any more."""
        self._timer.cancel()
        self._hook.over(self)
        self._call.abandon()

    def answered(self, status: int, body: bytes) -> None:
        try:
            opinion = opinion_of(status, body, may_change=bool(self._max_bytes))
            if len(opinion.body) > self._max_bytes:
                raise InvalidReplyError("it made the request too large")
        except InvalidReplyError:
            self._fail("nonsense")
            return
        tally(GUARDRAIL, self._phase, _RESULTS[opinion.action])
        self.stop()
        self._tell(opinion)

    def failed(self, failure: Failure) -> None:
        if failure.kind is FailureKind.STALE_CONNECTION:
            self._call.begin(fresh=True)
        else:
            self._fail("nonsense" if failure.kind is FailureKind.GARBAGE else "unreachable")

    def _fail(self, how: str) -> None:
        self.stop()
        self._tell(self._hook.failed(self._phase, how))


_RESULTS = {GuardAction.ALLOW: "allowed", GuardAction.DENY: "denied", GuardAction.CHANGE: "changed"}


# What a guardrail is asked, and what it may answer. Pure.
#
# A question is a JSON object: `phase` (`request` or `answer`), `id`, `route`, `model`, and `body` or `text`.
# An answer is `{"action": "allow"}`, `{"action": "deny", "reason": "…"}`, or, to a request, `{"action":
# "change", "body": {…}}`.


REASON_CHARS = 256
ALLOWED = GuardrailVerdict(GuardAction.ALLOW)


def denied(opinion: GuardrailVerdict, what: str) -> Failure:
    """The failure for the client."""
    reason = opinion.reason or "no reason was given"
    return Failure(FailureKind.GUARDRAIL_DENIED, f"the guardrail of this gate denied the {what}: {reason}")


class InvalidReplyError(ValueError):
    """It answered what has no meaning; `str()` says what."""


def question(phase: str, about: dict[str, Any], name: str, content: bytes) -> bytes:
    """What is asked, as JSON. `content` is JSON already, and stands under `name`."""
    head = orjson.dumps({"phase": phase, **about})
    return b'%b,"%b":%b}' % (head[:-1], name.encode(), content)


def opinion_of(status: int, answer: bytes, *, may_change: bool) -> GuardrailVerdict:
    """What was answered. Raises InvalidReplyError."""
    if status != 200:
        raise InvalidReplyError(f"it answered {status}")
    try:
        document = orjson.loads(answer)
        action = GuardAction(document["action"])
    except (ValueError, TypeError, KeyError):
        raise InvalidReplyError("its answer is no object with an action of allow, deny, change") from None
    reason, body = document.get("reason", ""), document.get("body")
    if action is not GuardAction.CHANGE:
        return GuardrailVerdict(
            action, " ".join(reason.split())[:REASON_CHARS] if isinstance(reason, str) else ""
        )
    if not may_change or not isinstance(body, dict):
        raise InvalidReplyError("it changes what it may not change, or into no object")
    return GuardrailVerdict(action, body=orjson.dumps(body))


# The text of an answer, from the bytes that its client gets. Pure.
#
# Every string of an event is shown, unless its name says that no model wrote it: there are more APIs than
# names that can be known. What a model wrote under a known name is one run of text. Other strings stand
# behind it. Numbers of tokens, sounds and pictures are no text that a guardrail could read.


_HEAD_END = b"\r\n\r\n"
_DONE = b"[DONE]"
_DEPTH = 16
_RUN = frozenset(
    (
        *("arguments", "content", "delta", "generated_text", "input", "input_json", "output", "output_text"),
        *("partial_json", "reasoning", "reasoning_content", "refusal", "response", "text", "text_output"),
        *("thinking", "transcript"),
    )
)
"""Keys whose strings a model writes: of chat, completions, messages, responses, Triton, TGI, Ollama."""
_OF_PROTOCOL = frozenset(
    (
        *("created_at", "event", "event_id", "done_reason", "encrypted_content", "finish_reason"),
        *("call_id", "id", "item_id", "matched_stop", "model", "model_name", "model_version", "object"),
        *("previous_response_id", "request_id", "response_id", "role", "service_tier", "signature", "status"),
        *("stop_reason", "stop_sequence", "system_fingerprint", "tool_call_id", "type"),
    )
)
"""Keys whose strings say what kind of thing it is, whose, or why it ended."""
_OF_THE_REQUEST = frozenset(("instructions", "metadata", "prompt_token_ids", "tools", "usage"))
"""Keys of what the client itself has sent, and of what was counted."""
_GUARDRAIL_NOT_READ = frozenset(("audio", "b64_json", "image", "images"))
"""Keys of sounds and pictures."""
_GUARDRAIL_ENDS = (".done", ".completed", ".incomplete", ".failed")
"""Kinds of events that repeat what those before them have brought."""
_NAME_CHARS = 256
"""A name of the protocol is no longer; what is, is shown."""


class Written:
    """What a model wrote in some events: `run` is one text, `beside` are other strings; `is_unread`: there is
    something that is no text.
    """

    __slots__ = ("beside", "is_unread", "run")

    def __init__(self) -> None:
        self.run: list[str] = []
        self.beside: list[str] = []
        self.is_unread = False

    @property
    def size(self) -> int:
        """About how many bytes there are; what cannot be read counts as one."""
        return sum(map(len, self.run)) + sum(map(len, self.beside)) + self.is_unread


class WrittenText:
    """What of an answer has not been shown to the guardrail yet.

    `has_head`: the head of the response comes first; `is_chunked`: its body is sent in whole chunks.
    """

    def __init__(self, *, has_head: bool, is_chunked: bool, is_events: bool) -> None:
        self._has_head = has_head
        self._is_chunked = is_chunked
        self._is_events = is_events
        self._tail: list[bytes] = []
        self._before = b"\n"
        """The byte before the next one: a line end where an event may begin."""
        self._written = Written()
        self._known = ""
        """The text that was read: what an event repeats of it need not be shown again."""
        self.size = 0
        """About how many bytes of text there are, of whole events."""

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Bytes that are sent next: up to the end of the last event that is complete with them, and the rest.
        They stay as they are, unless an event ends within.
        """
        head, body = self._without_head(data)
        is_last = False
        if self._is_chunked:
            body, is_last = unframed(body)
        end = end_of_events(body, self._before) if self._is_events else 0
        if not end:
            if body:
                self._tail.append(body)
                self._before = body[-1:]
            return (b"", data) if self._tail else (data, b"")
        whole, rest = body[:end], body[end:]
        self._read(whole)
        self._tail, self._before = [rest] if rest else [], rest[-1:] or b"\n"
        if not rest:
            return data, b""
        return head + self.framed(whole), self.framed(rest) + (LAST_CHUNK if is_last else b"")

    def framed(self, body: bytes) -> bytes:
        """A part of the body as it is sent."""
        return CHUNKED.frame(body) if self._is_chunked else body

    def take(self) -> Written:
        """What was written in whole events, which then is no longer there."""
        written, self._written, self.size = self._written, Written(), 0
        return written

    def end(self) -> None:
        """The answer has ended: what there is of an event is all of it."""
        if self._is_events:
            self._read(b"")
            self.forget_begun()

    def forget_begun(self) -> None:
        """What there is of an event that is not complete will not be shown."""
        self._tail = []

    def plain(self) -> bytes:
        """A plain body, whole."""
        return b"".join(self._tail)

    def _without_head(self, data: bytes) -> tuple[bytes, bytes]:
        if not self._has_head:
            return b"", data
        self._has_head = False
        end = data.index(_HEAD_END) + len(_HEAD_END)
        return data[:end], data[end:]

    def _read(self, end: bytes) -> None:
        """The event that has begun is complete with this `end`, which may have others behind it."""
        found = written_in(b"".join((*self._tail, end)), self._known)
        self._known = (self._known + "".join(found.run))[-LIMITS.guardrail_held_bytes :]
        self._written.run += found.run
        self._written.beside += found.beside
        self._written.is_unread = self._written.is_unread or found.is_unread
        self.size += found.size


def written_in(events: bytes, known: str = "") -> Written:
    """What a model wrote in whole events, behind a `known` text; of one not understood, all of it."""
    found = Written()
    whole, tail = split(events)
    for event in (*whole, tail):
        data = (payload(event) or b"").strip()
        if not event.isascii() and not _is_text(event):
            # Packed, or no events at all.
            found.is_unread = True
        if not data or data == _DONE:
            continue
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError:
            found.run.append(data.decode("utf-8", "replace"))
            continue
        kind = value.get("type") if isinstance(value, dict) else ""
        if isinstance(kind, str) and kind.endswith(_GUARDRAIL_ENDS):
            # What was shown is not shown twice; what was not, is.
            _repeated(value, known + "".join(found.run), found)
        else:
            _read_event(value, found)
    return found


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _read_event(value: Any, found: Written) -> None:
    ids, one = _Ids(), Written()
    _look(value, "", _DEPTH, one, ids)
    if ids.count and not one.run:
        # With a text they are its tokens; without one nobody can read them.
        one.is_unread = True
    run = "".join(one.run)
    found.run += one.run
    # Tokens beside log probabilities are the text once more.
    found.beside += one.beside + ([ids.tokens] if ids.tokens not in run else [])
    found.is_unread = found.is_unread or one.is_unread


def _repeated(value: Any, known: str, found: Written) -> None:
    ids, one = _Ids(), Written()
    _look(value, "", _DEPTH, one, ids)
    found.beside += [text for text in (*one.run, *one.beside, ids.tokens) if text not in known]
    found.is_unread = found.is_unread or one.is_unread


class _Ids:
    """What an event has of tokens: how many numbers, and the texts of those with log probabilities."""

    __slots__ = ("count", "tokens")

    def __init__(self) -> None:
        self.count = 0
        self.tokens = ""


def _look(value: Any, name: str, depth: int, found: Written, ids: _Ids) -> None:
    """Look at what stands under a name."""
    if isinstance(value, str):
        _look_at_text(value, name, found)
    elif not value or name in _OF_THE_REQUEST:
        return
    elif depth == 0:
        found.beside.append(orjson.dumps(value).decode())
    elif name in _GUARDRAIL_NOT_READ and isinstance(value, dict):
        found.is_unread = found.is_unread or bool(value.get("data"))
        for key in value.keys() - {"data"}:
            _look(value[key], key, depth - 1, found, ids)
    elif name == "logprobs":
        _look_at_logprobs(value, found, ids)
    elif isinstance(value, list):
        if any(type(each) is int for each in value):
            ids.count += 1
        for each in value:
            _look(each, name, depth - 1, found, ids)
    elif isinstance(value, dict):
        is_sound = "audio" in str(value.get("type", "")) and "transcript" not in str(value.get("type", ""))
        found.is_unread = found.is_unread or (is_sound and bool(value.get("delta") or value.get("data")))
        for key, each in value.items():
            if key == "name" and name in ("function", "tool_calls", "content_block", "item"):
                key = "content"
            _look(each, key, depth - 1, found, ids)


def _look_at_text(text: str, name: str, found: Written) -> None:
    if not text or (name in _OF_PROTOCOL and len(text) <= _NAME_CHARS):
        return
    if name in _GUARDRAIL_NOT_READ:
        found.is_unread = True
    elif name in _RUN:
        found.run.append(text)
    else:
        found.beside.append(text)


def _look_at_logprobs(value: Any, found: Written, ids: _Ids) -> None:
    """Those of chat (`content`), of completions (`tokens`), of others; what else might have been said."""
    of = value.get("content") or value.get("tokens") if isinstance(value, dict) else value
    for each in of if isinstance(of, list) else ():
        token = each.get("token") if isinstance(each, dict) else each
        ids.tokens += token if isinstance(token, str) else ""
        for other in (each.get("top_logprobs") or ()) if isinstance(each, dict) else ():
            if isinstance(other, dict) and isinstance(text := other.get("token"), str) and text != token:
                found.beside.append(text)
    tops = value.get("top_logprobs") if isinstance(value, dict) else None
    for each in tops if isinstance(tops, list) else ():
        found.beside += [text for text in each if text not in ids.tokens] if isinstance(each, dict) else []
