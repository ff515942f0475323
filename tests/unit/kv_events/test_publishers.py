"""Where a unit publishes: as configured, and as engines tell."""

from __future__ import annotations

from typing import Any

import pytest

from cellgate.proxy.extras.kv_events.wire import RANKS_MAX, Publisher, configured, told
from cellgate.router.nouns import KvEvents

URL = "http://10.0.0.1:8000"


def test_a_rank_is_at_the_port_behind_the_one_before() -> None:
    keys = KvEvents("vllm", "tcp://a:5557", "tcp://a:6000", ranks=2)
    assert configured(keys) == {
        0: Publisher("tcp://a:5557", "tcp://a:6000"),
        1: Publisher("tcp://a:5558", "tcp://a:6001"),
    }
    assert configured(KvEvents("vllm", "tcp://a:5557")) == {0: Publisher("tcp://a:5557", "")}


def test_vllm_tells_of_each_rank() -> None:
    row = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}
    answer = {"0": row, "1": {"endpoint": "tcp://[::]:7"}, "2": {"publisher": "null"}, "x": row}
    assert told("vllm", answer, URL) == {
        0: Publisher("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
        1: Publisher("tcp://10.0.0.1:7", ""),
    }


def test_sglang_tells_a_base_and_how_many() -> None:
    events = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5, "dp_size": 2}
    assert told("sglang", {"kv_events": events}, "http://[fe80::1]:80") == {
        0: Publisher("tcp://[fe80::1]:5", ""),
        1: Publisher("tcp://[fe80::1]:6", ""),
    }
    replays = events | {"replay_endpoint_port_base": 9}
    assert told("sglang", {"kv_events": replays}, URL)[1].replay == "tcp://10.0.0.1:10"


def test_what_sglang_0_5_23_tells_is_read() -> None:
    ports = {"endpoint_port_base": 15601, "replay_endpoint_port_base": 15701}
    row = {"publisher": "zmq", "endpoint_host": "*", "topic": "kv", "block_size": 32, "dp_size": 1, **ports}
    assert told("sglang", {"version": "0.5.23", "kv_events": row, "internal_states": [{}]}, URL) == {
        0: Publisher("tcp://10.0.0.1:15601", "tcp://10.0.0.1:15701")
    }


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {"0": None},
        {"0": {"endpoint": 3}},
        {"0": {"endpoint": "ipc:///tmp/x"}},
        {"0": {"endpoint": "tcp://*:0"}},
        {"0": {"endpoint": "tcp://*:99999"}},
        {str(RANKS_MAX): {"endpoint": "tcp://*:5557"}},
        {"kv_events": None},
        {"kv_events": {"publisher": "zmq", "endpoint_port_base": "5"}},
        {"kv_events": {"publisher": "zmq", "endpoint_port_base": 5, "dp_size": 10**9}},
        {"kv_events": {"publisher": "null", "endpoint_port_base": 5}},
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_is_not_understood_is_no_publisher(engine: str, answer: Any) -> None:
    assert told(engine, answer, URL) == {}
