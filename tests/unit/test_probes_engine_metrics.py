"""What is read from an engine's metrics."""

from __future__ import annotations

import pytest

from probes.base import Trouble
from probes.engine_metrics import EngineMetrics, scan
from router.nouns import Load
from tests.patient import Answer, FakePatient, look, reply

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 1000.0
vllm:prompt_tokens_created{engine="0",model_name="tiny"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="tiny"} 200.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="tiny"} 77.0
vllm:iteration_tokens_total_count{engine="0",model_name="tiny"} 70.0
vllm:iteration_tokens_total_sum{engine="0",model_name="tiny"} 1200.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 9.0
process_start_time_seconds 1.75391e+09
"""


def test_the_numbers_of_vllm_are_read() -> None:
    """Gauges, the counters an engine step moves, and when the process started."""
    expected = Load("u", 100.0, 3, 2, 0.25, own_in_flight=1, progress=1270.0, epoch="1.75391e+09")
    assert look(EngineMetrics(), FakePatient(lambda _: reply(200, VLLM), in_flight=1)) == [expected]


def test_the_old_name_of_the_cache_gauge_is_read() -> None:
    """vLLM renamed it."""
    body = b"vllm:num_requests_running 0\nvllm:gpu_cache_usage_perc 0.5\n"
    assert scan(body, "u", 1.0, 0) == Load("u", 1.0, kv_use=0.5)


@pytest.mark.parametrize("prefix", ["sglang:", "sglang_"])
def test_the_numbers_of_sglang_are_read_under_both_prefixes(prefix: str) -> None:
    """The colon became an underscore."""
    lines = [
        'num_running_reqs{tp_rank="0"} 4',
        "num_queue_reqs 1",
        "token_usage 0.1",
        "generation_tokens_total 9",
    ]
    body = "".join(f"{prefix}{line}\n" for line in lines).encode()
    assert scan(body, "u", 1.0, 0) == Load("u", 1.0, 4, 1, 0.1, progress=9.0)


def test_engines_behind_one_front_end_are_summed_and_the_fullest_cache_counts() -> None:
    """Data parallel ranks show one line each."""
    body = b"".join(
        b'vllm:num_requests_running{engine="%d"} 2\nvllm:kv_cache_usage_perc{engine="%d"} 0.%d\n' % (i, i, i)
        for i in range(3)
    )
    assert scan(body, "u", 1.0, 0) == Load("u", 1.0, running=6, kv_use=0.2)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "many", "1e999"])
def test_a_value_that_is_no_number_is_passed_over(value: str) -> None:
    """It must not reach a sum."""
    body = f"vllm:num_requests_waiting 1\nvllm:num_requests_running {value}\n".encode()
    assert scan(body, "u", 1.0, 0) == Load("u", 1.0, waiting=1)


def test_a_timestamp_after_the_value_is_not_taken_for_it() -> None:
    """The format allows one."""
    assert scan(b"vllm:num_requests_running 2 1700000000000\n", "u", 1.0, 0) == Load("u", 1.0, running=2)


@pytest.mark.parametrize("answer", [reply(404), reply(200, b"go_goroutines 9\n"), reply(503, VLLM)])
def test_a_unit_without_metrics_is_left_alone_for_a_while(answer: Answer) -> None:
    """No finding; asked again after half a minute."""
    patient = FakePatient(lambda _: answer)
    assert look(EngineMetrics(), patient) == []
    assert EngineMetrics().due_at(patient, 100.0) == 130.0


def test_metrics_that_appear_later_are_read_each_second_again() -> None:
    """The back-off ends with the first success."""
    patient = FakePatient(lambda _: reply(404))
    look(EngineMetrics(), patient)
    patient.answer = lambda _: reply(200, VLLM)
    look(EngineMetrics(), patient)
    assert EngineMetrics().due_at(patient, 100.0) == 101.0


@pytest.mark.parametrize("trouble", Trouble)
def test_a_lost_reply_is_no_finding_and_no_reason_to_back_off(trouble: Trouble) -> None:
    """The unit may be restarting: its next epoch must be seen soon."""
    patient = FakePatient(lambda _: trouble)
    assert look(EngineMetrics(), patient) == []
    assert EngineMetrics().due_at(patient, 100.0) == 101.0
