"""ORCA: the gate's load in the words of Envoy and gRPC, as one header line of every proxied response.

The message is xds.data.orca.v3.OrcaLoadReport; its carriers are those of gRFC A51 and Envoy. Rules:
1. Lines are rendered once a tick of the gate, of a large fleet once a second; a request only picks one.
2. `application_utilization` and `rps_fractional` are means of the same window, so that their quotient, which
   is the weight a balancer gives the gate, is what its units can do, however much they are sent just now.
3. The means hold still while there is nothing to measure: no unit, or no work. A weight that fell meanwhile
   would keep requests away, and with them the reports that could raise it again.
4. `application_utilization` is never 0, which would mean "not set".

In this order: `Orca`, `lines`, `readiness`.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson

from cellgate.proxy.ingress.reasons import why
from cellgate.router.board import Board
from cellgate.router.nouns import Verdict
from cellgate.router.unit_state import UnitState

FORMAT_FIELD = b"endpoint-load-metrics-format"
"""The request field that asks for another carrier. It is for the gate and never goes on to a unit."""

REPORT_LARGE_S = 1.0
LOAD_WINDOW_S = 5.0
"""The time constant of every mean, in seconds in which there was work."""
KV_FULL_REPORTED = 0.9
"""From this share of the KV cache on, engines preempt: a unit counts as full."""
LEAST = 0.001

_NOT_WORK = frozenset(
    {"denied", "health", "model", "models", "tokenize", "unit_health", "unlisted", "unread", "version"}
)
"""Routes that no unit computes tokens for: they are cheap, and tell nothing of what a gate can do."""

# Protobuf wire format: a tag is (field number << 3 | wire type); 1: eight bytes, 2: length-delimited.
_DOUBLE = struct.Struct("<Bd")
_RPS, _EPS, _UTILIZATION = (number << 3 | 1 for number in (6, 7, 9))
_NAMED_METRICS, _KEY, _VALUE = 8 << 3 | 2, 1 << 3 | 2, 2 << 3 | 1


class OrcaReport(NamedTuple):
    """One load report. Utilization 1 is full and more is overload; rates are per second."""

    application_utilization: float
    rps_fractional: float
    eps: float = 0.0
    named_metrics: Mapping[str, float] = {}


def encoded(report: OrcaReport) -> bytes:
    """The report in protobuf's wire format. As there, what is 0 is left out."""
    doubles = (
        (_RPS, report.rps_fractional),
        (_EPS, report.eps),
        (_UTILIZATION, report.application_utilization),
    )
    named = (_entry(name.encode(), value) for name, value in report.named_metrics.items())
    return b"".join((*(_DOUBLE.pack(tag, value) for tag, value in doubles if value), *named))


def bin_line(report: OrcaReport) -> bytes:
    """The header line of gRFC A51, read by Envoy and gRPC without being asked for."""
    return b"endpoint-load-metrics-bin: %b\r\n" % base64.b64encode(encoded(report))


def text_line(report: OrcaReport) -> bytes:
    """The TEXT carrier. Its separator is ":": older Envoys drop a whole report that has "="."""
    named = {f"named_metrics.{name}": value for name, value in report.named_metrics.items()}
    pairs = {**report._asdict(), **named}
    del pairs["named_metrics"]
    text = ",".join(f"{name}:{value:.6g}" for name, value in pairs.items())
    return b"endpoint-load-metrics: TEXT %b\r\n" % text.encode()


def json_line(report: OrcaReport) -> bytes:
    """The JSON carrier: protobuf's JSON mapping with the field names of the message."""
    return b"endpoint-load-metrics: JSON %b\r\n" % orjson.dumps(report._asdict())


class LoadLines:
    """The last report as header lines: the one that goes with every response, and those that may be asked for
    instead, by format.
    """

    def __init__(self) -> None:
        self.usual = b""
        self.others: dict[bytes, bytes] = {}

    def line(self, carrier: bytes) -> bytes:
        """The header line for a request that asks for this format, with its line end."""
        return self.others.get(carrier.strip().lower(), self.usual)


