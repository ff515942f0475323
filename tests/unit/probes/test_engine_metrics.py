"""What is read from an engine's metrics."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from cellgate.probes.base import Trouble
from cellgate.probes.engine_metrics import EngineMetrics, scan
from cellgate.probes.engines import METRICS, MetricRole
from cellgate.probes.sample_lines import ALL_EVERY, SampleLines
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
vllm:corrupted_requests_total{engine="0",model_name="tiny"} 2.0
process_start_time_seconds 1.75391e+09
"""


LABELS = {
    MetricRole.KV_SHAPE: '{block_size="16",num_gpu_blocks="9"}',
    MetricRole.ADAPTERS: '{max_lora="4",running_lora_adapters="a",waiting_lora_adapters=""}',
}


@pytest.mark.parametrize("metric", METRICS)
def test_each_metric_that_has_a_meaning_changes_what_is_known_of_a_load(metric: str) -> None:
    """One whose meaning nobody reads would be silent."""
    name, brace, labels = metric.partition("{")
    key, _, value = labels.removesuffix("}").partition("=")
    shown = f'{name}{{{key}="{value}"}}' if brace else name + LABELS.get(METRICS[metric], "")
    without = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 1\n"
    assert scan(without + f"{shown} 7\n".encode(), "u", 1.0, 0) != scan(without, "u", 1.0, 0)


def test_the_numbers_of_vllm_are_read() -> None:
    """A crowd that came between the question and the numbers is no work of others."""
    expected = Load(
        "u",
        100.0,
        3,
        2,
        0.25,
        own_in_flight=1,
        progress=1270.0,
        sighted=True,
        epoch="1.75391e+09",
        corrupted=2.0,
    )
    assert look(EngineMetrics(), FakePatient(lambda _: reply(200, VLLM), in_flight=1)) == [expected]
    context = FakePatient(lambda _: reply(200, VLLM), in_flight=0)

    def crowded(_: str) -> Answer:
        context.in_flight = 5
        return reply(200, VLLM)

    context.answer = crowded
    (load,) = look(EngineMetrics(), context)
    assert isinstance(load, Load)
    assert (load.running + load.waiting, load.foreign) == (5, 0)


@pytest.mark.parametrize(
    ("lines", "load"),
    [
        ("vllm:gpu_cache_usage_perc 0.5", Load("u", 1.0, kv_use=0.5)),
        ("vllm:kv_cache_usage_perc 1e15", Load("u", 1.0, kv_use=1.0)),
        ("vllm:num_requests_running 2 1700000000000", Load("u", 1.0, running=2)),
        *(
            (f"vllm:num_requests_running {odd}", Load("u", 1.0))
            for odd in ("NaN", "+Inf", "-1", "many", "1e999")
        ),
    ],
)
def test_strange_numbers_of_vllm(lines: str, load: Load) -> None:
    """An old name, a cache more than full, a timestamp; what is no number must not reach a sum."""
    assert scan(f"vllm:num_requests_waiting 1\n{lines}\n".encode(), "u", 1.0, 0) == replace(load, waiting=1)


def read(page: str) -> Load:
    load = scan(page.encode(), "u", 1.0, 0)
    assert load is not None
    return load


def test_data_parallel_ranks_are_told_apart_once_all_are_shown() -> None:
    """They are summed, and the fullest cache counts. Ranks that share work all show it: it counts once."""
    page = (
        '\nvllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 1\n'
        'vllm:num_requests_waiting{engine="0"} 2\nvllm:iteration_tokens_total_count{engine="1"} 70\n'
    )
    load = read(page)
    assert load.ranks == (RankLoad(0, 3, 2, 0.0), RankLoad(1, 1, 0, 70.0))
    assert (load.running, load.waiting) == (4, 2)
    assert [read(page.replace('"1"', f'"{other}"')).ranks for other in "20x"] == [(), (), ()]
    page = "".join(
        f'vllm:num_requests_running{{engine="{i}"}} 2\nvllm:kv_cache_usage_perc{{engine="{i}"}} 0.{i}\n'
        for i in range(3)
    )
    ranks: tuple[RankLoad, ...] = tuple(RankLoad(rank, 2) for rank in range(3))
    assert read(page) == Load("u", 1.0, running=6, kv_use=0.2, ranks=ranks)
    page = "".join(
        f'sglang:num_running_reqs{{dp_rank="{dp}",model_name="m",tp_rank="{tp}",pp_rank="0"}} {dp + 2}\n'
        for dp, tp in ((0, 0), (0, 1), (1, 2), (1, 3))
    )
    assert read(page) == Load("u", 1.0, running=5, ranks=(RankLoad(0, 2), RankLoad(1, 3)))


