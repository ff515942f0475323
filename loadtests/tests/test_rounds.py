"""Drills' rounds: which requests count against the gate, and how long they waited beyond detection."""

import random

from loadtests.kit.questions import Answer, Question
from loadtests.kit.rounds import Moments, account, seconds

QUESTION = Question.draw(random.Random(1), prompt_tokens=5, max_tokens=3)


def answer(sent_at: float, first_at: float | None, ended_at: float, **fields: object) -> Answer:
    whole = {"text": QUESTION.expected(), "done": True, "status": 200}
    made = Answer(QUESTION, sent_at=sent_at)
    for name, value in ({"first_at": first_at, "ended_at": ended_at} | whole | fields).items():
        setattr(made, name, value)
    return made


def moments(fault_at: float, down_s: float | None = 1.0, up_s: float | None = 0.5) -> Moments:
    return Moments(fault_at, down_s, last_sent_s=0.1, up_s=up_s, is_healed=True, trouble=[], story=[])


BROKEN = {"text": "", "done": False, "error": "gone", "cut": "closed"}


def test_the_longest_wait_beyond_detection_is_of_a_request_that_had_shown_nothing_then() -> None:
    answers = [
        answer(9.0, 9.5, 12.0),  # It had shown a token.
        answer(10.5, 11.3, 12.0),
        answer(10.6, 11.7, 12.0),
        answer(11.1, 14.0, 15.0),  # It came after detection.
    ]
    (outcome,) = account([moments(10.0)], answers)
    assert (outcome.without_token, round(outcome.waited_s, 3), outcome.bad) == (2, 0.7, [])


def test_a_stream_may_end_with_an_error_event_when_its_unit_does_and_not_when_it_was_sent_later() -> None:
    answers = [answer(9.0, 9.5, 11.0, **BROKEN), answer(11.5, 11.6, 12.0, **BROKEN)]
    (outcome,) = account([moments(10.0)], answers)
    assert outcome.broken == 2
    assert [line.split(":")[0] for line in outcome.bad] == ["sent after detection"]


def test_a_request_without_any_answer_is_bad_whenever_it_was_sent() -> None:
    (outcome,) = account([moments(10.0)], [answer(9.0, None, 11.0, **BROKEN)])
    assert outcome.bad == [answer(9.0, None, 11.0, **BROKEN).why()]


def test_each_request_counts_for_the_fault_that_it_ended_after() -> None:
    answers = [answer(1.0, None, 2.0, **BROKEN), answer(19.0, None, 21.0, **BROKEN)]
    first, second = account([moments(10.0), moments(20.0)], answers)
    assert (len(first.bad), len(second.bad)) == (1, 1)


def test_a_unit_that_is_never_found_or_never_comes_back_fails_its_round() -> None:
    (outcome,) = account([moments(10.0, down_s=None, up_s=None)], [])
    assert len(outcome.bad) == 2


def test_figures_are_told_as_median_and_worst_and_nevers_are_not_hidden() -> None:
    assert seconds([1.0, 3.0, 2.0]) == "2.00 / 3.00"
    assert seconds([1.0, None]) == "never in 1"
