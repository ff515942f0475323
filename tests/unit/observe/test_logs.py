"""The access log and the operator's: lines, and what a stuck or broken output costs (lines, nothing else)."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Iterator

import orjson
import pytest

from cellgate.proxy.config.limits import LIMITS, REACHED
from cellgate.proxy.observe import access_log
from cellgate.proxy.observe import log as log_writer
from cellgate.proxy.observe.access_log import (
    LINES_KEPT,
    TEXT_MAX,
    AccessLog,
    Finished,
    console_line,
    json_line,
    stdout_sink,
)
from cellgate.proxy.observe.log import LogWriter, configure, log_line
from cellgate.proxy.observe.text import only_visible
from cellgate.router.nouns import Outcome
from tests.wire.process import eventually

DONE = Finished(
    request_id="req-1",
    peer="192.0.2.1:5",
    method="POST",
    path="/v1/chat/completions",
    route="generate",
    model="tiny",
    status=200,
    code="",
    unit="a1",
    outcome=Outcome.OK,
    attempts=1,
    resumed=0,
    ttft_s=0.21349,
    duration_s=1.5,
    events=128,
    bytes_in=1033,
    bytes_out=45_321,
)


def clock() -> float:
    return 1_700_000_000.25


class Stuck(io.BytesIO):
    """A sink that takes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        self.entered.set()
        # Long: a test that is short of CPU must not look like a sink that breaks.
        assert self.let_go.wait(60.0)
        return super().write(data)


class Reluctant:
    """A sink that takes nothing every other time, and seven bytes at most."""

    def __init__(self) -> None:
        self.taken = b""
        self.calls = 0

    def write(self, data: memoryview) -> int | None:
        self.calls += 1
        if self.calls % 2:
            return None
        self.taken += bytes(data[:7])
        return len(data[:7])


class Broken(io.BytesIO):
    """A sink that fails as long as it is told to."""

    broken = True

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        if self.broken:
            raise OSError(28, "No space left on device")
        return super().write(data)


def test_a_json_line() -> None:
    line = json_line(clock(), DONE)
    assert line == (
        b'{"time":"2023-11-14T22:13:20.250Z","request_id":"req-1","peer":"192.0.2.1:5","method":"POST",'
        b'"path":"/v1/chat/completions","route":"generate","model":"tiny","status":200,"code":"","unit":"a1",'
        b'"outcome":"ok","attempts":1,"continued":0,"ttft_s":0.2135,"duration_s":1.5,"events":128,"bytes_in":1033,'
        b'"bytes_out":45321,"rank":null}\n'
    )


def test_a_console_line_is_short_and_aligned() -> None:
    refused = DONE._replace(
        status=503, unit="", code="no_unit", outcome=Outcome.GATE_ERROR, ttft_s=None, attempts=2
    )
    assert console_line(clock(), DONE).decode() == (
        "2023-11-14T22:13:20.250Z  200  POST /v1/chat/completions  a1       ok            ttft 0.213s  "
        "total 1.500s  128 events 1033B in 45kB out  192.0.2.1:5 req-1\n"
    )
    assert console_line(clock(), refused).decode() == (
        "2023-11-14T22:13:20.250Z  503  POST /v1/chat/completions  -        gate_error (no_unit)  "
        "ttft -       total 1.500s  128 events 1033B in 45kB out  192.0.2.1:5 req-1  2 attempts\n"
    )


@pytest.mark.parametrize("odd", ["\x1b[2J", "\x00", "\x9b2J", "\u202e", "\u2028"])
def test_no_line_and_no_metric_has_a_control_or_turns_its_reader_round(
    odd: str, capfd: pytest.CaptureFixture[str]
) -> None:
    record = DONE._replace(model=f"a{odd}b")
    page = only_visible(f'x{{model="a{odd}b"}} 1\n'.encode()).decode()
    configure("json")
    log_line("info", f"a{odd}b")
    lines = page, json_line(0.0, record).decode(), console_line(0.0, record).decode(), written(capfd)
    for line in lines:
        assert line.rstrip("\n").isprintable(), ascii(line)
    assert orjson.loads(lines[1])["model"] == f"a{odd}b"
    assert "\n" in page


