"""The operator's log: one line per message, in the form that was configured."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import orjson
import pytest

from proxy.report.log import configure, log_line


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("cellgate").setLevel(logging.NOTSET)


def test_a_console_line_has_time_level_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    configure("console")
    log_line("warning", "unit a1 is down:\nforged line")
    said = capsys.readouterr().err
    time, rest = said.split(" ", 1)
    assert (len(time), time[10], time[-1]) == (24, "T", "Z")
    assert rest == "WARNING unit a1 is down:\\x0aforged line\n"


def test_a_json_line_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")
    log_line("info", "gate ready")
    line = orjson.loads(capsys.readouterr().err)
    assert (line["level"], line["message"], sorted(line)) == (
        "info",
        "gate ready",
        ["level", "message", "time"],
    )


def test_what_libraries_warn_about_comes_out_in_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")
    logging.getLogger("asyncio").info("chatter")
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("asyncio").exception("a task failed")
    line = orjson.loads(capsys.readouterr().err)
    assert (line["level"], line["message"]) == ("error", "asyncio: a task failed")
    assert line["exception"].endswith("ValueError: boom")