class Orca:
    """The gate's report. `responses` are the counts of requests that ended, by route and status (as in
    `Metrics`), `waiting` is how many wait for a unit.
    """

    def __init__(
        self, board: Board, responses: Mapping[tuple[str, int], int], waiting: Callable[[], int]
    ) -> None:
        self._board = board
        self._responses = responses
        self._waiting = waiting
        self._at, self._due_at = math.inf, 0.0
        self._ended = self._failed = 0
        self._utilization = self._rps = self._eps = 0.0
        self.report = OrcaReport(LEAST, 0.0)
        self.lines = LoadLines()
        self._render()

    def refresh(self, now: float) -> None:
        """Measure and render again. To be called by the gate's tick."""
        if now < self._due_at:
            return
        if self._board.attention.is_large:
            self._due_at = now + REPORT_LARGE_S
        waiting, (ended, failed) = self._waiting(), self._counts()
        utilization = gate_utilization(self._board, waiting)
        if utilization is not None and (utilization > 0.0 or ended > self._ended) and now > self._at:
            passed_s = now - self._at
            part = 1.0 - math.exp(-passed_s / LOAD_WINDOW_S)
            self._utilization += part * (utilization - self._utilization)
            self._rps += part * ((ended - self._ended) / passed_s - self._rps)
            self._eps += part * ((failed - self._failed) / passed_s - self._eps)
        self._at, self._ended, self._failed = now, ended, failed
        self.report = OrcaReport(
            max(LEAST, self._utilization), self._rps, self._eps, named_metrics(self._board, waiting)
        )
        self._render()

    def _render(self) -> None:
        self.lines.usual = bin_line(self.report)
        self.lines.others = {b"text": text_line(self.report), b"json": json_line(self.report)}

    def _counts(self) -> tuple[int, int]:
        """Generations that have ended so far, and those of them that failed or were turned away."""
        ended = failed = 0
        for (route, status), count in self._responses.items():
            if route not in _NOT_WORK:
                ended += count
                failed += count if status >= 500 or status == 429 else 0
        return ended, failed


def gate_utilization(board: Board, waiting: int) -> float | None:
    """How much of what its usable units can take at once is taken now; requests that wait count as taken.
    None: no unit is usable.

    A gate is as full as its units: each counts with its max_in_flight, and with the requests there, others'
    as well, or with its KV cache where that is nearer to its end.
    """
    capacity = board.room()[1]
    # Of those that are not looked at, nothing is taken.
    usable = [state for state in board.attention.units if state.is_usable()]
    return (sum(map(_taken, usable)) + waiting) / capacity if capacity else None


def named_metrics(board: Board, waiting: int) -> dict[str, float]:
    """What else a balancer or a person may want to know. `kv_cache_usage` is the mean of the usable units."""
    ready = board.room()[0]
    usable = [state for state in board.attention.units if state.is_usable()]
    kv_uses = [state.load.kv_use for state in usable if state.load is not None]
    known = ready - (len(usable) - len(kv_uses))
    return {
        "in_flight": float(board.in_flight),
        "queued": float(waiting),
        "kv_cache_usage": sum(kv_uses) / known if kv_uses else 0.0,
        "units_ready": float(ready),
        "units_total": float(len(board.units)),
    }


def _taken(state: UnitState) -> float:
    """How many of a unit's places are taken."""
    kv_use = state.load.kv_use if state.load is not None else 0.0
    there = len(state.leases) - state.parked + state.foreign
    return max(float(there), state.unit.max_in_flight * kv_use / KV_FULL_REPORTED)


def _entry(name: bytes, value: float) -> bytes:
    """One entry of a map<string, double>: a message of a key (1) and a value (2)."""
    # Its length is one byte of the format as long as names are short, and ours are.
    inner = bytes((_KEY, len(name))) + name + _DOUBLE.pack(_VALUE, value)
    return bytes((_NAMED_METRICS, len(inner))) + inner


# Response headers that Envoy reads for health. Pure.
#
# 1. `x-envoy-immediate-health-check-fail` takes the whole host out at once, and out of the count of those
#    that should be there. So it says one thing only: this gate is stopping. It is never a word about one
#    unit.
# 2. `x-envoy-degraded` is read from replies to health checks only: the host is used after those that are
# not.


FAIL_NOW = ("x-envoy-immediate-health-check-fail", "1")
DEGRADED = ("x-envoy-degraded", "1")

DEGRADED_SHARE = 0.5
"""A gate with no more than this share of its configured weight in good order is degraded."""

HeaderPairs = tuple[tuple[str, str], ...]


def lines(headers: HeaderPairs) -> bytes:
    """Headers as lines of a head."""
    return b"".join(f"{name}: {value}\r\n".encode() for name, value in headers)