def test_a_client_can_neither_forge_a_line_nor_store_a_book_in_it() -> None:
    nasty = DONE._replace(model="\ud800" + "x" * 10_000, path="/a\nb")
    fields = orjson.loads(json_line(clock(), nasty).replace(b"\\ud800", b"?"))
    assert (fields["model"], fields["path"]) == ("?" + "x" * (TEXT_MAX - 2) + "…", "/a\nb")
    assert json_line(clock(), nasty).count(b"\n") == console_line(clock(), nasty).count(b"\n") == 1


def test_what_was_written_reaches_the_stream_in_order_by_close_at_the_latest() -> None:
    sink = io.BytesIO()
    log = AccessLog("json", sink, clock)
    log.write(DONE)
    assert sink.getvalue() == b"", "nothing is written before a flush"
    log.flush()
    log.write(DONE._replace(request_id="req-2"))
    log.close()
    assert [orjson.loads(line)["request_id"] for line in sink.getvalue().splitlines()] == ["req-1", "req-2"]


def test_standard_output_and_one_that_takes_little_at_a_time_get_everything(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log_writer, "LOG_BUSY_S", 0.0)
    reluctant = Reluctant()
    for sink in (stdout_sink(), reluctant):
        log = AccessLog("json", sink, clock)
        log.write(DONE)
        log.close()
    assert capfd.readouterr().out.encode() == reluctant.taken == json_line(clock(), DONE)


def test_off_writes_nothing_and_starts_no_thread() -> None:
    sink = io.BytesIO()
    before = threading.active_count()
    log = AccessLog("off", sink, clock)
    log.write(DONE)
    log.flush()
    assert threading.active_count() == before
    log.close()
    assert sink.getvalue() == b""


def test_a_stuck_sink_blocks_nobody_and_costs_the_oldest_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, said = Stuck(), list[tuple[str, str]]()
    log = AccessLog("json", sink, clock, lambda *line: said.append(line))
    log.write(DONE._replace(request_id="in the sink"))
    log.flush()
    assert sink.entered.wait(60.0)
    log.write(DONE._replace(request_id="queued"))
    log.flush()
    for i in range(LINES_KEPT + 7):
        log.write(DONE._replace(request_id=str(i)))
    log.flush()
    assert log.dropped == 7
    assert said == [("warning", "access log: 7 lines lost, its output does not accept them: it is stuck")]
    monkeypatch.setattr(access_log, "CLOSE_TIMEOUT_S", 0.03)
    log.close()
    assert sink.getvalue() == b"", "close gives up on a sink that stays stuck"
    monkeypatch.setattr(access_log, "CLOSE_TIMEOUT_S", 60.0)
    sink.let_go.set()
    log.close()
    ids = [orjson.loads(line)["request_id"] for line in sink.getvalue().splitlines()]
    assert ids == ["in the sink", "queued", *map(str, range(7, LINES_KEPT + 7))]


def test_a_broken_sink_is_complained_about_once_in_a_while_and_tried_again() -> None:
    now = [0.0]
    sink, said = Broken(), list[tuple[str, str]]()
    log = AccessLog("json", sink, lambda: now[0], lambda *line: said.append(line))
    for lost in (1, 2, 3):
        log.write(DONE)
        log.flush()
        assert eventually(lambda: log.dropped >= lost)  # noqa: B023
    complaint = (
        "access log: {} lines lost, its output does not accept them: [Errno 28] No space left on device"
    )
    log.flush()
    assert said == [("warning", complaint.format(1))]
    now[0] = access_log.COMPLAIN_EVERY_S
    log.flush()
    assert said[1:] == [("warning", complaint.format(2))]
    sink.broken = False
    log.write(DONE)
    log.close()
    assert sink.getvalue().count(b"\n") == 1


def test_a_line_that_waits_takes_no_more_memory_than_its_bytes() -> None:
    tracemalloc.start()
    lines = [json_line(clock(), DONE) for _ in range(1000)]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < sum(map(sys.getsizeof, lines)) + 100 * len(lines)


