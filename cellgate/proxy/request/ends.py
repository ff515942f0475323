"""Early ends of an exchange: the client leaves, or the gate itself fails. Actions of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from cellgate.proxy.http.errors import Failure
from cellgate.proxy.observe.counters import ResumeResult
from cellgate.proxy.request.doubts import drop
from cellgate.proxy.request.life import ExchangeState
from cellgate.router.nouns import Outcome

if TYPE_CHECKING:
    from cellgate.proxy.request.exchange import Exchange


def leave(exchange: Exchange) -> None:
    """The client has left: its unit must stop working for it at once."""
    resumed = exchange.attempt is not None and exchange.attempt.lease.committed
    _end(exchange, Outcome.CLIENT_LEFT, ResumeResult.RESUMED if resumed else ResumeResult.CLIENT_LEFT)
    exchange.response.left()


def stop(exchange: Exchange, failure: Failure) -> None:
    """The gate ends it: its unit must stop working for it, and its client gets the error."""
    _end(exchange, failure.kind.row.outcome, ResumeResult.CLIENT_LEFT)
    if exchange.response.begun:
        exchange.response.break_off(failure)
    else:
        exchange.response.refuse(failure)


def _end(exchange: Exchange, outcome: Outcome, result: ResumeResult) -> None:
    exchange.selection.cancel()
    drop(exchange)
    if exchange.stop_reading is not None:
        exchange.stop_reading()
    if exchange.attempt is not None:
        exchange.abort(outcome)
    if exchange.stream_resume is not None:
        exchange.stream_resume.record_result(result)
    exchange.state = ExchangeState.OVER


def end_crashed(exchange: Exchange, _failure: object = None) -> None:
    """A callback has failed: end the exchange, whatever its state."""
    exchange.state = ExchangeState.OVER
    for step in _endings(exchange):
        try:
            step()
        except Exception as error:
            exchange.gate.defect("a failed request could not be ended", error)


def _endings(exchange: Exchange) -> Iterator[Callable[[], object]]:
    """The steps that release everything and answer the client. Each of them may fail as well."""
    attempt, stream_resume = exchange.attempt, exchange.stream_resume
    yield exchange.selection.cancel
    if exchange.stop_reading is not None:
        yield exchange.stop_reading
    if attempt is not None:
        yield attempt.abandon
    if exchange.leg is not None:
        yield exchange.leg.drop
    if stream_resume is not None:
        yield stream_resume.abandon
        yield partial(stream_resume.record_result, ResumeResult.NOT_CONTINUABLE, "the gate failed")
    if attempt is not None and not attempt.lease.closed:
        yield partial(exchange.release, Outcome.GATE_ERROR)
    if not exchange.response.over:
        yield exchange.response.crash
    yield partial(exchange.client.abort, exchange, exchange.request)
