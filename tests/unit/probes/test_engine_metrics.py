"""What is read from an engine's metrics."""

from __future__ import annotations

import random
import re

import pytest

from cellgate.probes.base import Trouble
from cellgate.probes.engine_metrics import ALL_EVERY, EngineMetrics, SampleLines, scan
from cellgate.router.nouns import Load, RankLoad, Unit
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
    expected = Load(
        "u", 100.0, 3, 2, 0.25, own_in_flight=1, progress=1270.0, sighted=True, epoch="1.75391e+09"
    )
    assert look(EngineMetrics(), FakePatient(lambda _: reply(200, VLLM), in_flight=1)) == [expected]


def test_what_came_while_the_engine_was_asked_is_no_work_of_others() -> None:
    """A crowd arrives between the question and the numbers."""
    context = FakePatient(lambda _: reply(200, VLLM), in_flight=0)

    def crowded(_: str) -> Answer:
        context.in_flight = 5
        return reply(200, VLLM)

    context.answer = crowded
    (load,) = look(EngineMetrics(), context)
    assert isinstance(load, Load)
    assert (load.running + load.waiting, load.foreign) == (5, 0)


def test_the_old_name_of_the_cache_gauge_is_read() -> None:
    """vLLM renamed it."""
    body = b"vllm:num_requests_running 0\nvllm:gpu_cache_usage_perc 0.5\n"
    assert scan(body, "u", 1.0, 0) == Load("u", 1.0, kv_use=0.5)


def test_data_parallel_ranks_are_told_apart_once_all_are_shown() -> None:
    page = (
        b'\nvllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 1\n'
        b'vllm:num_requests_waiting{engine="0"} 2\nvllm:iteration_tokens_total_count{engine="1"} 70\n'
    )
    load = scan(page, "u", 1.0, 0)
    assert load is not None
    assert load.ranks == (RankLoad(0, 3, 2, 0.0), RankLoad(1, 1, 0, 70.0))
    assert (load.running, load.waiting) == (4, 2)
    for other in (page.replace(b'"1"', b'"2"'), page.replace(b'"1"', b'"0"'), page.replace(b'"1"', b'"x"')):
        load = scan(other, "u", 1.0, 0)
        assert load is not None
        assert load.ranks == ()


def test_the_lora_adapters_in_use_are_read_from_the_latest_series() -> None:
    """vLLM keeps a series for each combination that it has had; its value is when that was."""
    series = (
        b'vllm:lora_requests_info{max_lora="%d",running_lora_adapters="%b",waiting_lora_adapters="%b"} %b\n'
    )
    page = b"vllm:num_requests_running 2\n" + b"".join(
        series % row
        for row in (
            (2, b"", b"", b"1.7e+09"),
            (2, b"poet,clerk", b"cook", b"1.72e+09"),
            (2, b"poet", b"", b"1.71e+09"),
        )
    )
    load = scan(page, "u", 1.0, 0)
    assert load is not None
    assert (sorted(load.adapters), load.adapter_places) == (["clerk", "cook", "poet"], 2)


@pytest.mark.parametrize("labels", [b"", b'{max_lora="-1"}', b'{max_lora="9",running_lora_adapters="'])
def test_a_strange_series_of_adapters_names_none(labels: bytes) -> None:
    load = scan(b"vllm:num_requests_running 2\nvllm:lora_requests_info" + labels + b" 1\n", "u", 1.0, 0)
    assert load is not None
    assert load.adapters == frozenset()


# A page of SGLang 0.5.23 (one engine on a CPU), without the labels that nobody reads.
SGLANG = b"""# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:startup_time_seconds{engine_type="unified",model_name="tiny",phase="load_weight"} 0.0648038049985189
sglang:http_requests_total{endpoint="/v1/completions",method="POST"} 1.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="false",model_name="tiny"} 33.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="true",model_name="tiny"} 12.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="false",model_name="tiny"} 14.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="true",model_name="tiny"} 6.0
sglang:num_retracted_reqs{model_name="tiny",moe_ep_rank="0",pid="19532",pp_rank="0",tp_rank="0"} 0.0
sglang:max_total_num_tokens{model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 8192.0
sglang:page_size{model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 32.0
sglang:num_running_reqs{model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 3.0
sglang:num_queue_reqs{model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 1.0
sglang:token_usage{model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.25
sglang:full_token_usage{model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.5
sglang:fwd_occupancy{model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} NaN
sglang:realtime_tokens_total{mode="prefill_compute",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 46.0
sglang:realtime_tokens_total{mode="decode",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 17.0
sglang:time_to_first_token_seconds_count{is_streaming="true",model_name="tiny"} 1.0
"""


