"""The calls of a guardrail: bounded in time, number and size. What goes wrong is counted.

It is reached by HTTP, on a port or a Unix socket, with kept connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.config.settings import GuardrailSettings
from cellgate.proxy.guardrail.opinion import (
    ALLOWED,
    GuardAction,
    NonsenseError,
    Opinion,
    opinion_of,
    question,
)
from cellgate.proxy.process.tallies import GUARDRAIL, tally
from cellgate.proxy.wire.call import Call
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.proxy.wire.pool import Pool

OnOpinion = Callable[[Opinion | Failure], None]
FAILED = Failure(
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

    def ask(
        self,
        phase: str,
        about: dict[str, Any],
        name: str,
        content: bytes,
        tell: OnOpinion,
        *,
        max_bytes: int = 0,
    ) -> Callable[[], None]:
        """Ask about `content`, which stands under `name` (see `question`); `tell` gets the verdict, or the
        failure for the client, once. Returns what stops it.

        `max_bytes`: of a body that it may write instead; 0: it may not.
        """
        if how := self._why_not(len(content)):
            # Later, because the asker may not be ready for it.
            return self._loop.call_soon(tell, self.failed(phase, how)).cancel
        call = HookCall(self, phase, tell, max_bytes, len(content))
        self.calls.add(call)
        self.bytes += call.size
        asked = question(phase, about, name, content)
        call.begin(self._pool, self._head + b"%d\r\n\r\n" % len(asked), asked)
        return call.stop

    def _why_not(self, size: int) -> str:
        """Why it is not asked about so many bytes; empty: it is."""
        if size > LIMITS.guardrail_body_bytes:
            reached("guardrail_body_bytes")
            return "too_large"
        if len(self.calls) >= LIMITS.guardrail_calls:
            reached("guardrail_calls")
            return "too_many"
        if self.bytes + size > LIMITS.guardrail_bytes:
            reached("guardrail_bytes")
            return "too_many"
        return ""

    def over(self, call: HookCall) -> None:
        """A question has its answer, or needs none any more."""
        if call in self.calls:
            self.calls.remove(call)
            self.bytes -= call.size

    def failed(self, phase: str, how: str) -> Opinion | Failure:
        """What follows when there is no verdict."""
        tally(GUARDRAIL, phase, how)
        if self._settings.fail == "open":
            return ALLOWED
        if how == "unreadable":
            return UNREADABLE
        if how != "too_large":
            return FAILED
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


class HookCall:
    """One question in flight, about `size` bytes."""

    __slots__ = ("_call", "_hook", "_max_bytes", "_phase", "_tell", "_timer", "size")

    _call: Call

    def __init__(self, hook: Hook, phase: str, tell: OnOpinion, max_bytes: int, size: int) -> None:
        self._hook = hook
        self._phase = phase
        self._tell = tell
        self._max_bytes = max_bytes
        self.size = size
        self._timer = hook.after(partial(self._fail, "timeout"))

    def begin(self, pool: Pool, head: bytes, asked: bytes) -> None:
        """Send the question."""
        most = self._max_bytes + LIMITS.guardrail_reply_bytes
        self._call = Call(self, pool, head, asked, max_bytes=most)
        self._call.begin()

    def stop(self) -> None:
        """The verdict is not wanted any more."""
        self._timer.cancel()
        self._hook.over(self)
        self._call.abandon()

    def answered(self, status: int, body: bytes) -> None:
        """The hook has answered."""
        try:
            opinion = opinion_of(status, body, may_change=bool(self._max_bytes))
            if len(opinion.body) > self._max_bytes:
                raise NonsenseError("it made the request too large")
        except NonsenseError:
            self._fail("nonsense")
            return
        tally(GUARDRAIL, self._phase, _RESULTS[opinion.action])
        self.stop()
        self._tell(opinion)

    def failed(self, failure: Failure) -> None:
        """There is no answer."""
        if failure.kind is FailureKind.STALE_CONNECTION:
            self._call.begin(fresh=True)
        else:
            self._fail("nonsense" if failure.kind is FailureKind.GARBAGE else "unreachable")

    def _fail(self, how: str) -> None:
        self.stop()
        self._tell(self._hook.failed(self._phase, how))


_RESULTS = {GuardAction.ALLOW: "allowed", GuardAction.DENY: "denied", GuardAction.CHANGE: "changed"}
