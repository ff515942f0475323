"""The simulated unit as real processes: what it answers, and that each fault hurts as on real engines."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from loadtests.processes import is_running
from loadtests.simunit.process import SimUnit, SimUnitError

MESSAGES = [{"role": "user", "content": "Tell me a long story about a gate."}]
STEP_MS = 4
SILENCE_S = 0.25
"""Long against a step: a stream that brings nothing for so long is taken to hang."""


@pytest.fixture(scope="module")
def long_lived() -> Iterator[SimUnit]:
    with SimUnit.start("t1", step_ms=STEP_MS) as started:
        yield started


@pytest.fixture
def unit(long_lived: SimUnit) -> Iterator[SimUnit]:
    """A unit that outlives each fault: healed after the test, which must not kill any of its processes."""
    yield long_lived
    long_lived.signal_follower(signal.SIGCONT)
    long_lived.fault("heal")
    assert eventually(lambda: long_lived.state()["running"] == 0)


@pytest.fixture
def doomed() -> Iterator[SimUnit]:
    """A unit to be killed."""
    with SimUnit.start("t2", step_ms=STEP_MS) as started:
        yield started


class OpenStream:
    """A streamed chat, read as raw bytes so that nothing of how it is framed is hidden."""

    def __init__(self, unit: SimUnit, **fields: object) -> None:
        body = json.dumps({"messages": MESSAGES, "stream": True, "max_tokens": 64, **fields})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: unit\r\nContent-Length: {len(body)}\r\n\r\n"
        self.received = b""
        self._socket = socket.create_connection(("127.0.0.1", unit.port), timeout=5)
        self._socket.sendall((head + body).encode())

    def read_until(self, end: bytes) -> "OpenStream":
        """Read until `end` has been seen. Raises TimeoutError if it does not come."""
        while end not in self.received:
            self.received += self._socket.recv(65536)
        return self

    def is_silent(self) -> bool:
        """Whether the unfinished stream falls silent for SILENCE_S after what was already under way."""
        self._socket.settimeout(SILENCE_S)
        try:
            for _ in range(20):
                self.received += self._socket.recv(65536)
        except TimeoutError:
            return b"[DONE]" not in self.received
        finally:
            self._socket.settimeout(5)
        return False

    @property
    def events(self) -> list[str]:
        lines = self.received.decode().splitlines()
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    @property
    def text(self) -> str:
        choices = [json.loads(event).get("choices") for event in self.events if event != "[DONE]"]
        return "".join(choice[0]["delta"]["content"] for choice in choices if choice)

    def close(self) -> None:
        self._socket.close()


def call(unit: SimUnit, path: str, body: object = None) -> tuple[int, Any]:
    """One request on a connection of its own: status, and the body as JSON or text."""
    connection = http.client.HTTPConnection("127.0.0.1", unit.port, timeout=5)
    try:
        connection.request(
            "GET" if body is None else "POST", path, None if body is None else json.dumps(body)
        )
        response = connection.getresponse()
        raw = response.read()
    finally:
        connection.close()
    is_json = response.headers.get_content_type() == "application/json"
    return response.status, json.loads(raw) if is_json else raw.decode()


def chat(unit: SimUnit, **fields: object) -> tuple[int, Any]:
    return call(unit, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8, **fields})


def post_then_get(unit: SimUnit, path: str, body: bytes, then: str) -> bytes:
    """Two requests sent at once on one connection; everything that is answered."""
    head = f"POST {path} HTTP/1.1\r\nHost: unit\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    after = f"GET {then} HTTP/1.1\r\nHost: unit\r\nConnection: close\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", unit.port), timeout=5) as connection:
        connection.sendall(head + body + after)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def text_of(answer: tuple[int, Any]) -> str:
    assert answer[0] == 200, answer
    text: str = answer[1]["choices"][0]["message"]["content"]
    return text


def eventually(holds: Callable[[], bool], within_s: float = 2.0) -> bool:
    """Poll what another process is about to do."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def metric(unit: SimUnit, name: str) -> float:
    _, page = call(unit, "/metrics")
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"vllm:{name}{{"))


