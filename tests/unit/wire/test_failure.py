"""The failure table: complete, and true to its rules."""

from __future__ import annotations

import orjson
import pytest

from cellgate.proxy.wire.failure import TABLE, Failure, Fault, Kind, error_body, error_event
from cellgate.router.nouns import Strength

# The table of bad input, as it stands in the documentation.
STATUSES = {
    Kind.BAD_REQUEST: 400,
    Kind.BAD_JSON: 400,
    Kind.DENIED: 403,
    Kind.UNKNOWN_PATH: 404,
    Kind.UNKNOWN_MODEL: 404,
    Kind.METHOD_NOT_ALLOWED: 405,
    Kind.METHOD_NOT_SUPPORTED: 501,
    Kind.HEAD_TIMEOUT: 408,
    Kind.BODY_TIMEOUT: 408,
    Kind.BODY_TOO_LARGE: 413,
    Kind.BAD_EXPECTATION: 417,
    Kind.HEAD_TOO_LARGE: 431,
    Kind.FULL: 429,
    Kind.NO_UNIT: 503,
    Kind.NO_MEMORY: 503,
    Kind.GARBAGE: 502,
    Kind.CLOSED_EARLY: 502,
    Kind.TRUNCATED: 502,
}


def test_every_kind_has_a_row() -> None:
    assert set(TABLE) == set(Kind)


@pytest.mark.parametrize(
    ("kind", "status"), STATUSES.items(), ids=lambda value: getattr(value, "value", value)
)
def test_the_status_of_each_kind(kind: Kind, status: int) -> None:
    assert kind.row.status == status


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.value)
def test_only_units_are_held_to_account(kind: Kind) -> None:
    row = kind.row
    assert row.fault is Fault.UNIT or row.strength is None
    assert row.strength is not Strength.FATAL or kind is Kind.REFUSED


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.value)
def test_what_a_client_did_wrong_is_not_tried_again(kind: Kind) -> None:
    row = kind.row
    if row.fault is Fault.CLIENT:
        assert 400 <= row.status < 500 or row.status == 501
        assert not row.retryable
        assert row.retry_after_s is None
    else:
        assert row.status >= 500 or row.status == 429


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.value)
def test_whoever_may_come_again_is_told_when(kind: Kind) -> None:
    if kind.row.status in (429, 503) and kind is not Kind.CUT:
        assert kind.row.retry_after_s == 1


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.value)
def test_a_connection_is_closed_where_the_next_request_could_not_be_found(kind: Kind) -> None:
    unread = (400, 408, 413, 417, 431, 501)
    if kind.row.fault is Fault.CLIENT:
        assert kind.row.closes is (kind.row.status in unread and kind not in (Kind.BAD_JSON, Kind.BAD_HEADER))


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.value)
def test_bodies_have_the_shape_that_openai_clients_read(kind: Kind) -> None:
    failure = Failure(kind, 'it said "no"\n', param="model")
    expected = {"message": 'it said "no"\n', "type": kind.row.type, "param": "model", "code": kind.value}
    assert orjson.loads(error_body(failure)) == {"error": expected}
    event = error_event(failure)
    assert event == b"data: " + error_body(failure) + b"\n\n"
    assert event.count(b"\n") == 2