# The operator's log: one line per message, in the form that was configured.


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("cellgate").setLevel(logging.NOTSET)
    logging.captureWarnings(False)
    threading.excepthook, sys.unraisablehook = threading.__excepthook__, sys.__unraisablehook__


def written(capfd: pytest.CaptureFixture[str]) -> str:
    """What has come out on stderr."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    return capfd.readouterr().err


def test_a_line_has_time_level_and_message(capfd: pytest.CaptureFixture[str]) -> None:
    configure("console")
    log_line("warning", "unit a1 is down:\nforged line")
    time, rest = written(capfd).split(" ", 1)
    assert (len(time), time[10], time[-1]) == (24, "T", "Z")
    assert rest == "WARNING unit a1 is down:\\x0aforged line\n"
    configure("json")
    log_line("info", "gate ready")
    line = orjson.loads(written(capfd))
    assert line == {"time": line["time"], "level": "info", "message": "gate ready"}


def test_what_libraries_warn_about_comes_out_in_the_same_form(capfd: pytest.CaptureFixture[str]) -> None:
    configure("json")
    logging.getLogger("asyncio").info("chatter")
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("asyncio").exception("a task failed")
    line = orjson.loads(written(capfd))
    assert (line["level"], line["message"]) == ("error", "asyncio: a task failed")
    assert line["exception"].endswith("ValueError: boom")


def test_warnings_and_what_ends_a_thread_come_out_in_the_same_form(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure("json")
        warnings.warn("an old way", UserWarning, stacklevel=1)
    thread = threading.Thread(target=lambda: next(iter(())), name="t")
    thread.start()
    thread.join()
    one, other = map(orjson.loads, written(capfd).splitlines())
    assert "an old way" in one["message"]
    assert (other["message"], other["exception"][-13:]) == ("a thread ended by an exception", "StopIteration")


def test_an_output_that_takes_nothing_costs_the_oldest_lines_and_is_told_of_later() -> None:
    sink, counted = Stuck(), REACHED["log_lines"]
    writer = LogWriter(sink, logging.Formatter("%(message)s"))
    total = LIMITS.log_lines + 10
    for number in range(total):
        writer.handle(logging.LogRecord("x", logging.ERROR, "", 0, f"line {number}", (), None))
    sink.let_go.set()
    writer.flush()
    lost, taken = REACHED["log_lines"] - counted, sink.getvalue().splitlines()
    # The writer may hold one line in its hands.
    assert lost in (9, 10)
    assert sum(line.startswith(b"line ") for line in taken) == total - lost
    assert taken[-1] == b"line %d" % (total - 1)
    assert sum(b"%d lines of this log are lost" % lost in line for line in taken) == 1


def test_a_line_that_cannot_be_made_does_not_hurt_who_logs() -> None:
    sink = io.BytesIO()
    writer = LogWriter(sink, logging.Formatter("%(message)s"))
    writer.handle(logging.LogRecord("x", logging.ERROR, "", 0, "%d", ("no number",), None))
    writer.handle(logging.LogRecord("x", logging.ERROR, "", 0, "\ud800", (), None))
    writer.flush()
    one, *_, other = sink.getvalue().splitlines()
    assert b"could not be made" in one
    assert other == b"\\ud800"


_STUCK = """
import asyncio, logging, os, sys, warnings
from cellgate.proxy.observe.log import configure, log_line
configure("console")
log_line("info", "before the fork")
if pid := os.fork():
    os.waitpid(pid, 0)
async def main():
    asyncio.get_running_loop().call_exception_handler({"message": "y" * 200, "exception": ValueError("boom")})
for number in range(1000):
    log_line("warning", "x" * 200)
    warnings.warn("z" * 200 + str(number))
    asyncio.run(main()) if number % 100 == 0 else None
os.write(1, b"served\\n")
"""


def test_nothing_waits_for_a_pipe_that_nobody_reads() -> None:
    """Also after a fork, and at the end of the process."""
    nobody, pipe = os.pipe()
    try:
        done = subprocess.run([sys.executable, "-c", _STUCK], stdout=subprocess.PIPE, stderr=pipe, timeout=30)
    finally:
        os.close(pipe)
        os.close(nobody)
    assert done.stdout == b"served\n" * 2