def test_a_page_of_sglang_is_read() -> None:
    expected = Load("u", 1.0, 3, 1, 0.25, kv_tokens=8192, progress=128.0)
    assert scan(SGLANG, "u", 1.0, 0) == expected


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
    ranks = tuple(RankLoad(rank, 2) for rank in range(3))
    assert scan(body, "u", 1.0, 0) == Load("u", 1.0, running=6, kv_use=0.2, ranks=ranks)


def test_ranks_that_share_their_work_count_once() -> None:
    """Each rank of a tensor-parallel group shows the group's requests, and data-parallel groups their own."""
    lines = [
        f'sglang:num_running_reqs{{dp_rank="{dp}",model_name="m",tp_rank="{tp}",pp_rank="0"}} {dp + 2}\n'
        for dp, tp in ((0, 0), (0, 1), (1, 2), (1, 3))
    ]
    ranks = RankLoad(0, 2), RankLoad(1, 3)
    assert scan("".join(lines).encode(), "u", 1.0, 0) == Load("u", 1.0, running=5, ranks=ranks)


TRITON = b"""nv_inference_request_success{model="llm",version="1"} 5
nv_inference_request_failure{model="llm",reason="OTHER",version="1"} 3
nv_inference_count{model="llm",version="1"} 5
nv_inference_exec_count{model="llm",version="1"} 4
nv_inference_pending_request_count{model="llm",version="1"} 2
nv_inference_pending_request_count{model="other",version="1"} 1
nv_cpu_utilization 0.03
"""
TRITON_TRT_LLM = b"""nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 9
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 4
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 3
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 600
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.5
nv_trt_llm_general_metrics{general_type="iteration_counter",model="tensorrt_llm",version="1"} 77
nv_trt_llm_general_metrics{general_type="timestamp",model="tensorrt_llm",version="1"} 1700074049
"""
TRT_LLM = b"""trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 3.0
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 1.0
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.62
trtllm_generation_tokens_total{engine_type="trtllm",model_name="m"} 40.0
"""
LLAMA_CPP = b"""# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 46
# HELP llamacpp:tokens_predicted_total Number of generation tokens processed
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 659
# HELP llamacpp:tokens_predicted_seconds_total Total time spent generating tokens
# TYPE llamacpp:tokens_predicted_seconds_total counter
llamacpp:tokens_predicted_seconds_total 0.107457
# HELP llamacpp:n_decode_total Total number of llama_decode() calls, excluding speculative decoding
# TYPE llamacpp:n_decode_total counter
llamacpp:n_decode_total 1126
# HELP llamacpp:requests_processing Number of requests processing
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# HELP llamacpp:requests_deferred Number of requests deferred
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 1
# HELP llamacpp:n_busy_slots_per_decode Average number of busy slots per llama_decode() call
# TYPE llamacpp:n_busy_slots_per_decode gauge
llamacpp:n_busy_slots_per_decode 1.41474
"""


def test_the_numbers_of_llama_cpp_are_read() -> None:
    """One of its counters moves with every step. Its server no longer says how full its cache is."""
    assert scan(LLAMA_CPP, "u", 1.0, 0) == Load("u", 1.0, 2, 1, progress=1831.0, sighted=True)
    older = LLAMA_CPP + b"llamacpp:kv_cache_usage_ratio 0.25\n"
    assert scan(older, "u", 1.0, 0) == Load("u", 1.0, 2, 1, 0.25, progress=1831.0, sighted=True)


