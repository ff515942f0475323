"""The life of a request, from a whole request to the end of its response: where it is, and the events that
lead from one state to the next.

It is a state machine of synchronous callbacks, so that no cancellation can come between two of its steps.
The table (table.py) says what each event does in each state. Policy is elsewhere: routes.py has the kinds of
paths, the dispatcher chooses units, http/errors.py has the meaning of failures, continuation.py the end of
broken streams. Rules:
1. Each lease is released exactly once, before anything else follows from its end.
2. No exception leaves it: callers use `guarded` (observe/defects.py), and `crashed` then ends the exchange.
3. After the commit (`lease.committed`) the request is not sent again: another unit resumes the stream where
   the text ends, or the client gets an error.

In this order: `ExchangeState`, `ExchangeEvent`, `RequestLife`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Any

from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.observe.defects import guarded
from cellgate.router.nouns import Ask
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.http.client import ResponseClient
    from cellgate.proxy.http.reply import ReplyHead
    from cellgate.proxy.http.request import Request
    from cellgate.proxy.request.response import Response
    from cellgate.proxy.request.services import Services
    from cellgate.proxy.resume.chat import Proved


class ExchangeState(IntEnum):
    """Where a request is."""

    PARSING = 0
    """It is being parsed."""
    WAITING = auto()
    """It waits for a unit: the result may come at once or through the queue."""
    BUFFERING = auto()
    """It was sent to a unit; nothing of the answer was passed on yet."""
    RELAYING = auto()
    """The answer of a unit is being passed on."""
    PREFILLING = auto()
    """Another unit computes the prompt, or is about to; the unit of the lease has got nothing yet."""
    PROVING = auto()
    """A unit is asked to prove that it can resume a stream that another one broke."""
    RESUMED = auto()
    """That unit got the request to resume the stream; nothing of its answer was passed on yet."""
    OVER = auto()
    """The response has ended."""


class ExchangeEvent(IntEnum):
    """What happens to an exchange."""

    STARTED = 0
    """The whole request has arrived."""
    ASKED = auto()
    """Its large body is parsed, or cannot be."""
    GRANTED = auto()
    """A unit was found."""
    REFUSED = auto()
    """No unit was found."""
    REPLIED = auto()
    """The unit has sent the head of its reply."""
    COMMITTED = auto()
    """The attempt commits."""
    DONE = auto()
    """The unit's reply has ended, whole."""
    FAILED = auto()
    """The attempt ended without a whole reply."""
    EVICTED = auto()
    """The unit went DOWN."""
    PREFILLED = auto()
    """The unit of the lease is to get the request: another one has computed its prompt, computes it at this
    moment, or does not.
    """
    PROVEN = auto()
    """The unit has proven that it can resume the stream."""
    CONCLUDED = auto()
    """The text is complete, and the unit has provided what the last events need."""
    UNPROVEN = auto()
    """The unit cannot resume the stream, and neither could any other."""
    LEFT = auto()
    """The client is gone."""
    CRASHED = auto()
    """A callback has failed: a defect of the gate."""
    TICKED = auto()
    """Time has passed."""
    STOPPED = auto()
    """The gate ends it, for a reason that the client is told: its key was revoked."""
    SCREENED = auto()
    """A guardrail has seen the request, and allows, changes or denies it."""
    DOUBTED = auto()
    """The unit's answer is not good: it may be the unit, or the request."""


@dataclass(frozen=True, slots=True)
class Transition:
    """The action for an event, and the states that may follow."""

    action: Callable[..., Any]
    """Called with the exchange and the arguments of the event."""
    follows: tuple[ExchangeState, ...]


Table = dict[tuple[ExchangeState, ExchangeEvent], Transition]


