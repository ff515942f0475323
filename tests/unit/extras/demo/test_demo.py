"""What `cellgate demo` says while no unit is up."""

from __future__ import annotations

from types import SimpleNamespace

import orjson
import pytest

from cellgate.extras.demo import demo
from cellgate.proxy.ingress.reasons import NOTHING_YET


def test_a_unit_that_is_no_engine_is_named_with_its_reason_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    unit = {"name": "unit-1", "url": "http://a:1", "verdict": "starting", "reason": NOTHING_YET}
    monkeypatch.setattr(demo, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(demo, "_get", lambda address, path: orjson.dumps([unit]))
    printed = demo.PrintedReasons()
    for reason in (NOTHING_YET, "GET /v1/models: HTTP 404", "GET /v1/models: HTTP 404"):
        unit["reason"] = reason
        now[0] += 5.0
        printed.look("127.0.0.1:1")
    assert capsys.readouterr().out == (
        "still waiting: unit unit-1 (http://a:1) is starting: GET /v1/models: HTTP 404\n"
    )
