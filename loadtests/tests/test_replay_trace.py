"""The replay's reader of traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.replay.__main__ import SAMPLE
from loadtests.replay.trace import Request, TraceError, parse, read

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
    with pytest.raises(TraceError) as failure:
        read(path, requests=10, max_tokens=2000)
    assert str(failure.value).startswith(f"{path}:3: {reason}")
    assert "\n" not in str(failure.value)


def test_time_does_not_run_backwards(tmp_path: Path) -> None:
    path = written(tmp_path, line(timestamp=20), line(timestamp=10))
    with pytest.raises(TraceError, match=r":2: timestamp 10 is before"):
        read(path, requests=10, max_tokens=2000)


def test_a_trace_is_bounded_in_requests_and_in_length(tmp_path: Path) -> None:
    path = written(
        tmp_path, line(), line(input_length=1001), line(), line(), "nonsense beyond the last needed"
    )
    found = read(path, requests=3, max_tokens=1000)
    assert [each.prompt_tokens for each in found] == [1000, 1000, 1000]


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path / "none", requests=1, max_tokens=1)
    with pytest.raises(TraceError, match="holds no request of at most 1 tokens"):
        read(written(tmp_path, line()), requests=1, max_tokens=1)


def test_the_sample_is_a_trace() -> None:
    assert len(read(SAMPLE, requests=1500, max_tokens=60_000)) > 250
