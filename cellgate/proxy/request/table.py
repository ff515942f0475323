"""The life of an exchange as a table: in which state which event does what or is ignored, and which state may
follow.

A test in tests/laws checks that each pair of a state and an event has a row, or a reason why it cannot
occur.
"""

from __future__ import annotations

from cellgate.proxy.request import ends, failures, second_opinion, start
from cellgate.proxy.request.answers import commit, finish, judge_head
from cellgate.proxy.request.departed import follow
from cellgate.proxy.request.life import ExchangeEvent, ExchangeState, Table, Transition

_S, _E = ExchangeState, ExchangeEvent
_SENT = (_S.BUFFERING, _S.PROVING, _S.RESUMED)
_LEASED = (_S.PREFILLING, *_SENT)
# Starting an attempt may fail before it returns; then the exchange has already moved on.
_ANY_STATE = tuple(ExchangeState)[1:]
_ENDS = (_S.OVER,)


def _ignore(*_: object) -> None:
    """It changes nothing in this state."""


def _in_every_state() -> Table:
    """The rows that are the same wherever the request is: it can be ended, and time passes."""
    table: Table = {}
    for state in _S:
        table[state, _E.LEFT] = Transition(ends.leave, _ENDS)
        table[state, _E.STOPPED] = Transition(ends.stop, _ENDS)
        table[state, _E.TICKED] = Transition(failures.tick, _ANY_STATE)
        table[state, _E.CRASHED] = Transition(ends.end_crashed, _ENDS)
    # A connection reports its close even after the response has ended, and a body may be parsed off the loop
    # after its client has left.
    for event in (_E.LEFT, _E.STOPPED, _E.TICKED, _E.ASKED, _E.SCREENED):
        table[_S.OVER, event] = Transition(_ignore, _ENDS)
    return table


EXCHANGE_TABLE: Table = {
    **_in_every_state(),
    (_S.PARSING, _E.STARTED): Transition(start.start, tuple(ExchangeState)),
    (_S.PARSING, _E.ASKED): Transition(start.read_late, _ANY_STATE),
    (_S.PARSING, _E.SCREENED): Transition(start.screened, _ANY_STATE),
    (_S.PARSING, _E.TICKED): Transition(failures.tick, (_S.PARSING,)),
    (_S.WAITING, _E.GRANTED): Transition(start.grant, _ANY_STATE),
    # Another model may serve it.
    (_S.WAITING, _E.REFUSED): Transition(start.refuse, _ANY_STATE),
    (_S.BUFFERING, _E.REPLIED): Transition(judge_head, _ANY_STATE),
    (_S.BUFFERING, _E.COMMITTED): Transition(commit, (_S.RELAYING,)),
    (_S.BUFFERING, _E.DOUBTED): Transition(second_opinion.doubt, _ANY_STATE),
    (_S.BUFFERING, _E.FAILED): Transition(failures.try_again, _ANY_STATE),
    (_S.BUFFERING, _E.EVICTED): Transition(failures.move, _ANY_STATE),
    (_S.RELAYING, _E.DONE): Transition(finish, _ENDS),
    (_S.RELAYING, _E.FAILED): Transition(failures.break_stream, _ANY_STATE),
    # A unit that shuts down gracefully continues its streams; a stall shows when it does not.
    (_S.RELAYING, _E.EVICTED): Transition(follow, (_S.RELAYING,)),
    (_S.PREFILLING, _E.PREFILLED): Transition(start.prefilled, _ANY_STATE),
    # A decoder that needs the other unit cannot go on without it.
    (_S.PREFILLING, _E.FAILED): Transition(failures.try_again, _ANY_STATE),
    (_S.PREFILLING, _E.EVICTED): Transition(failures.move, _ANY_STATE),
    (_S.PREFILLING, _E.TICKED): Transition(start.tick, _ANY_STATE),
    (_S.PROVING, _E.PROVEN): Transition(start.resume, _ANY_STATE),
    (_S.PROVING, _E.CONCLUDED): Transition(failures.conclude, _ENDS),
    (_S.PROVING, _E.UNPROVEN): Transition(failures.not_resumed, _ENDS),
    (_S.PROVING, _E.FAILED): Transition(failures.try_again, _ANY_STATE),
    (_S.PROVING, _E.EVICTED): Transition(failures.move, _ANY_STATE),
    (_S.RESUMED, _E.REPLIED): Transition(judge_head, _ANY_STATE),
    (_S.RESUMED, _E.COMMITTED): Transition(commit, (_S.RELAYING,)),
    (_S.RESUMED, _E.DOUBTED): Transition(failures.doubt_end, _ANY_STATE),
    (_S.RESUMED, _E.FAILED): Transition(failures.try_again, _ANY_STATE),
    (_S.RESUMED, _E.EVICTED): Transition(failures.move, _ANY_STATE),
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
_TABLE_CLOSED = "everything was released, so nothing can report this any more"
_OF_PROOFS = (_E.PROVEN, _E.CONCLUDED, _E.UNPROVEN)
_OF_REPLIES = (_E.REPLIED, _E.COMMITTED, _E.DONE, _E.FAILED, _E.DOUBTED)
_TABLE_OF_UNITS = (*_OF_REPLIES, _E.EVICTED, _E.PREFILLED, *_OF_PROOFS)
_OF_PICKS = (_E.GRANTED, _E.REFUSED)
IMPOSSIBLE_EVENTS: dict[tuple[ExchangeState, ExchangeEvent], str] = {
    **{(state, _E.STARTED): _STARTED_ONCE for state in tuple(ExchangeState)[1:]},
    **{(_S.PARSING, event): _NOT_ASKED for event in (*_OF_PICKS, *_TABLE_OF_UNITS)},
    **{(_S.WAITING, event): _NO_LEASE for event in _TABLE_OF_UNITS},
    **{(state, event): _HAS_LEASE for state in (*_LEASED, _S.RELAYING) for event in _OF_PICKS},
    **{(state, _E.ASKED): _ASKED_ONCE for state in (_S.WAITING, *_LEASED, _S.RELAYING)},
    **{(state, _E.SCREENED): _ASKED_ONCE for state in (_S.WAITING, *_LEASED, _S.RELAYING)},
    **{(state, event): _NO_PROOF for state in (_S.BUFFERING, _S.RELAYING) for event in _OF_PROOFS},
    **{(_S.RESUMED, event): _NO_PROOF for event in _OF_PROOFS},
    **{(_S.PREFILLING, event): _NO_PROOF for event in _OF_PROOFS},
    **{(_S.PREFILLING, event): _PROMPT_FIRST for event in _OF_REPLIES[:3]},
    **{(state, _E.PREFILLED): _NO_LEG for state in (*_SENT, _S.RELAYING)},
    **{(state, _E.DONE): _NOT_COMMITTED for state in _SENT},
    **{(_S.PROVING, event): _NOT_SENT for event in (_E.REPLIED, _E.COMMITTED)},
    (_S.PREFILLING, _E.DOUBTED): _PROMPT_FIRST,
    (_S.PROVING, _E.DOUBTED): _NOT_SENT,
    (_S.RELAYING, _E.DOUBTED): _HEAD_ONCE,
    **{(_S.RELAYING, event): _HEAD_ONCE for event in (_E.REPLIED, _E.COMMITTED)},
    **{(_S.OVER, event): _TABLE_CLOSED for event in (*_OF_PICKS, *_TABLE_OF_UNITS)},
}
"""All other pairs, each with the reason why it does not occur."""
