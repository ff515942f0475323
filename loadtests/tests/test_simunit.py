"""The simulated unit as real processes: what it answers."""

import json
import re
import socket

import pytest

from loadtests.simunit.process import SimUnit, SimUnitError
from loadtests.tests.simunit_stage import (
    MESSAGES,
    STEP_MS,
    OpenStream,
    call,
    chat,
    eventually,
    metric,
    text_of,
)
from loadtests.tests.simunit_stage import long_lived as long_lived
from loadtests.tests.simunit_stage import unit as unit


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


def test_what_is_held_goes_on_until_it_is_released_and_what_is_short_ends_as_ever(unit: SimUnit) -> None:
    unit.hold(over_tokens=4)
    try:
        stream = OpenStream(unit, max_tokens=5).read_until(b"\r\n\r\n")
        assert eventually(lambda: unit.state()["counts"]["generation_tokens"] > 20)
        assert unit.state()["running"] == 1
        assert len(text_of(chat(unit, max_tokens=4)).split()) == 4
        assert unit.release()["held_over"] is None
        assert stream.read_until(b"\r\n0\r\n\r\n").events[-1] == "[DONE]"
        stream.close()
    finally:
        unit.release()
    assert len(text_of(chat(unit, max_tokens=5)).split()) == 5


def test_a_length_to_hold_from_is_a_number(unit: SimUnit) -> None:
    with pytest.raises(SimUnitError, match="over_tokens must be a number of tokens, not -1"):
        unit.hold(over_tokens=-1)