def readyz_headers(board: Board, *, stopping: bool) -> HeaderPairs:
    """What a reply to /readyz says beside its status."""
    if stopping:
        return (FAIL_NOW,)
    return (DEGRADED,) if gate_is_degraded(board) else ()


def response_line(*, stopping: bool) -> bytes:
    """The header line of any other response: a stopping gate gets no request more, not one check later."""
    return _FAIL_NOW_LINE if stopping else b""


def unit_headers(board: Board, name: str) -> HeaderPairs:
    """What a reply to /healthz/unit/NAME says beside its status, which `unit_health` decides."""
    state = board.units.get(name)
    return (DEGRADED,) if state is not None and state.is_usable() and is_degraded(state) else ()


def is_degraded(state: UnitState) -> bool:
    """Whether a usable unit should come after others: it is suspected, in doubt, or slower than the rest."""
    return (
        state.case.verdict is Verdict.SUSPECT or state.is_restart_suspected() or state.outlier.degraded > 0.0
    )


_FAIL_NOW_LINE = lines((FAIL_NOW,))


def gate_is_degraded(board: Board) -> bool:
    """Whether a gate should come after others: half of its units are lost or degraded, or it is cut off."""
    weight = sum(state.weight for state in board)
    well = sum(state.weight for state in board if state.is_usable() and not is_degraded(state))
    return board.panic_at is not None or well <= DEGRADED_SHARE * weight


# What the gate tells load balancers: is it ready, and is one unit. Pure, the same on both ports.


ReadinessRow = dict[str, Any]


def unit_row(state: UnitState) -> ReadinessRow:
    """What is said of one unit."""
    return {"usable": state.is_usable(), "verdict": state.case.verdict.value, "reason": why(state)}


class UnitRows:
    """What was said of each unit of a large fleet: at a flip only the units that have changed are written
    anew, and of all others one or two a tick.
    """

    def __init__(self) -> None:
        self._rows: dict[UnitState, tuple[tuple[object, ...], ReadinessRow]] = {}
        self._turns: list[UnitState] = []

    def of(self, state: UnitState) -> ReadinessRow:
        """That of a unit, as it was written last unless the unit has changed since."""
        known, facts = self._rows.get(state), _facts(state)
        if known is not None and known[0] == facts:
            return known[1]
        row = unit_row(state)
        self._rows[state] = facts, row
        return row

    def renew(self, count: int) -> None:
        """Write as many anew, whose turn it is."""
        if not self._turns:
            self._turns = list(self._rows)
        for state in self._turns[-count:]:
            if state.retired:
                self._rows.pop(state, None)
            else:
                self._rows[state] = _facts(state), unit_row(state)
        del self._turns[-count:]


def _facts(state: UnitState) -> tuple[object, ...]:
    return state.case, state.hold, state.drained, state.restart_suspected_at, state.outlier.degraded


def readiness(
    board: Board,
    stopping: bool,
    *,
    full: bool = False,
    row_of: Callable[[UnitState], ReadinessRow] = unit_row,
) -> tuple[bool, dict[str, Any]]:
    """Whether to send the gate requests (one unit is usable, it is not stopping, nor `full`: out of
    descriptors), and why. `row_of` says what is told of a unit.
    """
    units = {state.unit.name: row_of(state) for state in board}
    usable = sum(row["usable"] for row in units.values())
    ready = usable > 0 and not stopping and not full
    return ready, {
        "ready": ready,
        "stopping": stopping,
        "full": full,
        "panic": board.panic_at is not None,
        "usable_units": usable,
        "units": units,
    }


def as_json(value: Any) -> bytes:
    """A page of JSON. Indented: who reads this at night has curl and nothing else."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def unit_health(board: Board, name: str) -> tuple[HTTPStatus, str]:
    """The status a load balancer that addresses single units gets, and why.

    200: send it requests; 503: do not; 404: drained, on hold or unknown, which HAProxy
    (`http-check disable-on-404`) reads as: no new requests, but let the running ones end.
    """
    state = board.units.get(name)
    if state is None:
        return HTTPStatus.NOT_FOUND, f"no unit is named {name!r}"
    if state.drained or state.hold is not None:
        return HTTPStatus.NOT_FOUND, why(state)
    return (HTTPStatus.OK if state.is_usable() else HTTPStatus.SERVICE_UNAVAILABLE), why(state)
