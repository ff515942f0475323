"""`kv_events` of a unit: what it takes, and what it refuses with a reason."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from pydantic import ValidationError

from cellgate.proxy.config import units
from cellgate.proxy.config.units import UnitKeys, unit_of
from cellgate.router.nouns import KvEvents


def read(found: Any) -> KvEvents | None:
    keys = UnitKeys.model_validate({"name": "a", "url": "http://a:8000", "kv_events": found})
    return unit_of("c", keys, "").kv_events


def test_an_engine_alone_is_asked_for_its_endpoints() -> None:
    assert read({"from": "sglang"}) == KvEvents("sglang")


def test_endpoints_of_several_ranks() -> None:
    found = {"from": "vllm", "endpoint": "tcp://a:5557", "replay_endpoint": "tcp://a:6000", "ranks": 2}
    assert read(found) == KvEvents("vllm", "tcp://a:5557", "tcp://a:6000", 2)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({}, "Field required"),
        ({"from": "triton"}, "an engine"),
        ({"from": "vllm", "endpoint": "a:5557"}, "tcp://HOST:PORT"),
        ({"from": "vllm", "endpoint": "tcp://*"}, "HOST:PORT"),
        ({"from": "vllm", "ranks": 2}, "require endpoint"),
        ({"from": "vllm", "port": 2}, "Extra inputs"),
    ],
)
def test_what_is_wrong_is_told(found: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        read(found)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> object:
        return None if name == "zmq" else importlib.util.find_spec(name)

    monkeypatch.setattr(units, "find_spec", find_spec)
    with pytest.raises(ValidationError, match=r"cellgate\[kv-events\]"):
        read({"from": "vllm"})
