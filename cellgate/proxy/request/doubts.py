"""Answers of a request that are not good: what it asks for, who gave them, and what is shown in the end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import orjson

from cellgate.proxy.request.answer_shape import ENDLESS, NO_TEXT, NONE_COUNTED, NOTHING, REPEATS
from cellgate.proxy.request.life import ExchangeState
from cellgate.proxy.request.ports import ImpossibleUsage
from cellgate.proxy.request.response import NO_PATH, Doubt
from cellgate.proxy.request.token_usage import CappedUsage
from cellgate.router.nouns import Outcome
from cellgate.router.opinions import ATTEMPTED, COMPUTED, Kind

if TYPE_CHECKING:
    from cellgate.proxy.request.exchange import Exchange
    from cellgate.router.cost_model import Usage
    from cellgate.router.unit_state import UnitState

SAMPLE_BYTES = 64 << 10
"""No longer request is kept, or looked into for what it needs."""
_NEEDS_MAX = 8
ABORTED = "aborted by its engine"
"""Not doubted: an engine that is paused does so. It only says what is shown if all units do."""
_DONE, _DONE_ROUTES = b"data: [DONE]\n\n", ("chat", "completions")
_TOKENS_COUNTED = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)')
_NEED_USUAL = frozenset(
    (
        *(
            "model",
            "messages",
            "prompt",
            "input",
            "system",
            "instructions",
            "stream",
            "stream_options",
            "user",
        ),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "temperature", "top_p"),
        *("top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("metadata", "store", "previous_response_id", "ignore_eos", "priority", "encoding_format"),
    )
)
_NEED_MEDIA = {
    b'"image_url"': "images",
    b'"input_image"': "images",
    b'"type":"image"': "images",
    b'"input_audio"': "sound",
    b'"audio_url"': "sound",
    b'"video_url"': "videos",
    b'"input_file"': "files",
}


def asked_kind(exchange: Exchange) -> Kind:
    """What the request needs, as far as units may differ in it."""
    known: Kind | None = getattr(exchange, "kind", None)
    if known is not None:
        return known
    body, ask = exchange.request.body[:SAMPLE_BYTES], exchange.selection.ask
    needs = {name for mark, name in _NEED_MEDIA.items() if mark in body}
    if exchange.route.json and len(body) < SAMPLE_BYTES:
        with suppress(orjson.JSONDecodeError):
            data: Any = orjson.loads(body)
            needs |= {name for name, value in data.items() if name not in _NEED_USUAL and value}
    if ask.stream:
        needs.add("a stream")
    path = exchange.request.path.decode("latin-1")
    exchange.kind = kind = Kind(ask.model or "", path, ", ".join(sorted(needs)[:_NEEDS_MAX]))
    return kind


def spared(exchange: Exchange) -> tuple[str, ...]:
    """Units that are known to refuse such a request."""
    if exchange.route.shape is None or not may_choose(exchange):
        return ()
    opinions, ask = exchange.gate.opinions, exchange.selection.ask
    names = [state.unit.name for state in able(exchange)]
    return opinions.arrived(asked_kind(exchange), ask.prompt_bytes, names, exchange.gate.now(), ask.payer)


def unsure(exchange: Exchange) -> tuple[str, ...]:
    """Units that have recently answered such requests with nothing good: another is asked, or resumes the
    stream, if there is one.
    """
    opinions, names = exchange.gate.opinions, [state.unit.name for state in able(exchange)]
    if not opinions.watching:
        return ()
    return tuple(opinions.unsure(asked_kind(exchange), names, exchange.gate.now()))


def may_choose(exchange: Exchange) -> bool:
    """Whether more than one unit may get the request."""
    selection, ask = exchange.selection, exchange.selection.ask
    free = ask.unit is None and ask.follows is None and ask.build is None and selection.units is None
    return free and exchange.stream_resume is None


def able(exchange: Exchange) -> Iterator[UnitState]:
    """The units that could take it now, and have not."""
    return exchange.gate.board.able(exchange.selection.ask, exchange.selection.history.tried)


def is_asked_for(exchange: Exchange, body: bytes) -> bool:
    """Whether the request asks for an answer that would be doubtful otherwise."""
    shape, head = exchange.route.shape, exchange.response.promised
    if shape is None or head is None or exchange.response.status != 200:
        return False
    if not shape.is_asked_for(exchange.request.body, body, head.content_lines):
        return False
    exchange.response.read_metadata()
    return True


def cost_of(what: str, body: bytes | None) -> float:
    """What an opinion costs. A doubtful answer took its unit as long as a good one if it goes on, or tells of
    its tokens; and no time at all if it is a refusal.
    """
    counted = _TOKENS_COUNTED.search(body or b"")
    if what in ENDLESS or (counted is not None and len(counted[1]) > 1):
        return COMPUTED
    return ATTEMPTED if what == NOTHING else 1.0


def keep_aborted(exchange: Exchange) -> None:
    """Its engine has aborted the answer of the attempt in flight: that is shown if all units do."""
    attempt, response = exchange.in_flight(), exchange.response
    body, head = attempt.aborted, response.promised
    if not body or head is None or response.begun or exchange.stream_resume is not None:
        return
    if response.is_events and exchange.response.route in _DONE_ROUTES and _DONE not in body:
        body += _DONE
    kept = Doubt(attempt.lease.unit, ABORTED, head, response.own_lines, body, response.status)
    exchange.doubtful = (*exchange.doubtful, kept)


def outcome_of_doubt(what: str, is_clients: bool, status: int) -> Outcome:
    """How an attempt ended whose answer was not good. A prompt may ask for one token again and again, or for
    none: that counts as a rate beside peers, and one such answer is nobody's error.
    """
    if what in (REPEATS, NONE_COUNTED, NO_TEXT):
        return Outcome.OK
    if what == ABORTED:
        return Outcome.EVICTED
    return Outcome.CLIENT_ERROR if is_clients or 400 <= status < 500 else Outcome.UNIT_ERROR


def _best(exchange: Exchange) -> Doubt | None:
    """The first answer that can be shown. One that was aborted only if several units did so, or nobody else
    could ever serve the request: it is no whole one, and a unit alone may be paused.
    """
    doubts = exchange.doubtful
    aborted = [each for each in doubts if each.what == ABORTED]
    others = [each for each in doubts if each.what != ABORTED and each.head is not None]
    if others or not aborted:
        return next(iter(others), None)
    units, board = {each.unit for each in aborted}, exchange.gate.board
    is_shown = len(units) > 1 or not board.could_serve(exchange.selection.ask, units)
    return aborted[0] if is_shown else None


def show_first(exchange: Exchange, held: Doubt | None = None) -> bool:
    """Nobody has a better answer: show what the first unit said, or was held. False: none has said any."""
    first = held or _best(exchange)
    drop(exchange)
    if first is None or first.head is None or first.what == NO_PATH or exchange.response.begun:
        return False
    exchange.state = ExchangeState.OVER
    response = exchange.response
    response.status, response.unit = first.status, first.unit
    if exchange.gate.screen_answer is not None:
        exchange.gate.screen_answer(exchange)
    response.show_kept(first.head, first.own_lines, first.body)
    outcome = outcome_of_doubt(first.what, False, first.status)
    if outcome is Outcome.OK:
        usage = possible_usage(exchange, first.unit)
        for observer in response.observers:
            observer.completed(usage)
    response.end(outcome)
    return True


def possible_usage(exchange: Exchange, unit: str) -> Usage | None:
    """What a unit has told of its tokens, if that can be. If it is more, that is reported: nothing is learnt,
    and a bill estimates.
    """
    response = exchange.response
    usage, reported = response.usage_for(exchange.selection.ask), response.usage()
    if type(usage) is not CappedUsage or reported is None:
        return usage
    words = f"{reported.prompt_tokens:,} + {reported.answer_tokens:,}"
    words += f" tokens; {usage.prompt_tokens:,} + {usage.answer_tokens:,} counted at most"
    exchange.gate.reports.send(ImpossibleUsage(unit, words))
    return None


def drop(exchange: Exchange) -> None:
    """Nothing is learnt from its doubts."""
    doubts, exchange.doubtful = exchange.doubtful, ()
    for each in doubts:
        if each.what != ABORTED:
            exchange.gate.opinions.dropped(each.unit, asked_kind(exchange), exchange.selection.ask.payer)
