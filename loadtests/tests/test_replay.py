"""The replay on real sockets: the units' process, and whole runs against the gym."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.gym.loads_sessions import Sessions
from loadtests.kit import routers
from loadtests.replay.cell import run, run_in_quiet, units_process
from loadtests.replay.client import bodies_of
from loadtests.replay.plays import Play

CHAT = Sessions(turns=(3, 3), first=(600, 900), added=(100, 300), answer_tokens=12, pause_s=(0.2, 0.4))
REQUESTS = CHAT.make(random.Random(1), 20.0, 15)
PLAY = Play("chat", "two", 1, REQUESTS, bodies_of(REQUESTS), speed_up=4.0, patience_s=10.0)


@pytest.fixture
def port() -> Iterator[int]:
    with units_process("two", 4.0) as (_, ports):
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
    assert json.loads(body)["choices"][0]["message"]["content"] == "word "
    page = asked(port, "/metrics")[1].decode()
    assert 'vllm:generation_tokens_total{model_name="replay",engine="0"} 1' in page
    assert 'vllm:cache_config_info{block_size="64",num_gpu_blocks="7812",engine="0"} 1' in page
    assert "process_start_time_seconds 1" in page


@pytest.mark.parametrize("body", [{"prompt": ""}, {"prompt": 3}, {"messages": "x"}, [1]])
def test_a_request_that_makes_no_sense_is_a_400(port: int, body: object) -> None:
    assert asked(port, "/v1/completions", body)[0] == 400


def test_a_router_that_is_not_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "ROOT", tmp_path)
    result = run(PLAY, "sglang-router cache_aware")
    assert (result.figures, result.missing) == (
        None,
        "no figures: not installed; type:  make .venv-sglang-router/made",
    )


def test_a_replay_without_a_router_comes_to_what_the_gym_says() -> None:
    result = run(PLAY, "direct leastconn")
    assert result.figures is not None
    assert [each.trouble for each in result.answers] == [""] * 15
    assert sum(result.figures.per_unit) == 15
    expected = run_in_quiet(PLAY, "gym leastconn").figures
    assert expected is not None
    assert sum(expected.per_unit) == 15
    # A second of a busy machine is four virtual ones: what is compared here are not milliseconds.
    assert 0.8 * expected.ttft_mean_s <= result.figures.ttft_mean_s <= expected.ttft_mean_s + 4.0
    # What was said before is found where it was said.
    assert result.figures.hits > 0.1


def test_a_client_that_leaves_frees_its_seat(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    body = {"prompt": "a b c", "max_tokens": 400_000, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    response.read(1)
    assert b'vllm:num_requests_running{model_name="replay",engine="0"} 1' in asked(port, "/metrics")[1]
    response.close()
    connection.close()
    for _ in range(200):
        if b'vllm:num_requests_running{model_name="replay",engine="0"} 0' in asked(port, "/metrics")[1]:
            return
    pytest.fail("it runs on")
