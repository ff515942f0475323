"""The simulated unit as real processes: each fault hurts as on real engines, and heals."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from loadtests.kit.processes import is_running
from loadtests.simunit.process import SimUnit
from loadtests.tests.simunit_stage import (
    SILENCE_S,
    STEP_MS,
    OpenStream,
    accepts,
    call,
    chat,
    eventually,
    metric,
    post_then_get,
    text_of,
)
from loadtests.tests.simunit_stage import doomed as doomed
from loadtests.tests.simunit_stage import long_lived as long_lived
from loadtests.tests.simunit_stage import unit as unit


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
    # A comment, and a token behind it, may have been under way when the engine froze.
    assert stream.is_silent()
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


def test_a_unit_answers_nonsense_on_command_and_canaries_may_be_spared(unit: SimUnit) -> None:
    unit.fault("answers", kind="status_401")
    assert chat(unit)[0] == 401
    unit.fault("answers", kind="html", spare_canaries=1)
    assert "<html>" in chat(unit)[1]
    canary = {"X-Request-Id": "cellgate-canary-1"}
    assert call(unit, "/v1/completions", {"prompt": "Hello", "max_tokens": 1}, canary)[0] == 200
    unit.fault("answers", kind="empty_deltas")
    stream = OpenStream(unit).read_until(b'{"content":""}')
    assert len(stream.events) >= 2
    stream.close()
    unit.fault("heal")
    assert chat(unit)[0] == 200


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
