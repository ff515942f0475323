"""The life of an exchange as a table: in which state which event does what, and which state may follow.

A test in tests/laws checks that each pair of a state and an event has a row, or a reason why it cannot occur.
"""

from __future__ import annotations

from cellgate.proxy.request import (
    answering,
    asking,
    breaking,
    clocks,
    ending,
    opening,
    second_opinion,
    splitting,
)
from cellgate.proxy.request.states import ExchangeEvent, ExchangeState, Table, Transition

_S, _E = ExchangeState, ExchangeEvent
_SENT = (_S.HOLDING, _S.PROVING, _S.RESUMED)
_LEASED = (_S.PREFILLING, *_SENT)
# Starting an attempt may fail before it returns; then the exchange has already moved on.
_ANY = tuple(ExchangeState)[1:]
_ENDS = (_S.OVER,)


def _ignore(*_: object) -> None:
    """It changes nothing in this state."""


TABLE: Table = {
    (_S.PARSING, _E.STARTED): Transition(opening.start, tuple(ExchangeState)),
    (_S.PARSING, _E.ASKED): Transition(opening.read_late, _ANY),
    (_S.PARSING, _E.SCREENED): Transition(opening.screened, _ANY),
    (_S.PARSING, _E.LEFT): Transition(ending.leave, _ENDS),
    (_S.PARSING, _E.TICKED): Transition(clocks.tick, (_S.PARSING,)),
    (_S.PARSING, _E.STOPPED): Transition(ending.stop, _ENDS),
    (_S.WAITING, _E.GRANTED): Transition(asking.grant, _ANY),
    # Another model may serve it.
    (_S.WAITING, _E.REFUSED): Transition(opening.refuse, _ANY),
    (_S.WAITING, _E.LEFT): Transition(ending.leave, _ENDS),
    (_S.WAITING, _E.TICKED): Transition(clocks.tick, _ANY),
    (_S.WAITING, _E.STOPPED): Transition(ending.stop, _ENDS),
    (_S.HOLDING, _E.REPLIED): Transition(answering.judge_head, _ANY),
    (_S.HOLDING, _E.COMMITTED): Transition(answering.commit, (_S.RELAYING,)),
    (_S.HOLDING, _E.DOUBTED): Transition(second_opinion.doubt, _ANY),
    (_S.HOLDING, _E.FAILED): Transition(breaking.try_again, _ANY),
    (_S.HOLDING, _E.EVICTED): Transition(breaking.move, _ANY),
    (_S.HOLDING, _E.LEFT): Transition(ending.leave, _ENDS),
    (_S.HOLDING, _E.TICKED): Transition(clocks.tick, _ANY),
    (_S.HOLDING, _E.STOPPED): Transition(ending.stop, _ENDS),
    (_S.RELAYING, _E.DONE): Transition(answering.finish, _ENDS),
    (_S.RELAYING, _E.FAILED): Transition(breaking.break_stream, _ANY),
    # A unit that shuts down gracefully continues its streams; a stall shows when it does not.
    (_S.RELAYING, _E.EVICTED): Transition(_ignore, (_S.RELAYING,)),
    (_S.RELAYING, _E.LEFT): Transition(ending.leave, _ENDS),
    (_S.RELAYING, _E.TICKED): Transition(clocks.tick, _ANY),
    (_S.RELAYING, _E.STOPPED): Transition(ending.stop, _ENDS),
    (_S.PREFILLING, _E.PREFILLED): Transition(splitting.prefilled, _ANY),
    # A decoder that needs the other unit cannot go on without it.
    (_S.PREFILLING, _E.FAILED): Transition(breaking.try_again, _ANY),
    (_S.PREFILLING, _E.EVICTED): Transition(breaking.move, _ANY),
    (_S.PREFILLING, _E.LEFT): Transition(ending.leave, _ENDS),
    (_S.PREFILLING, _E.TICKED): Transition(splitting.tick, _ANY),
    (_S.PREFILLING, _E.STOPPED): Transition(ending.stop, _ENDS),
    (_S.PROVING, _E.PROVEN): Transition(asking.resume, _ANY),
    (_S.PROVING, _E.CONCLUDED): Transition(breaking.conclude, _ENDS),
    (_S.PROVING, _E.UNPROVEN): Transition(breaking.give_up, _ENDS),
    (_S.PROVING, _E.FAILED): Transition(breaking.try_again, _ANY),
    (_S.PROVING, _E.EVICTED): Transition(breaking.move, _ANY),
    (_S.PROVING, _E.LEFT): Transition(ending.leave, _ENDS),
    (_S.PROVING, _E.TICKED): Transition(clocks.tick, _ANY),
    (_S.PROVING, _E.STOPPED): Transition(ending.stop, _ENDS),
    (_S.RESUMED, _E.REPLIED): Transition(answering.judge_head, _ANY),
    (_S.RESUMED, _E.COMMITTED): Transition(answering.commit, (_S.RELAYING,)),
    (_S.RESUMED, _E.FAILED): Transition(breaking.try_again, _ANY),
    (_S.RESUMED, _E.EVICTED): Transition(breaking.move, _ANY),
    (_S.RESUMED, _E.LEFT): Transition(ending.leave, _ENDS),
    (_S.RESUMED, _E.TICKED): Transition(clocks.tick, _ANY),
    (_S.RESUMED, _E.STOPPED): Transition(ending.stop, _ENDS),
    # A body may be parsed off the loop after its client has left.
    (_S.OVER, _E.ASKED): Transition(_ignore, _ENDS),
    (_S.OVER, _E.SCREENED): Transition(_ignore, _ENDS),
    # A connection always reports its close, even after the response has ended.
    (_S.OVER, _E.LEFT): Transition(_ignore, _ENDS),
    (_S.OVER, _E.TICKED): Transition(_ignore, _ENDS),
    (_S.OVER, _E.STOPPED): Transition(_ignore, _ENDS),
    **{(state, _E.CRASHED): Transition(ending.collapse, _ENDS) for state in ExchangeState},
}