# A member of an enum is a slow attribute on CPython 3.11 (33 ns an access, ten are 0.3 % of a request):
# the modules of the hot path look theirs up once.
PARSING = ExchangeState.PARSING
ON_STARTED = ExchangeEvent.STARTED
ON_ASKED = ExchangeEvent.ASKED
ON_GRANTED = ExchangeEvent.GRANTED
ON_REFUSED = ExchangeEvent.REFUSED
ON_REPLIED = ExchangeEvent.REPLIED
ON_COMMITTED = ExchangeEvent.COMMITTED
ON_DONE = ExchangeEvent.DONE
ON_FAILED = ExchangeEvent.FAILED
ON_EVICTED = ExchangeEvent.EVICTED
ON_PREFILLED = ExchangeEvent.PREFILLED
ON_PROVEN = ExchangeEvent.PROVEN
ON_CONCLUDED = ExchangeEvent.CONCLUDED
ON_UNPROVEN = ExchangeEvent.UNPROVEN
ON_LEFT = ExchangeEvent.LEFT
ON_CRASHED = ExchangeEvent.CRASHED
ON_TICKED = ExchangeEvent.TICKED
ON_STOPPED = ExchangeEvent.STOPPED
ON_SCREENED = ExchangeEvent.SCREENED
ON_DOUBTED = ExchangeEvent.DOUBTED


class RequestLife:
    """What happens to one request: its client, its attempts, and what it waits for call these methods.
    `state` is where it is in the `table`. What the rows work with is above it, in the exchange.
    """

    __slots__ = ()

    # The exchange sets them: an `__init__` of their own would be 26 bytecodes of each request.
    table: Table
    state: ExchangeState
    gate: Services
    client: ResponseClient
    request: Request
    response: Response

    # ExchangeEvent says what each means, the table what is done.

    def start(self) -> None:
        self.table[self.state, ON_STARTED].action(self)

    def asked(self, ask: Ask | Failure) -> None:
        guarded(self, self.table[self.state, ON_ASKED].action, self, ask)

    def resolve(self, found: Lease | Failure) -> None:
        """A unit was found, or none."""
        self.table[self.state, ON_GRANTED if isinstance(found, Lease) else ON_REFUSED].action(self, found)

    def accepts(self, head: ReplyHead, pieces: list[bytes]) -> bool:
        """Whether a unit's reply is sent to the client. A busy or failing unit: first a retry elsewhere."""
        accepts: bool = self.table[self.state, ON_REPLIED].action(self, head, pieces)
        return accepts

    def doubts(self, what: str, body: bytes) -> bool:
        """Whether an answer with something wrong about it is not shown."""
        is_taken: bool = self.table[self.state, ON_DOUBTED].action(self, what, body)
        return is_taken

    def may_hold(self, size: int) -> bool:
        """Whether there is memory for so many more bytes of an answer that are not shown yet. They count like
        a body of the request, for as long as it lasts.
        """
        request, gate = self.request, self.gate
        if request.reserved + size > gate.settings.limits.body_bytes:
            return False
        is_there = gate.memory.take(size, request.reserved)
        request.reserved += size if is_there else 0
        return is_there

    def committed(self, first: bytes, at: float) -> None:
        """The attempt commits; `first` is the beginning of what the client gets."""
        self.table[self.state, ON_COMMITTED].action(self, first, at)

    def done(self) -> None:
        self.table[self.state, ON_DONE].action(self)

    def failed(self, failure: Failure) -> None:
        """The attempt ended without a whole reply; or the gate itself failed, and has logged it."""
        event = ON_CRASHED if failure.kind is FailureKind.INTERNAL else ON_FAILED
        self.table[self.state, event].action(self, failure)

    def evicted(self) -> None:
        self.client.look_at = 0.0
        guarded(self, self.table[self.state, ON_EVICTED].action, self)

    def proven(self, found: Proved) -> None:
        """What came of asking the unit whether it can resume the stream."""
        match found:
            case Failure():
                self.failed(found)
            case str():
                self.refused(found)
            case bytes():
                self.table[self.state, ON_CONCLUDED].action(self, found)
            case _:
                self.table[self.state, ON_PROVEN].action(self, found)

    def refused(self, reason: str) -> None:
        self.table[self.state, ON_UNPROVEN].action(self, reason)

    def client_left(self) -> None:
        self.table[self.state, ON_LEFT].action(self)

    def stop(self, failure: Failure) -> None:
        """End it with this error, in the form that is still possible."""
        guarded(self, self.table[self.state, ON_STOPPED].action, self, failure)

    def screened(self, ask: Ask | Failure) -> None:
        """What a guardrail says of the request."""
        guarded(self, self.table[self.state, ON_SCREENED].action, self, ask)

    def crashed(self, error: Exception) -> None:
        self.gate.defect(f"request {self.response.request_id.decode('latin-1')} failed", error)
        self.table[self.state, ON_CRASHED].action(self)

    def tick(self, now: float) -> None:
        self.table[self.state, ON_TICKED].action(self, now)