def test_a_stream_has_its_head_first_then_role_then_one_chunk_an_event(unit: SimUnit) -> None:
    unit.fault("warm_up", seconds=0.3)
    stream = OpenStream(unit, max_tokens=3, stream_options={"include_usage": True}).read_until(b"\r\n\r\n")
    assert stream.received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert stream.events == []
    stream.read_until(b"\r\n0\r\n\r\n")
    body = stream.received.partition(b"\r\n\r\n")[2]
    while size := int(body.partition(b"\r\n")[0], 16):
        event, body = (rest := body.partition(b"\r\n")[2])[:size], rest[size + 2 :]
        assert event.startswith(b"data: ")
        assert event.index(b"\n\n") == size - 2
    first, *middle, usage = [json.loads(event) for event in stream.events[:-1]]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in middle] == [None, None, "length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert stream.events[-1] == "[DONE]"
    stream.close()


def test_a_broken_off_text_is_continued_exactly_by_another_unit(unit: SimUnit) -> None:
    """By the chat template and by completions, and the second unit's count of it agrees."""
    whole = text_of(chat(unit, max_tokens=20))
    said = "".join(f" {word}" for word in whole.split()[:7])
    with SimUnit.start("t3", step_ms=STEP_MS, followers=0) as other:
        turn = {"role": "assistant", "content": said}
        flags = {"add_generation_prompt": False, "continue_final_message": True}
        assert said + text_of(chat(other, messages=[*MESSAGES, turn], max_tokens=13, **flags)) == whole
        _, plain = call(unit, "/v1/completions", {"prompt": "Once", "max_tokens": 20})
        text = plain["choices"][0]["text"]
        _, rest = call(other, "/v1/completions", {"prompt": "Once" + text[:25], "max_tokens": 15})
        assert text[:25] + rest["choices"][0]["text"] == text
        assert rest["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + 5
        before = call(other, "/tokenize", {"messages": MESSAGES})[1]["count"]
        after = call(other, "/tokenize", {"messages": [*MESSAGES, turn], **flags})[1]["count"]
        assert after - before == 7


def test_a_stopped_follower_wedges_the_unit_while_health_says_200_until_it_continues(unit: SimUnit) -> None:
    expected = text_of(chat(unit, max_tokens=64))
    stream = OpenStream(unit).read_until(b'" ')
    unit.signal_follower(signal.SIGSTOP)
    assert stream.is_silent()
    steps = unit.state()["counts"]["steps"]
    assert call(unit, "/health")[0] == 200
    assert metric(unit, "num_requests_running") == 1
    assert unit.state()["counts"]["steps"] == steps
    unit.signal_follower(signal.SIGCONT)
    assert stream.read_until(b"[DONE]").text == expected
    stream.close()


def test_a_wedged_unit_whose_clients_gave_up_looks_idle(unit: SimUnit) -> None:
    unit.signal_follower(signal.SIGSTOP)
    stream = OpenStream(unit)
    assert eventually(lambda: metric(unit, "num_requests_running") == 1)
    stream.close()
    assert eventually(lambda: metric(unit, "num_requests_running") == 0)


def test_a_killed_follower_ends_streams_in_an_error_under_200_and_then_the_leader_exits(
    doomed: SimUnit,
) -> None:
    stream = OpenStream(doomed, max_tokens=1000).read_until(b'" ')
    doomed.signal_follower(signal.SIGKILL)
    late = post_then_get(doomed, "/v1/completions", b'{"prompt": "late"}', then="/health")
    assert re.findall(rb"HTTP/1.1 (\d+)", late) == [b"500", b"503"]
    error = json.loads(stream.read_until(b"[DONE]").events[-2])["error"]
    assert (error["code"], error["type"]) == (500, "InternalServerError")
    assert doomed.wait(timeout_s=5) == 1
    with pytest.raises(ConnectionRefusedError):
        chat(doomed)
    stream.close()


def test_an_idle_unit_does_not_know_that_its_follower_is_dead_until_a_request_comes(doomed: SimUnit) -> None:
    doomed.signal_follower(signal.SIGKILL)
    assert eventually(lambda: not is_running(doomed.follower_pids[0]))
    assert call(doomed, "/health")[0] == 200
    assert chat(doomed)[0] == 500


def test_followers_even_stopped_or_spinning_do_not_outlive_a_killed_leader() -> None:
    unit = SimUnit.start("t4", followers=3)
    unit.fault("spin", rank=2)
    unit.signal_follower(signal.SIGSTOP, rank=1)
    unit.kill()
    assert eventually(lambda: not any(map(is_running, unit.follower_pids)))
    unit.stop()


def test_a_unit_does_not_outlive_a_killed_starter() -> None:
    """As when `make run` is killed before it can stop its units."""
    starts_one = (
        "from loadtests.simunit.process import SimUnit; unit = SimUnit.start('t6');"
        "print(unit.pid, *unit.follower_pids, flush=True); input()"
    )
    command = [sys.executable, "-c", starts_one]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pids = [int(pid) for pid in starter.stdout.readline().split()]
        assert len(pids) == 2
        starter.kill()
    assert eventually(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize("fault", ["drop_link", "spin"])
def test_a_fault_inside_the_collective_hangs_generation_and_heals(unit: SimUnit, fault: str) -> None:
    stream = OpenStream(unit).read_until(b'" ')
    unit.fault(fault)
    assert stream.is_silent()
    assert is_running(unit.follower_pids[0])
    assert call(unit, "/health")[0] == 200
    unit.fault("heal")
    assert len(stream.read_until(b"[DONE]").text.split()) == 64
    stream.close()


def test_a_spinning_follower_burns_its_processor(unit: SimUnit) -> None:
    def cpu_ticks() -> int:
        with open(f"/proc/{unit.follower_pids[0]}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[11])

    before = cpu_ticks()
    unit.fault("spin")
    assert eventually(lambda: cpu_ticks() - before >= 0.1 * os.sysconf("SC_CLK_TCK"))


def test_a_frozen_engine_sends_comments_but_no_data(unit: SimUnit) -> None:
    stream = OpenStream(unit).read_until(b'" ')
    unit.fault("freeze_engine")
    stream.read_until(b": keep-alive\n\n")
    events = stream.events
    assert stream.is_silent()
    assert stream.events == events
    unit.fault("heal")
    assert stream.read_until(b"[DONE]").events[-1] == "[DONE]"
    stream.close()


def test_commands_that_hurt_answers_hurt_them(unit: SimUnit) -> None:
    unit.fault("error_rate", rate=1, status=503)
    assert chat(unit)[0] == 503
    unit.fault("heal")
    unit.fault("in_stream_error", after_tokens=2)
    stream = OpenStream(unit).read_until(b"[DONE]")
    assert "error" in json.loads(stream.events[-2])
    assert len(stream.events) == 5
    stream.close()
    unit.fault("heal")
    unit.fault("stall_after", tokens=4)
    stream = OpenStream(unit).read_until(b'" ')
    assert stream.is_silent()
    assert len(stream.text.split()) == 4
    unit.fault("heal")
    stream.read_until(b"[DONE]").close()


def test_slowness_multiplies_step_time_by_one_slow_rank_as_by_all(unit: SimUnit) -> None:
    def seconds() -> float:
        start_s = time.monotonic()
        chat(unit, max_tokens=20)
        return time.monotonic() - start_s

    slow_s = 0.95 * 20 * 5 * STEP_MS / 1000
    assert eventually(lambda: seconds() < slow_s)
    unit.fault("slow", factor=5)
    assert seconds() >= slow_s
    unit.fault("heal")
    unit.fault("slow_rank", rank=1, factor=5)
    assert seconds() >= slow_s
    unit.fault("heal")
    assert eventually(lambda: seconds() < slow_s)


def test_a_unit_that_refuses_goes_on_with_open_streams_and_listens_again_when_healed(unit: SimUnit) -> None:
    stream = OpenStream(unit).read_until(b'" ')
    unit.fault("refuse")
    with pytest.raises(ConnectionRefusedError):
        chat(unit)
    stream.read_until(b"[DONE]").close()
    unit.fault("heal")
    assert chat(unit)[0] == 200


def test_a_client_that_leaves_frees_its_sequence_at_once(unit: SimUnit) -> None:
    aborted = unit.state()["counts"]["ended"]["abort"]
    OpenStream(unit, max_tokens=10_000).read_until(b'" ').close()
    assert eventually(lambda: unit.state()["running"] == 0)
    assert unit.state()["counts"]["ended"]["abort"] == aborted + 1


def test_a_prefix_seen_before_is_not_computed_again(unit: SimUnit) -> None:
    body = {"prompt": "word " * 400, "max_tokens": 1}
    hits = metric(unit, "prefix_cache_hits_total")
    first, second = (call(unit, "/v1/completions", body)[1]["usage"] for _ in range(2))
    cached = second["prompt_tokens"] // 16 * 16
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == cached == 400
    assert metric(unit, "prefix_cache_hits_total") == hits + cached


def test_metrics_carry_the_names_that_a_gate_reads(unit: SimUnit) -> None:
    steps = metric(unit, "iteration_tokens_total_count")
    chat(unit, max_tokens=5)
    assert metric(unit, "iteration_tokens_total_count") == steps + 5
    _, page = call(unit, "/metrics")
    names = {re.split(r"[{ ]", line)[0] for line in page.splitlines() if not line.startswith("#")}
    assert names >= {
        "process_start_time_seconds",
        "vllm:cache_config_info",
        "vllm:generation_tokens_total",
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prompt_tokens_total",
        "vllm:time_to_first_token_seconds_count",
    }
    assert 'block_size="16",engine="0",num_gpu_blocks="8192"' in page


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "model": "other"}, 404, "`other`"),
        ("/v1/chat/completions", {"messages": MESSAGES, "priority": 1}, 400, "priority"),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 2}, 400, "n=2"),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "continue_final_message": True},
            400,
            "continue_final",
        ),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/completions", {"prompt": "word " * 40_000}, 400, "maximum context length"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/tokenize", {}, 400, "prompt or messages"),
        ("/sim/fault", {"fault": "spin", "rank": 7}, 400, "rank 7"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_by_name(
    unit: SimUnit, path: str, body: object, status: int, says: str
) -> None:
    answered, error = call(unit, path, body)
    assert answered == status
    assert says in error["error"]["message"]


def test_a_full_queue_refuses_as_commanded_and_only_then(unit: SimUnit) -> None:
    unit.fault("full_queue", waiting=0, status=429)
    assert chat(unit)[0] == 429
    unit.fault("full_queue", waiting=1)
    assert chat(unit)[0] == 200
    unit.fault("freeze_engine")
    waiting = OpenStream(unit)
    assert eventually(lambda: unit.state()["waiting"] == 1)
    assert chat(unit)[0] == 503
    waiting.close()


def test_late_probes_are_late_and_answers_are_not(unit: SimUnit) -> None:
    unit.fault("late_probes", seconds=SILENCE_S)

    def seconds(path: str, body: object = None) -> float:
        start_s = time.monotonic()
        assert call(unit, path, body)[0] == 200
        return time.monotonic() - start_s

    assert all(seconds(path) >= SILENCE_S for path in ("/health", "/metrics", "/v1/models"))
    assert seconds("/v1/completions", {"prompt": "Once", "max_tokens": 1}) < SILENCE_S


def test_a_unit_restarts_on_its_port_within_milliseconds_and_tells_who_came_first(doomed: SimUnit) -> None:
    before, port = (doomed.pid, *doomed.follower_pids), doomed.port
    refused_at: list[float] = []
    over = threading.Event()

    def knock() -> None:
        while not over.wait(0.002):
            if not accepts(port):
                refused_at.append(time.monotonic())

    with ThreadPoolExecutor(1) as pool:
        knocking = pool.submit(knock)
        doomed.restart()
        over.set()
        knocking.result()
    assert max(refused_at, default=0) - min(refused_at, default=0) < 0.3
    assert doomed.port == port
    assert not {doomed.pid, *doomed.follower_pids} & {*before}
    assert eventually(lambda: not any(map(is_running, before)))
    assert chat(doomed)[0] == 200
    began, ended = doomed.state()["journal"]
    assert began.replace("began", "ended") == ended


def test_between_the_chunks_of_a_prompt_of_100k_tokens_others_get_tokens() -> None:
    size = {"max_model_len": 131072, "num_gpu_blocks": 16384, "prefill_tokens_per_s": 400_000}
    with SimUnit.start("t7", step_ms=STEP_MS, followers=0, **size) as unit:
        other = OpenStream(unit, max_tokens=5000).read_until(b'" ')
        before = unit.state()["counts"]
        prompt = {"prompt": " bada" * 100_000, "max_tokens": 1}
        assert call(unit, "/v1/completions", prompt)[1]["usage"]["prompt_tokens"] == 100_000
        after = unit.state()["counts"]
        assert after["steps"] - before["steps"] > 100_000 / 2048
        assert after["generation_tokens"] - before["generation_tokens"] > 100_000 / 2048
        other.close()


def test_a_unit_that_cannot_start_says_so() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(SimUnitError, match="t5 did not start"),
    ):
        SimUnit.start("t5", port=taken.getsockname()[1])
