"""The replay on real sockets: the units' process, and a whole cell against the model."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.replay import routers
from loadtests.replay.cell import Plan, run, units_process
from loadtests.replay.client import body_of
from loadtests.replay.engine import Model
from loadtests.replay.figures import figures_of
from loadtests.replay.ideal import least_connections
from loadtests.replay.trace import Request

SPEED_UP = 4.0
# Five conversations of three turns, each turn a block longer than the one before.
REQUESTS = [
    Request(0.4 * turn + 0.05 * user, 512 * (turn + 2), 12, tuple(range(10 * user, 10 * user + turn + 2)))
    for turn in range(3)
    for user in range(5)
]
PLAN = Plan(
    requests=REQUESTS,
    bodies=[body_of(each) for each in REQUESTS],
    units=2,
    speed_up=SPEED_UP,
    patience_s=10.0,
)


@pytest.fixture
def port() -> Iterator[int]:
    with units_process(PLAN) as (_, ports):
        yield ports[0]


def asked(port: int, path: str, body: object = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_a_unit_answers_what_a_gate_asks(port: int) -> None:
    assert asked(port, "/health") == (200, b"")
    assert json.loads(asked(port, "/v1/models")[1])["data"][0]["id"] == "replay"
    chat = {"model": "replay", "messages": [{"role": "user", "content": "ping"}], "max_tokens": 1}
    status, body = asked(port, "/v1/chat/completions", chat)
    assert status == 200
    assert json.loads(body)["choices"][0]["message"]["content"] == "x"
    page = asked(port, "/metrics")[1].decode()
    assert 'vllm:generation_tokens_total{model_name="replay",engine="0"} 1' in page
    assert 'vllm:cache_config_info{block_size="256",num_gpu_blocks="5859",engine="0"} 1' in page
    assert "process_start_time_seconds 1" in page


@pytest.mark.parametrize("body", [{"prompt": ""}, {"prompt": 3}, {"messages": "x"}, [1]])
def test_a_request_that_makes_no_sense_is_a_400(port: int, body: object) -> None:
    assert asked(port, "/v1/completions", body)[0] == 400


def test_a_router_that_is_not_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "ROOT", tmp_path)
    cell = run(PLAN, "sglang-router cache_aware", scale=1.0, load=0.8, seed=1)
    assert (cell.figures, cell.missing) == (None, "no figures: not installed; type:  make peers")


def test_a_replay_without_a_router_comes_to_what_the_model_says() -> None:
    cell = run(PLAN, "direct leastconn", scale=1.0, load=1.0, seed=0)
    assert cell.figures is not None
    assert [each.trouble for each in cell.answers] == [""] * len(REQUESTS)
    expected = figures_of(least_connections(REQUESTS, 1.0, [Model()] * 2), 2)
    # A second of a busy machine is four virtual ones: what is compared here are not milliseconds.
    assert 0.8 * expected.ttft_mean_s <= cell.figures.ttft_mean_s <= expected.ttft_mean_s + 4.0
    assert sum(each.cached_tokens for each in cell.answers) > 0
