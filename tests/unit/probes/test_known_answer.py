"""The known prompt: who is asked, when, and what is read of the answers of each engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from cellgate.probes.base import Reply, Trouble
from cellgate.probes.known_answer import FRESH_S, PROMPT, TOKENS, KnownAnswer
from cellgate.router.nouns import Answered, AnswerToken, Built, Load, Unit, Urgency, Verdict
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


@pytest.mark.parametrize("choice", [OF_COMPLETIONS, OF_CHAT], ids=["completions", "chat"])
def test_tokens_and_log_probabilities_are_read_in_both_forms(choice: dict[str, Any]) -> None:
    assert tokens(well(says(choice))) == READ


def test_llama_cpp_answers_completions_in_the_form_of_chat() -> None:
    choice = {"text": " old Rome", "logprobs": OF_CHAT["logprobs"]}
    context = well(says(choice), engine="llamacpp")
    assert tokens(context) == READ
    assert orjson.loads(context.asked[0].body)["cache_prompt"] is False


def test_without_log_probabilities_the_text_is_one_token() -> None:
    assert tokens(well(says({"text": " old Rome", "logprobs": None}))) == (AnswerToken(" old Rome"),)


def test_a_number_that_is_none_is_not_a_number() -> None:
    logprobs = {"tokens": ["!"], "token_logprobs": [None], "top_logprobs": [{"!": None}]}
    found = tokens(well(says({"text": "!", "logprobs": logprobs})))
    assert found is not None
    assert found[0].logprob is not None
    assert math.isnan(found[0].logprob)


def test_the_request_is_always_the_same() -> None:
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


def test_chat_is_asked_where_completions_are_not_served() -> None:
    def answer(path: str) -> Reply:
        choice = {"choices": [OF_CHAT]}
        return reply(404) if path == "/v1/completions" else reply(200, orjson.dumps(choice))

    assert tokens(well(answer)) == READ


def test_the_fingerprint_comes_before_the_answer() -> None:
    found = look(PROBE, well(says(OF_COMPLETIONS, system_fingerprint="vllm-1-abc")))
    assert [type(each) for each in found] == [Built, Answered]
    assert isinstance(found[0], Built)
    assert found[0].build.fingerprint == "vllm-1-abc"


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


def test_a_silent_unit_is_not_asked_because_it_may_hang() -> None:
    assert tokens(well(says(OF_COMPLETIONS), progress_at=100.0 - FRESH_S - 0.1)) is None


def test_one_that_ran_out_of_time_lets_the_next_explain_nothing() -> None:
    context = well(lambda _: Trouble.TIMEOUT)
    for _ in range(2):
        context.progress_at = context.now_s
        look(PROBE, context)
    assert context.occupied == [110.0, 0.0, 0.0]
    context.progress_at, context.answer = context.now_s, says(OF_COMPLETIONS)
    assert tokens(context) == READ
    assert tokens(context) == READ
    assert context.occupied[-2:] == [context.now_s, context.now_s], "it takes no time here"


def test_a_busy_unit_is_asked_when_its_numbers_are_in_doubt() -> None:
    assert tokens(well(says(OF_COMPLETIONS), in_flight=3, urgency=Urgency.NOW)) == READ
    assert tokens(well(says(OF_COMPLETIONS), in_flight=3, urgency=Urgency.SOON)) is None


def test_a_unit_that_is_down_is_asked_when_its_answers_are_why() -> None:
    assert tokens(well(says(OF_COMPLETIONS), verdict=Verdict.DOWN, urgency=Urgency.SOON)) == READ


def test_a_unit_that_does_not_serve_them_is_left_alone() -> None:
    context = well(lambda _: reply(404))
    assert look(PROBE, context) == []
    assert PROBE.due_at(context, 100.0) == 100.0 + PROBE.absent_s


@pytest.mark.parametrize("answer", [reply(503), reply(429), Trouble.TIMEOUT, Trouble.REFUSED])
def test_no_answer_is_no_finding_and_is_tried_again(answer: Answer) -> None:
    context = well(lambda _: answer)
    assert look(PROBE, context) == []
    assert PROBE.due_at(context, 100.0) == 100.0 + PROBE.retry_s


def test_an_error_of_a_unit_that_has_answered_before_is_an_answer_without_tokens() -> None:
    context = well(says(OF_COMPLETIONS))
    assert tokens(context) == READ
    context.answer = lambda _: reply(500)
    assert tokens(context) == ()
    assert tokens(well(lambda _: reply(500))) is None
