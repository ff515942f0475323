"""The operator's log: one line per message, in the form that was configured."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import orjson
import pytest

from cellgate.proxy.config.limits import LIMITS, REACHED
from cellgate.proxy.observe.log import LogWriter, configure, log_line


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


class Door:
    """An output that takes nothing until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.taken: list[bytes] = []

    def write(self, data: memoryview, /) -> int | None:
        assert self.open.wait(10.0)
        self.taken.append(bytes(data))
        return len(data)


def test_an_output_that_takes_nothing_costs_the_oldest_lines_and_is_told_of_later() -> None:
    door, counted = Door(), REACHED["log_lines"]
    writer = LogWriter(door, logging.Formatter("%(message)s"))
    total = LIMITS.log_lines + 10
    for number in range(total):
        writer.handle(logging.LogRecord("x", logging.ERROR, "", 0, f"line {number}", (), None))
    door.open.set()
    writer.flush()
    lost = REACHED["log_lines"] - counted
    # The writer may hold one line in its hands.
    assert lost in (9, 10)
    assert sum(line.startswith(b"line ") for line in door.taken) == total - lost
    assert door.taken[-1] == b"line %d\n" % (total - 1)
    assert sum(b"%d lines of this log are lost" % lost in line for line in door.taken) == 1


def test_a_line_that_cannot_be_made_does_not_hurt_who_logs() -> None:
    door = Door()
    door.open.set()
    writer = LogWriter(door, logging.Formatter("%(message)s"))
    writer.handle(logging.LogRecord("x", logging.ERROR, "", 0, "%d", ("no number",), None))
    writer.handle(logging.LogRecord("x", logging.ERROR, "", 0, "\ud800", (), None))
    writer.flush()
    assert b"could not be made" in door.taken[0]
    assert door.taken[1] == b"\\ud800\n"


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