@pytest.mark.parametrize(
    ("body", "load"),
    [
        (TRITON, Load("u", 1.0, waiting=3, progress=14.0)),
        (TRITON_TRT_LLM, Load("u", 1.0, 4, 3, 0.5, progress=77.0)),
        (TRT_LLM, Load("u", 1.0, 3, 1, 0.62, progress=40.0)),
    ],
    ids=["triton", "triton with trt-llm", "trt-llm"],
)
def test_the_numbers_of_nvidia_s_engines_are_read(body: bytes, load: Load) -> None:
    """Families are told apart by a label. Their counters do not move with every step."""
    assert scan(body, "u", 1.0, 0) == load


@pytest.mark.parametrize(
    ("engine", "metrics_url", "target"),
    [
        ("", "", "/metrics"),
        ("vllm", "", "/metrics"),
        ("sglang", "", "/metrics"),
        ("trtllm", "", "/prometheus/metrics"),
        ("llamacpp", "", "/metrics"),
        ("triton", "", "http://u:8002/metrics"),
        ("triton", "http://u:9002/metrics", "http://u:9002/metrics"),
        ("vllm", "http://u/stats", "/stats"),
        ("vllm", "http://side:9000", "http://side:9000/metrics"),
    ],
)
def test_each_engine_is_asked_where_it_shows_them(engine: str, metrics_url: str, target: str) -> None:
    """Where the operator says, if he does."""
    context = FakePatient(lambda _: reply(404), unit=Unit("u", "c", "http://u", metrics_url=metrics_url))
    context.engine = engine
    look(EngineMetrics(), context)
    assert [asked.target for asked in context.asked] == [target]


def test_a_unit_that_became_another_engine_is_asked_at_once() -> None:
    """That the other one had no metrics says nothing."""
    context = FakePatient(lambda _: reply(404), engine="vllm")
    for _ in range(3):
        look(EngineMetrics(), context)
    context.engine = "triton"
    assert EngineMetrics().due_at(context, 100.0) == 101.0


def test_processes_that_take_turns_behind_one_address_are_no_restarts() -> None:
    """The youngest is the epoch; only a younger one is another."""
    births = [b"100.5", b"101", b"100.5", b"101", b"1.0e2", b"102"]
    context = FakePatient(lambda _: reply(200, b"vllm:num_requests_running 0\n" + born))
    epochs = []
    for birth in births:
        born = b"process_start_time_seconds " + birth
        [load] = look(EngineMetrics(), context)
        assert isinstance(load, Load)
        epochs.append(load.epoch)
    assert epochs == ["100.5", "101", "101", "101", "101", "102"]


@pytest.mark.parametrize(
    ("page", "kv_tokens"),
    [
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",engine="0"} 1', 16_000),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1', 0),
        ("sglang:max_total_num_tokens 123456", 123_456),
        ("", 0),
    ],
)
def test_the_size_of_the_kv_cache_is_read(page: str, kv_tokens: int) -> None:
    load = scan(f"vllm:num_requests_running 0\n{page}\n".encode(), "u", 1.0, 0)
    assert load is not None
    assert load.kv_tokens == kv_tokens


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "many", "1e999"])
def test_a_value_that_is_no_number_is_passed_over(value: str) -> None:
    """It must not reach a sum."""
    body = f"vllm:num_requests_waiting 1\nvllm:num_requests_running {value}\n".encode()
    assert scan(body, "u", 1.0, 0) == Load("u", 1.0, waiting=1)


def test_numbers_that_add_up_to_infinity_are_passed_over() -> None:
    """Each alone is finite; together they are not, and an int of that is an exception each second."""
    body = b"vllm:num_requests_running 2\n" + b"".join(
        b'vllm:num_requests_running{engine="%d"} 1e308\nvllm:num_requests_waiting{engine="%d"} 4e15\n'
        % (i, i)
        for i in range(3)
    )
    ranks = tuple(RankLoad(rank, 0, 4 * 10**15) for rank in range(3))
    assert scan(body, "u", 1.0, 0) == Load("u", 1.0, running=2, waiting=2**53, ranks=ranks)


def test_a_cache_is_never_more_than_full() -> None:
    body = b"vllm:num_requests_running 0\nvllm:kv_cache_usage_perc 1e15\n"
    assert scan(body, "u", 1.0, 0) == Load("u", 1.0, kv_use=1.0)


def test_a_timestamp_after_the_value_is_not_taken_for_it() -> None:
    """The format allows one."""
    assert scan(b"vllm:num_requests_running 2 1700000000000\n", "u", 1.0, 0) == Load("u", 1.0, running=2)


