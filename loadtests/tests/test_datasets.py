"""Files of requests, in each of the formats that are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.datasets.mooncake import parse
from loadtests.datasets.nouns import DatasetError, Request
from loadtests.datasets.reading import read, read_timed
from loadtests.replay.__main__ import SAMPLE

FILES = Path(__file__).parent / "datasets"
GOOD = {"timestamp": 1500, "input_length": 1000, "output_length": 7, "hash_ids": [4, 9]}


def line(**changes: object) -> str:
    return json.dumps({name: value for name, value in (GOOD | changes).items() if value is not ...})


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_line_is_a_request() -> None:
    assert parse(line()) == Request(at_s=1.5, prompt_tokens=1000, answer_tokens=7, blocks=(4, 9))


def test_an_answer_has_a_token() -> None:
    assert parse(line(output_length=0)).answer_tokens == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{not json", "is not JSON"),
        ("[1]", "is not a JSON object"),
        (line(timestamp=...), "timestamp has to be a number"),
        (line(timestamp="now"), 'timestamp has to be a number from 0 on, found "now"'),
        (line(input_length=1.5), "input_length has to be a number"),
        (line(input_length=0, hash_ids=[]), "input_length is 0"),
        (line(output_length=-1), "output_length has to be a number from 0 on"),
        (line(output_length=True), "output_length has to be a number"),
        (line(hash_ids=...), "hash_ids has to be a list"),
        (line(hash_ids=["a", "b"]), "hash_ids has to be a list of whole numbers"),
        (line(hash_ids=[1]), "hash_ids has 1 ids; a prompt of this input_length has 2 blocks"),
    ],
)
def test_what_is_no_request_is_told_by_file_line_and_reason(tmp_path: Path, text: str, reason: str) -> None:
    path = written(tmp_path, line(timestamp=0), "", text)
    with pytest.raises(DatasetError) as failure:
        read(path, requests=10, max_tokens=2000)
    assert str(failure.value).startswith(f"{path}:3: {reason}")
    assert "\n" not in str(failure.value)


def test_time_does_not_run_backwards(tmp_path: Path) -> None:
    path = written(tmp_path, line(timestamp=20), line(timestamp=10))
    with pytest.raises(DatasetError, match=r":2: its time is 0.01 s before the line before"):
        read(path, requests=10, max_tokens=2000)


def test_a_trace_is_bounded_in_requests_and_in_length(tmp_path: Path) -> None:
    path = written(
        tmp_path, line(), line(input_length=1001), line(), line(), "nonsense beyond the last needed"
    )
    found = read(path, requests=3, max_tokens=1000)
    assert [each.prompt_tokens for each in found] == [1000, 1000, 1000]


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot be read"):
        read(tmp_path / "none", requests=1, max_tokens=1)
    with pytest.raises(DatasetError, match="holds no request of at most 1 tokens"):
        read(written(tmp_path, line()), requests=1, max_tokens=1)


def test_the_sample_is_a_trace() -> None:
    assert len(read(SAMPLE, requests=1500, max_tokens=60_000)) > 250


@pytest.mark.parametrize(
    ("name", "sizes", "at_s"),
    [
        ("mooncake.jsonl", [(40160, 6), (36640, 4), (23769, 3)], None),
        ("burstgpt.csv", [(472, 18), (1087, 230), (1360, 276)], [0, 40, 116]),
        ("azure.csv", [(374, 44), (396, 109), (879, 55)], [0, 4.314589, 4.541987]),
        ("azure2024.csv", [(2162, 5), (2399, 6)], [0, 0.007405]),
    ],
)
def test_traces_are_recognised_by_their_first_line(
    name: str, sizes: list[tuple[int, int]], at_s: list[float] | None
) -> None:
    found = read_timed(FILES / name, requests=10, max_tokens=100_000)
    assert [(each.prompt_tokens, each.answer_tokens) for each in found] == sizes
    if at_s is not None:
        assert [each.at_s for each in found] == pytest.approx(at_s, abs=1e-5)


def test_of_conversations_the_first_question_and_the_size_of_its_answer_count() -> None:
    found = read(FILES / "sharegpt.json", requests=10, max_tokens=1000)
    assert [each.text for each in found] == [
        "Why is the sky blue, and why is it red in the evening?",
        "Name three rivers.",
    ]
    assert [each.answer_tokens for each in found] == [24, 8]


def test_conversations_cannot_be_replayed_and_the_error_says_what_can() -> None:
    with pytest.raises(DatasetError, match="no times to replay; ask them with make load DATASET="):
        read_timed(FILES / "sharegpt.json", requests=10, max_tokens=1000)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "begins with '', and is none of: Mooncake"),
        ("a,b,c\n1,2,3", "begins with 'a,b,c', and is none of: Mooncake (JSON lines), BurstGPT"),
        ("[{}]", "entry 0 has neither conversations nor messages"),
        ('["a"]', "entry 0 has neither conversations nor messages"),
        ("[{", "is not JSON"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,7", "has 2 columns, the head has 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,7,7", "TIMESTAMP has to be a time, found 'now'"),
        ("Timestamp,Request tokens,Response tokens\n1,x,7", "Request tokens has to be a whole number, found"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(DatasetError) as failure:
        read(path, requests=10, max_tokens=1000)
    assert reason in str(failure.value)
    assert "\n" not in str(failure.value)


def test_requests_that_failed_when_the_trace_was_made_are_left_out() -> None:
    assert len(read(FILES / "burstgpt.csv", requests=10, max_tokens=1000)) == 1
