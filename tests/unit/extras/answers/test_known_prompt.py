"""The known prompt: who is asked, when, and what is read of the answers of each engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from cellgate.extras.answers.known_answer import KNOWN_PROMPT_FRESH_S, PROMPT, TOKENS, KnownAnswer
from cellgate.probes.base import Reply, Trouble
from cellgate.router.nouns import (
    Answered,
    AnswerToken,
    Built,
    Load,
    Unit,
    Urgency,
    Verdict,
)
from tests.patient import Answer, FakePatient, look, reply

PROBE = KnownAnswer()
OF_COMPLETIONS = {
    "text": " old Rome",
    "logprobs": {
        "tokens": [" old", " Rome"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{" old": -0.5, " new": -2.0}, {" Rome": -1.0, " York": -1.25}],
    },
}
OF_CHAT = {
    "message": {"content": " old Rome"},
    "logprobs": {
        "content": [
            {"token": token, "logprob": own, "top_logprobs": [{"token": other, "logprob": next_one}]}
            for token, own, other, next_one in ((" old", -0.5, " new", -2.0), (" Rome", -1.0, " York", -1.25))
        ]
    },
}
READ = (AnswerToken(" old", -0.5, ((" new", -2.0),)), AnswerToken(" Rome", -1.0, ((" York", -1.25),)))


def says(choice: dict[str, Any], **more: Any) -> Callable[[str], Answer]:
    return lambda _: reply(200, orjson.dumps({"choices": [choice], **more}))


def well(answer: Callable[[str], Answer], **state: Any) -> FakePatient:
    """A unit that has just shown life."""
    return FakePatient(answer, **{"progress_at": 99.0, **state})


def tokens(context: FakePatient) -> tuple[AnswerToken, ...] | None:
    found = [each for each in look(PROBE, context) if isinstance(each, Answered)]
    return found[0].tokens if found else None


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        (OF_COMPLETIONS, READ),
        (OF_CHAT, READ),
        ({"text": " old Rome", "logprobs": OF_CHAT["logprobs"]}, READ),
        ({"text": " old Rome", "logprobs": None}, (AnswerToken(" old Rome"),)),
    ],
    ids=["completions", "chat", "llama.cpp: completions in the form of chat", "no log probabilities"],
)
def test_tokens_and_log_probabilities_are_read_in_all_forms(
    choice: dict[str, Any], read: tuple[AnswerToken, ...]
) -> None:
    context = well(says(choice), engine="llamacpp")
    assert tokens(context) == tokens(well(says(choice))) == read
    assert orjson.loads(context.asked[0].body)["cache_prompt"] is False


def test_a_number_that_is_none_is_not_a_number() -> None:
    logprobs = {"tokens": ["!"], "token_logprobs": [None], "top_logprobs": [{"!": None}]}
    found = tokens(well(says({"text": "!", "logprobs": logprobs})))
    assert found is not None
    assert found[0].logprob is not None
    assert math.isnan(found[0].logprob)


def test_the_request_is_always_the_same_and_the_fingerprint_comes_before_the_answer() -> None:
    context = well(says(OF_COMPLETIONS))
    assert tokens(context) == tokens(context)
    first, second = context.asked
    assert first.body == second.body
    assert orjson.loads(first.body) == {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "seed": 0,
        "logprobs": 5,
    }
    assert first.request_id.startswith("cellgate-canary-known-")
    found = look(PROBE, well(says(OF_COMPLETIONS, system_fingerprint="vllm-1-abc")))
    assert [type(each) for each in found] == [Built, Answered]
    assert isinstance(found[0], Built)
    assert found[0].build.fingerprint == "vllm-1-abc"


def test_chat_is_asked_where_completions_are_not_served() -> None:
    def answer(path: str) -> Reply:
        choice = {"choices": [OF_CHAT]}
        return reply(404) if path == "/v1/completions" else reply(200, orjson.dumps(choice))

    assert tokens(well(answer)) == READ


@pytest.mark.parametrize(
    "state",
    [
        {"in_flight": 1},
        {"load": Load("u", 99.0, running=1)},
        {"verdict": Verdict.DOWN},
        {"verdict": Verdict.STARTING},
        {"is_on_hold": True},
        {"unit": Unit("u", "c", "http://u", canary="embeddings")},
        {"engine": "triton"},
    ],
)
def test_only_idle_usable_units_that_generate_are_asked(state: dict[str, Any]) -> None:
    context = well(says(OF_COMPLETIONS), **state)
    assert look(PROBE, context) == []
    assert context.asked == []
    assert PROBE.due_at(context, 100.0) == 100.0 + PROBE.retry_s


@pytest.mark.parametrize(
    ("state", "read"),
    [
        ({"progress_at": 100.0 - KNOWN_PROMPT_FRESH_S - 0.1}, None),
        ({"in_flight": 3, "urgency": Urgency.NOW}, READ),
        ({"in_flight": 3, "urgency": Urgency.SOON}, None),
        ({"verdict": Verdict.DOWN, "urgency": Urgency.SOON}, READ),
    ],
    ids=["silent: it may hang", "its numbers are in doubt", "busy", "down because of its answers"],
)
def test_who_is_asked_depends_on_why(state: dict[str, Any], read: tuple[AnswerToken, ...] | None) -> None:
    assert tokens(well(says(OF_COMPLETIONS), **state)) == read


def test_one_that_ran_out_of_time_lets_the_next_explain_nothing() -> None:
    """An error of a unit that has answered before is an answer without tokens."""
    context = well(lambda _: Trouble.TIMEOUT)
    for _ in range(2):
        context.progress_at = context.now_s
        look(PROBE, context)
    assert context.occupied == [110.0, 0.0, 0.0]
    context.progress_at, context.answer = context.now_s, says(OF_COMPLETIONS)
    assert tokens(context) == READ
    assert tokens(context) == READ
    assert context.occupied[-2:] == [context.now_s, context.now_s], "it takes no time here"
    context = well(says(OF_COMPLETIONS))
    assert tokens(context) == READ
    context.answer = lambda _: reply(500)
    assert tokens(context) == ()
    assert tokens(well(lambda _: reply(500))) is None


@pytest.mark.parametrize("answer", [reply(404), reply(503), reply(429), Trouble.TIMEOUT, Trouble.REFUSED])
def test_no_answer_is_no_finding_and_is_tried_again(answer: Answer) -> None:
    """A unit that does not serve them is left alone for long."""
    context = well(lambda _: answer)
    assert look(PROBE, context) == []
    wait_s = PROBE.absent_s if answer == reply(404) else PROBE.retry_s
    assert PROBE.due_at(context, 100.0) == 100.0 + wait_s
