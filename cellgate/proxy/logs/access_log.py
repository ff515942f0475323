"""The access log: one line per finished request (see line_log.py)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import orjson

from cellgate.proxy.config.settings import LogFormat
from cellgate.proxy.logs.line_log import LineLog
from cellgate.proxy.logs.log import Level, log_line
from cellgate.proxy.logs.log_writer import LogSink
from cellgate.proxy.logs.record import Finished
from cellgate.proxy.logs.text import one_line, utc

TEXT_MAX = 256
"""The most characters of a text that the client chose (path, model, id)."""


def stdout_sink() -> LogSink:
    """Standard output, unbuffered: a thread that blocks in a buffered one would delay the exit."""
    return open(sys.stdout.fileno(), "wb", buffering=0, closefd=False)


class AccessLog(LineLog[Finished]):
    """Writes finished requests to `sink`. `wall` is the wall clock (seconds since 1970)."""

    def __init__(
        self,
        form: LogFormat,
        sink: LogSink,
        wall: Callable[[], float],
        log: Callable[[Level, str], None] = log_line,
    ) -> None:
        super().__init__(_FORMATS.get(form), sink, wall, "access log", log)


def json_line(at: float, record: Finished) -> bytes:
    """The record as one JSON object (docs/logs.md); times to a tenth of a millisecond."""
    # Unpacked, and not read by name, because this is done for each request.
    (request_id, peer, method, path, route, model, status, code, unit, outcome) = record[:10]
    (attempts, continued, ttft_s, duration_s, events, bytes_in, bytes_out, rank) = record[10:]
    if len(path) + len(model) > TEXT_MAX:
        path, model = _short(path), _short(model)
    fields = {
        "time": utc(at),
        "request_id": request_id,
        "peer": peer,
        "method": method,
        "path": path,
        "route": route,
        "model": model,
        "status": status,
        "code": code,
        "unit": unit,
        "outcome": outcome._value_,
        "attempts": attempts,
        "continued": continued,
        "ttft_s": None if ttft_s is None else _tenth_ms(ttft_s),
        "duration_s": _tenth_ms(duration_s),
        "events": events,
        "bytes_in": bytes_in,
        "bytes_out": bytes_out,
        "rank": rank,
    }
    try:
        # A copy: the buffer of orjson holds at least 4 KB for each waiting line.
        return orjson.dumps(fields) + b"\n"
    except TypeError:
        # A lone surrogate: orjson refuses it, json escapes it.
        return json.dumps(fields).encode() + b"\n"


def console_line(at: float, record: Finished) -> bytes:
    """The record as a short aligned line for people."""
    ttft = "-" if record.ttft_s is None else f"{record.ttft_s:.3f}s"
    outcome = f"{record.outcome.value} ({record.code})" if record.code else record.outcome.value
    parts = (
        utc(at),
        str(record.status),
        f"{record.method:<4} {_short(record.path):<20}",
        f"{record.unit or '-':<8} {outcome:<12}",
        f"ttft {ttft:<7} total {record.duration_s:.3f}s",
        f"{record.events} events {_size(record.bytes_in)} in {_size(record.bytes_out)} out",
        f"{record.peer} {_short(record.request_id)}",
        f"{record.attempts} attempts" if record.attempts > 1 else "",
        f"continued {record.continued} times" if record.continued else "",
    )
    return one_line("  ".join(parts).rstrip()).encode(errors="backslashreplace") + b"\n"


_FORMATS: dict[LogFormat, Callable[[float, Finished], bytes]] = {"json": json_line, "console": console_line}


def _tenth_ms(seconds: float) -> float:
    """Rounded to a tenth of a millisecond, in a tenth of the time that `round` takes."""
    return int(seconds * 10_000 + 0.5) / 10_000


def _short(text: str) -> str:
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"


def _size(n: int) -> str:
    return f"{n}B" if n < 10_000 else f"{n / 1000:.0f}kB" if n < 10_000_000 else f"{n / 1_000_000:.0f}MB"