def test_the_lora_adapters_in_use_are_read_from_the_latest_series() -> None:
    """vLLM keeps a series for each combination that it has had; its value is when that was."""
    series = (
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="%s",waiting_lora_adapters="%s"} %s\n'
    )
    rows = (("", "", "1.7e+09"), ("poet,clerk", "cook", "1.72e+09"), ("poet", "", "1.71e+09"))
    load = read("vllm:num_requests_running 2\n" + "".join(series % row for row in rows))
    assert (sorted(load.adapters), load.adapter_places) == (["clerk", "cook", "poet"], 2)
    for labels in ("", '{max_lora="-1"}', '{max_lora="9",running_lora_adapters="'):
        load = read(f"vllm:num_requests_running 2\nvllm:lora_requests_info{labels} 1\n")
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
sglang:forward_execution_seconds_total{forward_mode="decode",pp_rank="0",tp_rank="0"} 0.5
sglang:time_to_first_token_seconds_count{is_streaming="true",model_name="tiny"} 1.0
"""


def test_a_page_of_sglang_is_read_under_both_prefixes() -> None:
    """The colon became an underscore."""
    expected = Load("u", 1.0, 3, 1, 0.25, kv_tokens=8192, progress=128.5)
    for page in (SGLANG, SGLANG.replace(b"sglang:", b"sglang_")):
        assert scan(page, "u", 1.0, 0) == expected


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
trtllm_prompt_tokens_total{engine_type="trtllm",model_name="m"} 10.0
trtllm_kv_cache_gen_alloc_blocks_total{engine_type="trtllm",model_name="m"} 5.0
"""
LLAMA_CPP = b"""# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 46
llamacpp:tokens_predicted_total 659
llamacpp:tokens_predicted_seconds_total 0.107457
llamacpp:n_decode_total 1126
# HELP llamacpp:requests_processing Number of requests processing
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
llamacpp:requests_deferred 1
llamacpp:n_busy_slots_per_decode 1.41474
"""


@pytest.mark.parametrize(
    ("body", "load"),
    [
        (TRITON, Load("u", 1.0, waiting=3, progress=14.0)),
        (TRITON_TRT_LLM, Load("u", 1.0, 4, 3, 0.5, progress=77.0)),
        (TRT_LLM, Load("u", 1.0, 3, 1, 0.62, progress=55.0)),
        (LLAMA_CPP, Load("u", 1.0, 2, 1, progress=1831.0, sighted=True)),
        (
            LLAMA_CPP + b"llamacpp:kv_cache_usage_ratio 0.25\n",
            Load("u", 1.0, 2, 1, 0.25, progress=1831.0, sighted=True),
        ),
    ],
    ids=["triton", "triton with trt-llm", "trt-llm", "llama.cpp", "an older one, which tells of its cache"],
)
def test_the_numbers_of_other_engines_are_read(body: bytes, load: Load) -> None:
    """NVIDIA's tell families apart by a label; only a counter of llama.cpp moves with every step."""
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


def test_a_unit_that_became_another_engine_is_asked_at_once_and_processes_in_turns_are_no_restarts() -> None:
    """That the other had no metrics says nothing. The youngest is the epoch; only a younger one is new."""
    context = FakePatient(lambda _: reply(404), engine="vllm")
    for _ in range(3):
        look(EngineMetrics(), context)
    context.engine = "triton"
    assert EngineMetrics().due_at(context, 100.0) == 101.0
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
    assert read(f"vllm:num_requests_running 0\n{page}\n").kv_tokens == kv_tokens


def test_numbers_that_add_up_to_infinity_are_passed_over() -> None:
    """Each alone is finite; together they are not, and an int of that is an exception each second."""
    body = b"vllm:num_requests_running 2\n" + b"".join(
        b'vllm:num_requests_running{engine="%d"} 1e308\nvllm:num_requests_waiting{engine="%d"} 4e15\n'
        % (i, i)
        for i in range(3)
    )
    ranks = tuple(RankLoad(rank, 0, 4 * 10**15) for rank in range(3))
    assert scan(body, "u", 1.0, 0) == Load("u", 1.0, running=2, waiting=2**53, ranks=ranks)


@pytest.mark.parametrize("answer", [reply(404), reply(200, b"go_goroutines 9\n"), reply(503, VLLM)])
def test_a_unit_without_metrics_is_left_alone_for_a_while(answer: Answer) -> None:
    """No finding; after three such looks asked again each half minute, until the first success."""
    context = FakePatient(lambda _: answer)
    due = []
    for _ in range(4):
        assert look(EngineMetrics(), context) == []
        due.append(EngineMetrics().due_at(context, 100.0))
    assert due == [101.0, 101.0, 130.0, 130.0]
    context.answer = lambda _: reply(200, VLLM)
    look(EngineMetrics(), context)
    context.answer = lambda _: answer
    look(EngineMetrics(), context)
    assert EngineMetrics().due_at(context, 100.0) == 101.0


def test_a_unit_of_many_that_works_for_this_gate_alone_and_shows_that_is_asked_less() -> None:
    well = Load("u", 99.5, running=1, waiting=0, kv_use=0.1, own_in_flight=1)
    context = FakePatient(lambda _: reply(200), in_flight=1, load=well, progress_at=99.8)
    assert EngineMetrics().due_at(context, 100.0) == 101.0
    context.is_of_many = True
    assert EngineMetrics().due_at(context, 100.0) == 103.0
    for other in ({"running": 2}, {"waiting": 1}, {"kv_use": 0.6}):
        context.load = replace(well, **other)
        assert EngineMetrics().due_at(context, 100.0) == 101.0
    context.load, context.progress_at = well, 98.0
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


def test_a_page_that_changes_is_seen_at_once_and_a_metric_more_soon() -> None:
    """The same with other values, a series more, a metric less."""
    lines = SampleLines(WANTED)
    for value in range(3 * ALL_EVERY):
        page = b'# HELP\nx 1\na{e="0"} %d\na{e="1"} 2 17\nay 3\nab 4\nb{} 5\nb\nz 1\n' % value
        assert found(lines, page) == in_full(page)
    lines = SampleLines(WANTED)
    for page in (b'a{e="0"} 1\nb 2\n', b'a{e="0"} 1\na{e="1"} 1\nb 2'):
        assert found(lines, page) == in_full(page)
    lines = SampleLines(WANTED)
    for page in (b"a 1\nb 2\n", b"a 1\n"):
        assert found(lines, page) == in_full(page)
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
