"""Asks a unit what a proof has to know: its requests are sent one after another."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Generic, Protocol, TypeVar

import orjson

from cellgate.proxy.resume.blocks import object_of
from cellgate.proxy.resume.proof import ProofRequest, UnprovenError
from cellgate.proxy.wire.call import Call
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.proxy.wire.pool import Pool

MakeHead = Callable[[bytes, int], bytes]
"""The head of a request to the unit, of a path and the length of a body."""
Result = TypeVar("Result")


class ProofOwner(Protocol):
    """Who waits for the proof. One of these is called, or the `proven` of the questions."""

    def unproven(self, reason: str) -> None:
        """The unit has answered, and the proof fails."""

    def failed(self, failure: Failure) -> None:
        """The unit failed before it was proven."""


class Questions(Generic[Result]):
    """One proof, on one unit; `proven` gets its result."""

    __slots__ = ("_asker", "_call", "_head", "_optional", "_pool", "_proof", "_proven")

    def __init__(
        self,
        proof: Generator[ProofRequest, dict[str, Any], Result],
        asker: ProofOwner,
        proven: Callable[[Result], None],
        pool: Pool,
        head: MakeHead,
    ) -> None:
        self._proof = proof
        self._asker = asker
        self._proven = proven
        self._pool = pool
        self._head = head
        self._optional = False
        self._call: Call | None = None

    @property
    def is_open(self) -> bool:
        """Whether an answer is awaited."""
        return self._call is not None and not self._call.over

    def begin(self, *, fresh: bool) -> None:
        """Ask the first one, on a new connection if `fresh`."""
        self._ask(None, fresh=fresh)

    def abandon(self) -> None:
        """Stop asking."""
        if self._call is not None:
            self._call.abandon()

    def answered(self, status: int, body: bytes) -> None:
        """The unit answered a request of the proof."""
        if status >= 500 or status == 429:
            kind = FailureKind.BUSY if status in (429, 503) else FailureKind.UNIT_ERROR
            reason = f"it answered {status} to the check before resuming the stream"
            self._asker.failed(Failure(kind, reason))
            return
        answer = object_of(body) if status == 200 else None
        if answer is None and not self._optional:
            self._asker.unproven(f"its engine answered {status} to the check before resuming the stream")
        else:
            self._ask(answer or {})

    def failed(self, failure: Failure) -> None:
        """It gave no answer."""
        self._asker.failed(failure)

    def _ask(self, answer: dict[str, Any] | None, *, fresh: bool = False) -> None:
        try:
            # Sending None starts the generator.
            question = self._proof.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            self._proven(end.value)
        except UnprovenError as error:
            self._asker.unproven(str(error))
        else:
            body = orjson.dumps(question.body)
            self._optional = question.is_optional
            self._call = Call(self, self._pool, self._head(question.path.encode(), len(body)), body)
            self._call.begin(fresh=fresh)
