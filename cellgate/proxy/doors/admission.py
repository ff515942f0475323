"""What one request may do, by its key, and the account of what it uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cellgate.proxy.config.keys import Key
from cellgate.proxy.doors.bill import Accounts, Bill
from cellgate.proxy.doors.habits import Habits
from cellgate.proxy.request.routes import IN_PATH, NOWHERE, model_in
from cellgate.proxy.wire.failure import UNCHARGED, Failure, FailureKind
from cellgate.router.nouns import Ask, Outcome

if TYPE_CHECKING:
    from cellgate.proxy.logs.record import Finished
    from cellgate.proxy.metrics.continuations import ContinuationResult
    from cellgate.proxy.request.dispatcher import Charge
    from cellgate.proxy.request.door import Visitor
    from cellgate.proxy.request.routes import ModelPlace
    from cellgate.router.cost_model import Usage
    from cellgate.router.unit_state import Lease

_NOT_CHARGED = tuple(kind.value for kind in UNCHARGED)
_OK, _LEFT = Outcome.OK, Outcome.CLIENT_LEFT
_ANSWERLESS = ("embeddings", "rerank", "score", "pooling", "classify", "moderations", "speech", "images")
"""Routes whose engines generate no tokens."""
_TENANT = Ask._fields.index("tenant")
_PAYER = Ask._fields.index("payer")
_BEHIND_TENANT = _TENANT + 1
_new = tuple.__new__


class Doorway(Protocol):
    """The door that a request came through. `in_flight` has those that were charged."""

    accounts: Accounts
    in_flight: dict[KeyAdmission, None]

    def shut(self, key: Key, refusal: Failure) -> None: ...
    def refusal(self, key: Key) -> Failure | None: ...


class KeyAdmission:
    """That of one request, which came at `at` (seconds since 1970). `digest` is that of what it has shown. It
    observes the request (request/observer.py), to account for it.
    """

    unit_lines: bytes = b""

    __slots__ = (
        "_asked",
        "_at",
        "_charged",
        "_charged_as",
        "_door",
        "_habits",
        "_usage",
        "digest",
        "key",
        "visitor",
    )

    def __init__(
        self, door: Doorway, digest: bytes, key: Key, visitor: Visitor, habits: Habits, at: float
    ) -> None:
        self._door = door
        self.digest = digest
        self.key = key
        self.visitor = visitor
        self._habits = habits
        self._at = at
        self._charged: tuple[int, int] | None = None
        self._usage: Usage | None = None

    # -- what it may do ------------------------------------------------------------------------------------

    def admit(self, ask: Ask, body_priority: int, place: ModelPlace) -> Ask | Failure:
        """The ask with its tenant; or why the key does not allow it."""
        key = self.key
        models = key.models
        if models is not None and (ask.model not in models or place is IN_PATH):
            refusal = self._barred(ask.model, models, place)
            if refusal is not None:
                return refusal
        low, high = key.priority
        # The gate goes by a header, and the engine by the body, if that has one.
        if not low <= ask.priority <= high or (body_priority and not low <= body_priority <= high):
            priority = body_priority if low <= ask.priority <= high else ask.priority
            reason = f"this key allows priorities from {low} to {high}, and the request has {priority}"
            return Failure(FailureKind.PRIORITY_NOT_ALLOWED, reason, param="priority")
        # As _replace does, in a quarter of the time.
        return _new(
            Ask,
            (
                *ask[:_TENANT],
                key.tenant.name,
                *ask[_BEHIND_TENANT:_PAYER],
                key.tenant.name,
                *ask[_PAYER + 1 :],
            ),
        )

    def _barred(self, model: str | None, models: frozenset[str], place: ModelPlace) -> Failure | None:
        """Why a key for some models is not for this one, or for a request that names none."""
        named = {model, model_in(self.visitor.request.path) if place is IN_PATH else None} - {None}
        if named <= models and (named or place is NOWHERE):
            return None
        asked = f"model {', '.join(map(repr, named - models))}" if named else "a request that names no model"
        reason = f"this key is not for {asked}; it is for {', '.join(sorted(models))}"
        return Failure(FailureKind.MODEL_NOT_ALLOWED, reason, param="model")

    def may_fall_back(self, model: str) -> bool:
        """Whether another model may serve it."""
        return self.key.models is None or model in self.key.models

    def used_up(self, refusal: Failure) -> None:
        """A limit of its key has nothing left."""
        self._door.shut(self.key, refusal)

    def refusal(self) -> Failure | None:
        """Why it is refused by now, before anything was done for it."""
        if (refusal := self._door.refusal(self.key)) is not None:
            self._door.accounts.refused(self.key.tenant.name, refusal.used_up)
        return refusal

    @property
    def payer(self) -> str:
        """Whose key it is."""
        return f"key {self.key.name} of {self.key.tenant.name}"

    # -- what it uses --------------------------------------------------------------------------------------

    def charge(self, ask: Ask) -> Charge:
        """What it may take at most. It is settled at its end."""
        self._asked = ask
        self._charged_as = ask.model or ""
        prompt, completion = self._habits.expect(ask.prompt_tokens, ask.max_tokens, ask.answers)
        if self.visitor.response.route in _ANSWERLESS:
            completion = 0
        self._charged = prompt, completion
        self._door.in_flight[self] = None
        return self.key.name, prompt, completion, self._at

    def completed(self, usage: Usage | None) -> None:
        """The answer is complete."""
        self._usage = usage

    def spend(self) -> None:
        """Account for tokens of the answer that came and were not expected."""
        response, charged = self.visitor.response, self._charged
        if charged is None or (more := response.events - charged[1]) <= 0:
            return
        self._charged = charged[0], response.events
        self._door.accounts.spent(self.key.name, self.key.tenant.name, self._charged_as, more)

    def over(self, record: Finished, _at: float) -> None:
        """The response has ended."""
        charged = self._charged
        if charged is not None:
            del self._door.in_flight[self]
            if record.code not in _NOT_CHARGED:
                self._door.accounts.settle(self._bill(record, charged))
        # They hold each other, and would wait for the garbage collector.
        del self.visitor

    def _bill(self, record: Finished, charged: tuple[int, int]) -> Bill:
        usage, asked, key = self._usage, self._asked, self.key
        if usage is not None:
            prompt = usage.prompt_tokens
            completion = usage.answer_tokens
            self._habits.learn(asked.prompt_tokens, prompt, completion // asked.answers)
        elif record.events or record.outcome is _OK or (record.outcome is _LEFT and record.attempts):
            # Its engine has computed, and did not say how much, or not all.
            prompt, completion, usage = self._estimate(record, charged)
        else:
            prompt = completion = 0
        # The fields stand in their order.
        bill = (
            record.request_id,
            key.name,
            key.tenant.name,
            record.model,
            self._charged_as,
            record.route,
            record.status,
            self._at,
            charged[0],
            charged[1],
            prompt,
            completion,
            usage is None,
        )
        return _new(Bill, bill)

    def _estimate(self, record: Finished, charged: tuple[int, int]) -> tuple[int, int, Usage | None]:
        """Tokens of the prompt and of the answer as far as they are known, and the usage if it was told."""
        response, asked = self.visitor.response, self._asked
        told = response.usage()
        if told is not None and response.has_answered():
            # It was told, though the client has left before the very end.
            return told.prompt_tokens, told.answer_tokens, told
        prompt, least = (told.prompt_tokens, told.answer_tokens) if told is not None else (charged[0], 0)
        if record.route in _ANSWERLESS:
            completion = 0
        else:
            completion = response.tokens_shown()
            if not asked.stream and record.outcome is not _OK:
                # Nobody knows how much of it was computed when its client left.
                completion = max(completion, charged[1])
        if asked.max_tokens:
            completion = min(completion, asked.max_tokens * asked.answers)
        return prompt, max(least, completion), None

    # -- what else it observes -----------------------------------------------------------------------------

    def attempted(self, lease: Lease, before: int) -> None:
        """A unit was found."""

    def waited(self, since: float, until: float) -> None:
        """It was queued."""

    def replied(self, status: int) -> None:
        """The unit has sent the head of its reply."""

    def failing(self, code: str) -> None:
        """The attempt in flight fails."""

    def attempt_over(self, lease: Lease, outcome: Outcome, at: float) -> None:
        """The attempt in flight is over."""

    def broke(self, unit: str, at: float) -> None:
        """A unit broke its answer."""

    def settled(self, result: ContinuationResult) -> None:
        """The result of the break is known."""
