"""The failure table: complete, and true to its rules."""

from __future__ import annotations

import orjson
import pytest

from cellgate.proxy.http.errors import TABLE, Failure, FailureKind, Fault, error_body, error_event
from cellgate.router.nouns import Strength

# The table of bad input, as it stands in the documentation.
STATUSES = {
    FailureKind.BAD_REQUEST: 400,
    FailureKind.BAD_JSON: 400,
    FailureKind.DENIED: 403,
    FailureKind.UNKNOWN_PATH: 404,
    FailureKind.UNKNOWN_MODEL: 404,
    FailureKind.METHOD_NOT_ALLOWED: 405,
    FailureKind.METHOD_NOT_SUPPORTED: 501,
    FailureKind.HEAD_TIMEOUT: 408,
    FailureKind.BODY_TIMEOUT: 408,
    FailureKind.BODY_TOO_LARGE: 413,
    FailureKind.BAD_EXPECTATION: 417,
    FailureKind.HEAD_TOO_LARGE: 431,
    FailureKind.FULL: 429,
    FailureKind.NO_UNIT: 503,
    FailureKind.NO_MEMORY: 503,
    FailureKind.GARBAGE: 502,
    FailureKind.CLOSED_EARLY: 502,
    FailureKind.TRUNCATED: 502,
}


def test_every_kind_has_a_row() -> None:
    assert set(TABLE) == set(FailureKind)


@pytest.mark.parametrize(
    ("kind", "status"), STATUSES.items(), ids=lambda value: getattr(value, "value", value)
)
def test_the_status_of_each_kind(kind: FailureKind, status: int) -> None:
    assert kind.row.status == status


@pytest.mark.parametrize("kind", FailureKind, ids=lambda kind: kind.value)
def test_only_units_are_held_to_account(kind: FailureKind) -> None:
    row = kind.row
    assert row.fault is Fault.UNIT or row.strength is None
    assert row.strength is not Strength.FATAL or kind is FailureKind.REFUSED


@pytest.mark.parametrize("kind", FailureKind, ids=lambda kind: kind.value)
def test_what_a_client_did_wrong_is_not_tried_again(kind: FailureKind) -> None:
    row = kind.row
    if row.fault is Fault.CLIENT:
        assert 400 <= row.status < 500 or row.status == 501
        assert not row.retryable
        assert row.retry_after_s is None
    else:
        assert row.status >= 500 or row.status == 429


@pytest.mark.parametrize("kind", FailureKind, ids=lambda kind: kind.value)
def test_whoever_may_come_again_is_told_when(kind: FailureKind) -> None:
    if kind.row.status in (429, 503) and kind is not FailureKind.CUT:
        assert kind.row.retry_after_s == 1


@pytest.mark.parametrize("kind", FailureKind, ids=lambda kind: kind.value)
def test_a_connection_is_closed_where_the_next_request_could_not_be_found(kind: FailureKind) -> None:
    unread = (400, 408, 413, 417, 431, 501)
    if kind.row.fault is Fault.CLIENT:
        read = (
            FailureKind.BAD_JSON,
            FailureKind.BAD_HEADER,
            FailureKind.GUARDRAIL_DENIED,
            FailureKind.GUARDRAIL_TOO_LARGE,
        )
        assert kind.row.closes is (kind.row.status in unread and kind not in read)


@pytest.mark.parametrize("kind", FailureKind, ids=lambda kind: kind.value)
def test_bodies_have_the_shape_that_openai_clients_read(kind: FailureKind) -> None:
    failure = Failure(kind, 'it said "no"\n', param="model")
    expected = {"message": 'it said "no"\n', "type": kind.row.type, "param": "model", "code": kind.value}
    assert orjson.loads(error_body(failure)) == {"error": expected}
    event = error_event(failure)
    assert event == b"data: " + error_body(failure) + b"\n\n"
    assert event.count(b"\n") == 2
