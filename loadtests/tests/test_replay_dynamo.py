"""The replay on Dynamo's workers: what is asked of them, and what is read in their answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.gym.nouns import Request
from loadtests.gym.prompts import Text
from loadtests.kit import dynamo as programs
from loadtests.replay.dynamo import Load, known_words, play_of, read, run
from loadtests.replay.plan import PlanError

EVENT = b'data: {"choices":[{"text":" w%d","index":0}],"nvext":{"worker_id":{"decode_worker_id":77}}}\n\n'
END = b'data: {"choices":[{"text":"","index":0,"finish_reason":"length"}],"usage":null}\n\n'
USAGE = (
    b'data: {"choices":[],"system_fingerprint":null,"usage":{"prompt_tokens":10,"completion_tokens":2}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def request(answer_tokens: int) -> Request:
    prompt = Text().extend(10)
    return Request(0, 0.0, prompt, prompt.extend(answer_tokens))


@pytest.mark.parametrize("load", ["zipf", "bursts", "mooncake", "agents"])
def test_prompts_are_words_of_the_model(load: str, tmp_path: Path) -> None:
    play = play_of(Load(load, 10.0), 1, 2.0)
    tokenizer = json.loads((programs.word_model(tmp_path) / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for one in play.requests:
        body = json.loads(play.bodies[one])
        words = body["prompt"].split()
        assert len(words) == one.prompt.tokens
        assert set(words) <= vocabulary.keys()
        assert body["nvext"] == {"extra_fields": ["worker_id"]}


def test_what_is_for_the_gym_alone_is_told() -> None:
    with pytest.raises(PlanError, match="deadlines"):
        play_of(Load("deadlines", 10.0), 1, 2.0)


def test_words_are_told_apart_by_where_they_stand() -> None:
    assert known_words(3, 100, 0) == known_words(3, 100, 500)
    assert known_words(3, 64, 0) != known_words(4, 64, 0)
    assert 4 * 100 < len(known_words(3, 100, 0)) <= 5 * 100


def test_an_answer_is_whole_with_any_words_and_tells_its_worker() -> None:
    whole = EVENT % 1309 + EVENT % 1536 + END + USAGE + DONE
    usage = {"prompt_tokens": 10, "completion_tokens": 2}
    assert read(whole, request(2), {"77": "unit-1"}) == ("", usage, "unit-1")
    assert read(whole, request(3), {})[0] == "2 tokens for 3"
    assert read(EVENT % 1309 + END, request(1), {})[0].startswith("broken off")


def test_who_does_not_tell_its_worker_has_none() -> None:
    assert (
        read(b'data: {"choices":[{"text":" w5"}]}\n\n' + USAGE + DONE, request(1), {"77": "unit-1"})[2] == ""
    )


@pytest.mark.parametrize("router", ["cellgate", "dynamo kv"])
def test_where_dynamo_is_not_installed_a_result_says_so(
    router: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_PYTHON", tmp_path / "none")
    result = run(play_of(Load("zipf", 1.0), 1, 1.0), router)
    assert result.missing == "no figures: not installed; type:  make .venv-dynamo/made"