_STARTED_ONCE = "a request starts once"
_NOT_ASKED = "no unit is acquired before the request is parsed"
_ASKED_ONCE = "a request is parsed once, in PARSING"
_NO_LEASE = "there is no open lease"
_HAS_LEASE = "there is a lease already: the next unit is acquired after it is closed"
_NOT_SENT = "the request is sent after the unit has proven that it can resume the stream"
_NOT_COMMITTED = "a reply ends after its commit"
_HEAD_ONCE = "an attempt has one head, before the commit"
_NO_PROOF = "no unit is asked for a proof"
_NO_LEG = "no other unit computes its prompt"
_PROMPT_FIRST = "the unit of the lease gets the request once the prompt is computed"
_CLOSED = "everything was released, so nothing can report this any more"

_OF_PROOFS = (_E.PROVEN, _E.CONCLUDED, _E.UNPROVEN)
_FIRST_ANSWER = "only the first answer is compared: one that resumes a stream must fit it anyway"
_OF_REPLIES = (_E.REPLIED, _E.COMMITTED, _E.DONE, _E.FAILED, _E.DOUBTED)
_OF_UNITS = (*_OF_REPLIES, _E.EVICTED, _E.PREFILLED, *_OF_PROOFS)
_OF_PICKS = (_E.GRANTED, _E.REFUSED)

IMPOSSIBLE: dict[tuple[ExchangeState, ExchangeEvent], str] = {
    **{(state, _E.STARTED): _STARTED_ONCE for state in tuple(ExchangeState)[1:]},
    **{(_S.PARSING, event): _NOT_ASKED for event in (*_OF_PICKS, *_OF_UNITS)},
    **{(_S.WAITING, event): _NO_LEASE for event in _OF_UNITS},
    **{(state, event): _HAS_LEASE for state in (*_LEASED, _S.RELAYING) for event in _OF_PICKS},
    **{(state, _E.ASKED): _ASKED_ONCE for state in (_S.WAITING, *_LEASED, _S.RELAYING)},
    **{(state, _E.SCREENED): _ASKED_ONCE for state in (_S.WAITING, *_LEASED, _S.RELAYING)},
    **{(state, event): _NO_PROOF for state in (_S.HOLDING, _S.RELAYING) for event in _OF_PROOFS},
    **{(_S.RESUMED, event): _NO_PROOF for event in _OF_PROOFS},
    **{(_S.PREFILLING, event): _NO_PROOF for event in _OF_PROOFS},
    **{(_S.PREFILLING, event): _PROMPT_FIRST for event in _OF_REPLIES[:3]},
    **{(state, _E.PREFILLED): _NO_LEG for state in (*_SENT, _S.RELAYING)},
    **{(state, _E.DONE): _NOT_COMMITTED for state in _SENT},
    **{(_S.PROVING, event): _NOT_SENT for event in (_E.REPLIED, _E.COMMITTED)},
    (_S.PREFILLING, _E.DOUBTED): _PROMPT_FIRST,
    (_S.PROVING, _E.DOUBTED): _NOT_SENT,
    (_S.RESUMED, _E.DOUBTED): _FIRST_ANSWER,
    (_S.RELAYING, _E.DOUBTED): _HEAD_ONCE,
    **{(_S.RELAYING, event): _HEAD_ONCE for event in (_E.REPLIED, _E.COMMITTED)},
    **{(_S.OVER, event): _CLOSED for event in (*_OF_PICKS, *_OF_UNITS)},
}
"""All other pairs, each with the reason why it does not occur."""
