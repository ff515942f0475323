"""The calls of a guardrail: bounded in time, number and size. What goes wrong is counted.

It is reached by HTTP, on a port or a Unix socket, with kept connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.config.settings import GuardrailSettings
from cellgate.proxy.guardrail.opinion import ALLOWED, GuardAction, NonsenseError, Opinion, opinion_of
from cellgate.proxy.process.tallies import GUARDRAIL, tally
from cellgate.proxy.wire.call import Call
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.proxy.wire.pool import Pool

OnOpinion = Callable[[Opinion | Failure], None]
FAILED = Failure(
    FailureKind.GUARDRAIL_FAILED, "the guardrail of this gate gave no verdict in time; retry later"
)
"""What a client gets for a hook that fails, where requests are not let through without its verdict."""


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

    def ask(self, phase: str, question: bytes, tell: OnOpinion, *, max_bytes: int = 0) -> Callable[[], None]:
        """Ask; `tell` gets the verdict, or the failure for the client, once. Returns what stops it.

        `max_bytes`: of a body that it may write instead; 0: it may not.
        """
        if len(self.calls) >= LIMITS.guardrail_calls:
            reached("guardrail_calls")
            # Later, because the asker may not be ready for it.
            return self._loop.call_soon(tell, self.failed(phase, "too_many")).cancel
        call = HookCall(self, phase, tell, max_bytes)
        self.calls.add(call)
        call.begin(self._pool, self._head + b"%d\r\n\r\n" % len(question), question)
        return call.stop

    def failed(self, phase: str, how: str) -> Opinion | Failure:
        """What follows when there is no verdict."""
        tally(GUARDRAIL, phase, how)
        return ALLOWED if self._settings.fail == "open" else FAILED

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
    """One question in flight."""

    __slots__ = ("_call", "_hook", "_max_bytes", "_phase", "_tell", "_timer")

    _call: Call

    def __init__(self, hook: Hook, phase: str, tell: OnOpinion, max_bytes: int) -> None:
        self._hook = hook
        self._phase = phase
        self._tell = tell
        self._max_bytes = max_bytes
        self._timer = hook.after(partial(self._fail, "timeout"))

    def begin(self, pool: Pool, head: bytes, question: bytes) -> None:
        """Send the question."""
        most = self._max_bytes + LIMITS.guardrail_reply_bytes
        self._call = Call(self, pool, head, question, max_bytes=most)
        self._call.begin()

    def stop(self) -> None:
        """The verdict is not wanted any more."""
        self._timer.cancel()
        self._hook.calls.discard(self)
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