@pytest.mark.parametrize("answer", [reply(404), reply(200, b"go_goroutines 9\n"), reply(503, VLLM)])
def test_a_unit_without_metrics_is_left_alone_for_a_while(answer: Answer) -> None:
    """No finding; after three such looks asked again each half minute."""
    context = FakePatient(lambda _: answer)
    due = []
    for _ in range(4):
        assert look(EngineMetrics(), context) == []
        due.append(EngineMetrics().due_at(context, 100.0))
    assert due == [101.0, 101.0, 130.0, 130.0]


def test_metrics_that_appear_later_are_read_each_second_again() -> None:
    """The back-off ends with the first success."""
    context = FakePatient(lambda _: reply(404))
    for _ in range(3):
        look(EngineMetrics(), context)
    context.answer = lambda _: reply(200, VLLM)
    look(EngineMetrics(), context)
    context.answer = lambda _: reply(503)
    look(EngineMetrics(), context)
    assert EngineMetrics().due_at(context, 100.0) == 101.0


@pytest.mark.parametrize("trouble", Trouble)
def test_a_lost_reply_is_no_finding_and_no_reason_to_back_off(trouble: Trouble) -> None:
    """The unit may be restarting: its next epoch must be seen soon."""
    context = FakePatient(lambda _: trouble)
    assert look(EngineMetrics(), context) == []
    assert EngineMetrics().due_at(context, 100.0) == 101.0


# Finding the lines that are wanted where they were the last time.

WANTED = re.compile(rb"\n(a|b|ab)(?:\{([^\n]*)\})? ([^ \n]+)")


def found(lines: SampleLines, page: bytes) -> list[tuple[bytes | None, ...]]:
    """Names, labels and values of the lines that are wanted."""
    return [match.groups() for match in lines.of(page)]


def in_full(page: bytes) -> list[tuple[bytes | None, ...]]:
    """The same, looking at all lines."""
    return [match.groups() for match in WANTED.finditer(b"\n" + page)]


def test_the_same_page_with_other_values() -> None:
    lines = SampleLines(WANTED)
    for value in range(3 * ALL_EVERY):
        page = b'# HELP\nx 1\na{e="0"} %d\na{e="1"} 2 17\nay 3\nab 4\nb{} 5\nb\nz 1\n' % value
        assert found(lines, page) == in_full(page)


def test_a_series_more_is_seen_at_once() -> None:
    lines = SampleLines(WANTED)
    found(lines, b'a{e="0"} 1\nb 2\n')
    assert found(lines, b'a{e="0"} 1\na{e="1"} 1\nb 2') == in_full(b'a{e="0"} 1\na{e="1"} 1\nb 2')


def test_a_metric_less_is_seen_at_once() -> None:
    lines = SampleLines(WANTED)
    found(lines, b"a 1\nb 2\n")
    assert found(lines, b"a 1\n") == in_full(b"a 1\n")


def test_a_metric_more_is_seen_soon() -> None:
    lines = SampleLines(WANTED)
    found(lines, b"a 1\n")
    seen = [len(found(lines, b"a 1\nb 2\n")) for _ in range(ALL_EVERY)]
    assert seen == [1] * (ALL_EVERY - 1) + [2]


def test_a_page_in_disorder_is_always_looked_at_in_full() -> None:
    """Else some of its counters would be missed now and then, and their return taken for progress."""
    lines = SampleLines(WANTED)
    page = b"a 1\nb 2\na 3\n"
    assert [found(lines, page) for _ in range(2 * ALL_EVERY)] == [in_full(page)] * 2 * ALL_EVERY


def test_any_pages_that_keep_their_order() -> None:
    rng = random.Random(5)
    names = [b"a", b"ab", b"abc", b"b", b"c"]
    for _ in range(200):
        shape = [(name, rng.randrange(3)) for name in rng.sample(names, rng.randrange(1, 6))]
        lines = SampleLines(WANTED)
        for _ in range(5):
            rows = [
                b'%b{n="%d"} %d' % (name, n, rng.randrange(9)) for name, times in shape for n in range(times)
            ]
            page = b"\n".join(rows)
            assert found(lines, page) == in_full(page)
