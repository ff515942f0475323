"""When the canary flies, what it asks, and what its fate proves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from cellgate.probes.base import Reply, Trouble
from cellgate.probes.canary import BLIND_IDLE, REFUSED_MAX_S, Canary, canary_timeout_s, late_at
from cellgate.router.judge import CANARY_SOURCE
from cellgate.router.nouns import Evidence, Load, Models, Rules, Served, Sign, Strength, Unit, Use, Verdict
from tests.patient import Answer, FakePatient, look, reply

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TOKEN = reply(200, b'{"choices": [{"message": {"content": "x"}}], "usage": {}}')
RULES = Rules(canary_idle_s=2.0, canary_timeout_s=2.5, warm_up_timeout_s=60.0)
SIGHTED = Load("u", 99.0, running=1, progress=5.0, sighted=True)


def fly(context: FakePatient) -> Evidence:
    """One canary that brings evidence only."""
    [evidence] = look(Canary(), context)
    assert isinstance(evidence, Evidence)
    return evidence


def serves(*paths: str) -> Callable[[str], Answer]:
    """A unit that answers these paths and knows no other."""
    return lambda target: TOKEN if target in paths else reply(404)


def test_each_data_parallel_rank_is_asked_in_turn() -> None:
    context = FakePatient(lambda _: TOKEN, ranks=2)
    for _ in range(3):
        fly(context)
    assert [asked.rank for asked in context.asked] == [0, 1, 0]


def test_a_rank_that_does_not_answer_is_asked_again_and_not_the_next() -> None:
    context = FakePatient(lambda _: Trouble.TIMEOUT, ranks=2)
    for _ in range(2):
        fly(context)
    assert {asked.rank for asked in context.asked} == {0}


@pytest.mark.parametrize("answer", [TOKEN, Trouble.REFUSED, reply(500)])
def test_what_the_process_before_has_answered_proves_nothing_of_the_next(answer: Answer) -> None:
    def restarts(_: str) -> Answer:
        context.restarted = ("engine_metrics", 100.0)
        return answer

    context = FakePatient(restarts)
    assert fly(context).sign is Sign.NEUTRAL


def test_a_rank_that_stalls_is_asked_first() -> None:
    context = FakePatient(lambda _: TOKEN, ranks=4, stalled_rank=2)
    fly(context)
    assert [asked.rank for asked in context.asked] == [2]


def test_an_engine_with_one_scheduler_is_asked_without_a_rank() -> None:
    context = FakePatient(lambda _: TOKEN)
    fly(context)
    assert [asked.rank for asked in context.asked] == [None]


def test_a_lora_adapter_is_never_asked() -> None:
    """It would take the place of one that clients use. Adapters may come first in the list."""
    listed = reply(200, b'{"data": [{"id": "a", "parent": "base"}, {"id": "base"}]}')
    context = FakePatient(lambda target: listed if target == "/v1/models" else TOKEN, models=frozenset())
    look(Canary(), context)
    assert b'"base"' in context.asked[-1].body


def test_its_evidence_carries_the_name_that_the_judge_knows() -> None:
    """The judge tells canaries from other evidence by it."""
    assert fly(FakePatient(lambda _: TOKEN)).source == CANARY_SOURCE


@pytest.mark.parametrize(
    ("answer", "sign"),
    [
        (TOKEN, Sign.GOOD),
        (reply(200, b'{"choices": []}'), Sign.BAD),
        (reply(200, b'{"error": {"message": "dead"}, "choices": [{}]}'), Sign.BAD),
        (reply(200, b"<html>"), Sign.BAD),
        (reply(200, b""), Sign.BAD),
        (reply(500, b'{"error": {"message": "EngineDeadError"}}'), Sign.BAD),
        (reply(502), Sign.BAD),
        (reply(429), Sign.NEUTRAL),
        (reply(503), Sign.NEUTRAL),
        (reply(401), Sign.BAD),
        (reply(403), Sign.BAD),
        (reply(307), Sign.BAD),
        (reply(418), Sign.BAD),
        (reply(404), Sign.NEUTRAL),
        (reply(501), Sign.NEUTRAL),
        (Trouble.UNREACHABLE, Sign.BAD),
        (Trouble.BROKEN, Sign.BAD),
        (Trouble.TIMEOUT, Sign.BAD),
        (Trouble.OWN, Sign.NEUTRAL),
    ],
)
def test_each_fate_is_weighed(answer: Answer, sign: Sign) -> None:
    """A canary proves life or its absence strongly, or nothing."""
    evidence = fly(FakePatient(lambda _: answer))
    assert evidence.sign is sign
    assert evidence.strength is Strength.STRONG or sign is Sign.NEUTRAL


def test_a_refusal_is_fatal() -> None:
    """Nobody listens at the unit's own address."""
    evidence = fly(FakePatient(lambda _: Trouble.REFUSED))
    assert (evidence.sign, evidence.strength) == (Sign.BAD, Strength.FATAL)


def test_a_timeout_while_the_unit_shows_life_proves_nothing() -> None:
    """Busy is not sick."""
    context = FakePatient(lambda _: Trouble.TIMEOUT, progress_at=90.0)

    def move(_: str) -> Answer:
        context.progress_at = 101.0
        return Trouble.TIMEOUT

    assert fly(context).sign is Sign.BAD
    context.answer = move
    assert fly(context).sign is Sign.NEUTRAL


def test_a_timeout_that_was_too_short_for_what_the_unit_is_by_then_proves_nothing() -> None:
    """It has restarted while the canary waited, and may have to warm up."""

    def restart(_: str) -> Answer:
        context.verdict = Verdict.STARTING
        return Trouble.TIMEOUT

    context = FakePatient(restart, verdict=Verdict.DOWN)
    assert fly(context).sign is Sign.NEUTRAL
    assert fly(context).sign is Sign.BAD


def test_the_reason_tells_the_operator_what_happened() -> None:
    """One line: the path, and what was said there or was not."""
    body = b'{"error": "EngineDeadError"}\n'
    assert fly(FakePatient(lambda _: reply(500, body))).reason == (
        'POST /v1/chat/completions: HTTP 500 \'{"error": "EngineDeadError"}\\n\''
    )
    assert (
        fly(FakePatient(lambda _: Trouble.TIMEOUT)).reason == "no token within 2.5 s: timeout, so it was said"
    )


def test_it_asks_for_one_token_of_a_short_unique_prompt() -> None:
    """No priority, its own id, the first configured model."""
    context = FakePatient(lambda _: TOKEN, unit=Unit("u", "c", "http://u", models=("z", "a")))
    fly(context)
    fly(context)
    first, second = (orjson.loads(asked.body) for asked in context.asked)
    prompt = first["messages"][0]["content"]
    assert first == {"model": "z", "messages": [{"role": "user", "content": prompt}], "max_tokens": 1}
    assert second["messages"][0]["content"] != prompt
    ids = [asked.request_id for asked in context.asked]
    assert ids[0] != ids[1]
    assert all(request_id.startswith("cellgate-canary-") for request_id in ids)


def test_it_falls_back_to_what_the_unit_serves_and_remembers_it() -> None:
    """A unit may serve completions alone."""
    context = FakePatient(serves(COMPLETIONS))
    assert fly(context).sign is Sign.GOOD
    assert fly(context).sign is Sign.GOOD
    assert [asked.target for asked in context.asked] == [CHAT, COMPLETIONS, COMPLETIONS]
    assert set(orjson.loads(context.asked[-1].body)) == {"model", "prompt", "max_tokens"}

    context.answer = serves(CHAT)
    context.asked.clear()
    assert fly(context).sign is Sign.GOOD
    assert [asked.target for asked in context.asked] == [COMPLETIONS, CHAT]


def test_it_asks_for_what_is_served_first_when_no_model_is_known() -> None:
    """And brings it home."""

    def answer(target: str) -> Answer:
        return reply(200, b'{"data": [{"id": "told"}]}') if target == "/v1/models" else TOKEN

    context = FakePatient(answer, models=frozenset())
    served, models, evidence = look(Canary(), context)
    assert (served, models) == (Served("u", "openai", 100.0), Models("u", ("told",), 100.0))
    assert isinstance(evidence, Evidence)
    assert evidence.sign is Sign.GOOD
    assert orjson.loads(context.asked[-1].body)["model"] == "told"


def test_it_names_no_model_when_the_unit_tells_none() -> None:
    """The engine then takes its own."""
    context = FakePatient(serves(CHAT), models=frozenset())
    evidence = look(Canary(), context)[-1]
    assert isinstance(evidence, Evidence)
    assert evidence.sign is Sign.GOOD
    assert "model" not in orjson.loads(context.asked[-1].body)


def test_a_configured_api_is_the_only_one_asked() -> None:
    """The operator knows what the unit serves."""
    unit = Unit("u", "c", "http://u", canary="embeddings")
    context = FakePatient(serves(CHAT), unit=unit)
    evidence = fly(context)
    assert [asked.target for asked in context.asked] == [EMBEDDINGS]
    assert evidence.reason == (
        "the canary was refused: POST /v1/embeddings: HTTP 404 ''; its model?; set `canary:` to an API that "
        "the unit serves"
    )


def test_an_engine_that_wants_a_key_is_told_to_the_operator() -> None:
    """Its health is not known without."""
    evidence = fly(FakePatient(lambda _: reply(401)))
    assert evidence.sign is Sign.BAD
    assert evidence.reason.endswith("; set `api_key_file:` to a key that the unit accepts")


def test_the_fallbacks_share_one_timeout() -> None:
    """A look takes no longer than one canary may."""

    def slow(target: str) -> Answer:
        context.now_s += 1.0
        return reply(404)

    context = FakePatient(slow, rules=RULES, load=SIGHTED)
    fly(context)
    assert [asked.timeout_s for asked in context.asked] == [2.5, 1.5, 0.5, 0.0, 0.0]


def test_it_has_time_to_warm_a_unit_up() -> None:
    """Users' units are judged sooner."""
    times = {
        verdict: canary_timeout_s(FakePatient(lambda _: TOKEN, verdict=verdict, rules=RULES, load=SIGHTED))
        for verdict in Verdict
    }
    assert times == {
        Verdict.STARTING: 60.0,
        Verdict.PROBATION: 60.0,
        Verdict.UP: 2.5,
        Verdict.SUSPECT: 2.5,
        Verdict.DOWN: 2.5,
    }


def test_it_waits_as_long_as_the_unit_may_be_silent() -> None:
    """A long prompt holds it up like anybody else."""
    context = FakePatient(lambda _: TOKEN, rules=RULES, load=SIGHTED, stall_limit_s=7.0)
    assert canary_timeout_s(context) == 7.0
    context.stall_limit_s = 600.0
    assert canary_timeout_s(context) == 8.0, "what explains its time-out is asked then"


def test_the_next_one_waits_half_as_long_where_nothing_has_moved_since_the_last() -> None:
    """They have waited together for the same work."""
    context = FakePatient(lambda _: Trouble.TIMEOUT, rules=RULES, load=SIGHTED, stall_limit_s=7.0)
    fly(context)
    assert canary_timeout_s(context) == 3.5
    context.progress_at = context.now_s
    assert canary_timeout_s(context) == 7.0


def test_a_canary_on_its_way_is_late_as_one_sent_with_the_doubt_and_no_sooner_than_its_own_time() -> None:
    context = FakePatient(lambda _: Trouble.TIMEOUT, rules=RULES, verdict=Verdict.SUSPECT, load=SIGHTED)
    sent_at = context.now_s
    fly(context)
    timeout_s = canary_timeout_s(context)
    assert late_at(context, doubted_at=sent_at + 3.0) == sent_at + 3.0 + timeout_s
    assert late_at(context, doubted_at=sent_at - 60.0) == sent_at + timeout_s


def test_a_unit_that_shows_no_steps_gets_twice_the_time_while_it_may_have_work() -> None:
    """Nothing but its answers shows that it moves."""
    blind = FakePatient(lambda _: TOKEN, rules=RULES)
    assert canary_timeout_s(blind) == 5.0
    assert canary_timeout_s(replace(blind, load=Load("u", 99.0, running=1, progress=5.0))) == 5.0
    assert canary_timeout_s(replace(blind, load=Load("u", 99.0, progress=5.0))) == 2.5


def test_a_unit_whose_canaries_are_usually_slow_gets_the_time_they_take() -> None:
    """Four times the usual, which follows what canaries take that have the unit for themselves."""

    def slow(_: str) -> Answer:
        context.now_s += 2.0
        return TOKEN

    context = FakePatient(slow, rules=RULES, load=replace(SIGHTED, running=0))
    before_s = canary_timeout_s(context)
    for _ in range(30):
        fly(context)
    assert before_s == 2.5
    assert canary_timeout_s(context) == pytest.approx(8.0, abs=0.1)


def test_a_canary_that_an_idle_unit_was_too_slow_for_gets_twice_the_time() -> None:
    """Else a slow engine, on which each of them runs out of time, would be out once nothing else moves."""

    def slow(_: str) -> Answer:
        context.now_s += 2.0
        if timeout_s < 2.0:
            context.progress_at = context.now_s
            return Trouble.TIMEOUT
        return TOKEN

    context = FakePatient(slow, rules=RULES, load=SIGHTED)
    timeout_s = canary_timeout_s(context)
    fly(context)
    timeout_s = canary_timeout_s(context)
    assert timeout_s == 2.5
    fly(context)
    assert canary_timeout_s(context) > 1.25, "and what it took is remembered"


@pytest.mark.parametrize("state", [{"in_flight": 1}, {"load": SIGHTED}, {"verdict": Verdict.DOWN}])
def test_what_a_canary_takes_among_others_or_to_warm_up_is_not_usual(state: dict[str, Any]) -> None:
    """It would make the next ones wait for nothing."""

    def slow(_: str) -> Answer:
        context.now_s += 20.0
        return TOKEN

    context = FakePatient(slow, rules=RULES, **state)
    fly(context)
    context.verdict, context.in_flight, context.load = Verdict.UP, 0, SIGHTED
    assert canary_timeout_s(context) == 2.5


def test_after_a_start_the_second_canary_shows_what_is_usual() -> None:
    """The first may have warmed the engine up."""
    context = FakePatient(lambda _: TOKEN, verdict=Verdict.STARTING, engine="openai")
    assert fly(context).sign is Sign.GOOD
    assert len(context.asked) == 2
    context = FakePatient(lambda _: reply(500), verdict=Verdict.STARTING)
    assert fly(context).sign is Sign.BAD
    assert len(context.asked) == 1


def busy_until(count: int, context: list[FakePatient]) -> Callable[[str], Answer]:
    """A unit that has no room for the first `count` requests."""
    return lambda _: TOKEN if len(context[0].asked) > count else reply(503)


def test_a_busy_unit_is_asked_again_until_it_has_room() -> None:
    """Each quarter of a second."""
    patients: list[FakePatient] = []
    context = FakePatient(busy_until(3, patients), rules=RULES, load=SIGHTED)
    patients.append(context)
    assert fly(context).sign is Sign.GOOD
    assert (len(context.asked), context.now_s) == (4, 100.75)
    assert [asked.timeout_s for asked in context.asked] == [2.5, 2.25, 2.0, 1.75]


@pytest.mark.parametrize("status", [429, 503])
def test_a_unit_that_stays_busy_while_nothing_of_ours_moves_is_stuck(status: int) -> None:
    """Its queue is full because nobody empties it."""
    context = FakePatient(lambda _: reply(status), rules=RULES, load=SIGHTED, in_flight=8, progress_at=99.0)
    evidence = fly(context)
    assert (evidence.sign, evidence.strength) == (Sign.BAD, Strength.STRONG)
    assert "busy, but without progress for 2.25 s" in evidence.reason


@pytest.mark.parametrize("excuse", ["moves", "nothing of ours", "counts no steps"])
def test_a_unit_that_stays_busy_with_an_excuse_is_busy(excuse: str) -> None:
    """Full is not sick."""

    def busy(_: str) -> Answer:
        if excuse == "moves":
            context.progress_at = context.now_s
        return reply(503)

    context = FakePatient(busy, rules=RULES, load=SIGHTED, in_flight=8, progress_at=99.0)
    if excuse == "nothing of ours":
        context.in_flight = 0
    if excuse == "counts no steps":
        context.load = replace(SIGHTED, sighted=False)
    evidence = fly(context)
    assert (evidence.sign, context.now_s) == (Sign.NEUTRAL, 102.25 + 2.5 * (excuse == "counts no steps"))


def test_a_unit_that_is_busy_with_an_empty_queue_is_sick() -> None:
    """Once its own numbers, read after it said so, show that there is nothing to be busy with."""

    def busy(_: str) -> Answer:
        if context.now_s >= 100.5:
            context.load = Load("u", context.now_s, progress=5.0, sighted=True)
        return reply(503)

    context = FakePatient(busy, rules=RULES, load=Load("u", 99.9, progress=5.0, sighted=True))
    evidence = fly(context)
    assert (evidence.sign, evidence.strength) == (Sign.BAD, Strength.STRONG)
    assert "busy with an empty queue" in evidence.reason
    assert context.now_s == 100.5


def test_a_down_unit_gets_twice_the_time_after_each_timeout() -> None:
    """Up to the warm-up time; any other fate ends the row."""
    context = FakePatient(lambda _: Trouble.TIMEOUT, verdict=Verdict.DOWN, rules=RULES)
    for _ in range(40):
        fly(context)
    waits = [asked.timeout_s for asked in context.asked]
    assert waits[:6] == [2.5, 5.0, 10.0, 20.0, 40.0, 60.0]
    assert set(waits[6:]) == {60.0}
    context.answer = lambda _: Trouble.REFUSED
    fly(context)
    assert canary_timeout_s(context) == 2.5


@pytest.mark.parametrize("verdict", [verdict for verdict in Verdict if verdict is not Verdict.UP])
def test_it_flies_each_period_while_there_is_doubt(verdict: Verdict) -> None:
    """Signs of life do not answer a suspicion: only a canary does."""
    context = FakePatient(lambda _: TOKEN, verdict=verdict, progress_at=100.0)
    assert Canary(period_s=1.0).due_at(context, 99.5) == 100.5


def test_an_up_unit_gets_one_only_after_a_while_without_life() -> None:
    """Work is the better proof, and free."""
    context = FakePatient(lambda _: TOKEN, progress_at=100.0, rules=RULES, load=replace(SIGHTED, running=0))
    assert Canary().due_at(context, 50.0) == 102.0
    assert Canary().due_at(replace(context, progress_at=10.0), 50.0) == 51.0


def test_one_that_counts_no_steps_gets_it_sooner_because_it_takes_longer_to_fail() -> None:
    blind = FakePatient(lambda _: TOKEN, progress_at=100.0)
    counts = replace(blind, load=replace(SIGHTED, running=0))
    due_s, blind_due_s = (Canary().due_at(each, 50.0) - 100.0 for each in (counts, blind))
    assert due_s == 14.0
    assert blind_due_s == pytest.approx(14.0 * 2.0 / 3.0)
    timeout_s, blind_timeout_s = (canary_timeout_s(each) for each in (counts, replace(blind, in_flight=1)))
    assert max(due_s + 2.0 * timeout_s, blind_due_s + 2.0 * blind_timeout_s) < 17.0


@pytest.mark.parametrize(
    ("work", "awake_s"),
    [({"in_flight": 1}, 2.0), ({"in_flight": 1, "load": SIGHTED}, 1.5), ({"load": SIGHTED}, 1.5)],
    ids=["blind", "steps are counted", "of others"],
)
def test_a_unit_with_work_gets_one_soon_when_it_shows_no_life(work: dict[str, Any], awake_s: float) -> None:
    patient = FakePatient(lambda _: TOKEN, progress_at=100.0, **work)
    assert Canary().due_at(patient, 50.0) == 100.0 + awake_s


def test_it_flies_a_little_later_where_another_gates_may_spare_it() -> None:
    idle = replace(SIGHTED, running=0)
    context = FakePatient(lambda _: TOKEN, progress_at=100.0, is_peers_turn=True, rules=RULES, load=idle)
    assert Canary().due_at(context, 50.0) == 102.75
    # A suspicion is one's own.
    assert Canary().due_at(replace(context, verdict=Verdict.SUSPECT), 101.5) == 102.5


def test_none_flies_while_a_fault_of_a_node_holds_the_unit_down() -> None:
    """It could not bring the unit back."""
    context = FakePatient(lambda _: TOKEN, verdict=Verdict.DOWN, held_down=True)
    assert Canary().due_at(context, 50.0) == math.inf


STREAMED = Reply(
    200, {"content-type": "text/event-stream"}, b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
)
WHOLE_CHAT, CHAT_STREAM, EMBEDDED = (
    Use("chat", False, "m"),
    Use("chat", True, "m"),
    Use("embeddings", False, "m"),
)


def last(context: FakePatient) -> Evidence:
    """The evidence of one canary, without what else is found."""
    evidence = look(Canary(), context)[-1]
    assert isinstance(evidence, Evidence)
    return evidence


def bodies(context: FakePatient) -> list[tuple[str, bool]]:
    """What was asked: the path, and whether it was a stream."""
    return [(asked.target, b'"stream":true' in asked.body) for asked in context.asked]


def test_a_unit_that_is_well_is_asked_for_each_kind_in_use_in_turn() -> None:
    context = FakePatient(lambda _: TOKEN, uses=(WHOLE_CHAT, Use("completions", False, "m")))
    for _ in range(4):
        fly(context)
    assert [target for target, _ in bodies(context)] == [CHAT, COMPLETIONS] * 2


def test_a_suspect_is_asked_for_all_kinds_in_use() -> None:
    context = FakePatient(lambda _: TOKEN, uses=(CHAT_STREAM, WHOLE_CHAT), verdict=Verdict.SUSPECT)
    fly(context)
    assert sorted(bodies(context)) == [(CHAT, False), (CHAT, True)]


def test_the_kind_of_a_request_that_waits_is_asked_next() -> None:
    context = FakePatient(lambda _: STREAMED, uses=(WHOLE_CHAT, CHAT_STREAM), waiting=CHAT_STREAM)
    assert fly(context).sign is Sign.GOOD
    assert bodies(context) == [(CHAT, True)]


def test_a_kind_that_alone_hangs_while_others_are_answered_is_a_failure() -> None:
    """Its progress excuses a busy unit; but what came later cannot have been in the way."""

    def hangs(target: str) -> Answer:
        context.progress_at = context.now_s + 1.0
        return Trouble.TIMEOUT

    context = FakePatient(hangs, uses=(WHOLE_CHAT,), notes={"api": ("chat", "m")})
    assert fly(context).sign is Sign.NEUTRAL
    context.is_answering = True
    evidence = fly(context)
    assert (evidence.sign, evidence.strength) == (Sign.BAD, Strength.STRONG)
    assert "chat, while others are answered" in evidence.reason


def test_a_kind_that_a_unit_has_never_served_does_not_count_against_it() -> None:
    """Units of one model may serve different paths."""
    context = FakePatient(serves(CHAT), uses=(EMBEDDED, WHOLE_CHAT), verdict=Verdict.SUSPECT)
    assert fly(context).sign is Sign.GOOD
    context.answer = serves(COMPLETIONS)
    assert fly(context).sign is Sign.BAD, "it has served this one"


@pytest.mark.parametrize(
    "answer",
    [
        Reply(200, {"content-type": "text/html"}, b"<html>welcome</html>"),
        Reply(200, {"content-type": "application/json"}, TOKEN.body),
        Reply(200, STREAMED.headers, b'data: {"error": {"message": "CUDA error"}}\n\n'),
        Reply(200, STREAMED.headers, b'data: {"choices": [{"delta": {"content": ""}}]}\n\ndata: [DONE]\n\n'),
        Reply(200, STREAMED.headers, b": nothing\n\n"),
    ],
    ids=["html", "no stream", "error", "empty", "comments"],
)
def test_a_stream_of_nonsense_proves_the_opposite(answer: Reply) -> None:
    context = FakePatient(
        lambda _: answer, uses=(CHAT_STREAM,), notes={"api": ("chat", "m")}, waiting=CHAT_STREAM
    )
    assert fly(context).sign is Sign.BAD


def test_an_end_without_a_token_proves_the_opposite() -> None:
    body = b'{"choices": [{"message": {"content": ""}, "finish_reason": "stop"}]}'
    assert fly(FakePatient(lambda _: reply(200, body))).sign is Sign.BAD
    counted = body[:-1] + b', "usage": {"completion_tokens": 1}}'
    assert fly(FakePatient(lambda _: reply(200, counted))).sign is Sign.GOOD, (
        "it may be one that is not shown"
    )


def test_a_unit_that_starts_and_refuses_canaries_is_asked_less_and_less_often() -> None:
    context = FakePatient(lambda _: reply(401), verdict=Verdict.STARTING)
    pauses = []
    for _ in range(5):
        evidence = last(context)
        assert evidence.sign is Sign.NEUTRAL
        assert "its key?" in evidence.reason
        pauses.append(Canary().due_at(context, 0.0))
    assert pauses == sorted(pauses)
    assert pauses[-1] == REFUSED_MAX_S


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/audio/transcriptions", reply(200, b'{"text": ""}')),
        ("/v1/audio/speech", Reply(200, {"content-type": "audio/mpeg"}, b"\xff\xfb")),
        ("/v1/rerank", reply(200, b'{"results": [{"index": 0, "relevance_score": 0.1}]}')),
    ],
)
def test_a_unit_without_text_is_asked_for_what_it_serves(path: str, answer: Reply) -> None:
    missing = reply(404, b'{"detail":"Not Found"}')
    context = FakePatient(lambda target: answer if target == path else missing, verdict=Verdict.STARTING)
    assert last(context).sign is Sign.GOOD
    context.asked, context.verdict = [], Verdict.UP
    last(context)
    assert [asked.target for asked in context.asked] == [path]


def test_a_unit_that_no_canary_can_ask_is_proven_by_its_pages_and_says_so() -> None:
    pages = {"/v1/models": reply(200, b'{"data": [{"id": "m"}]}'), "/health": reply(200)}
    context = FakePatient(lambda target: pages.get(target, reply(404)), verdict=Verdict.STARTING)
    evidence = last(context)
    assert evidence.sign is Sign.GOOD
    assert "serves no API that a canary could ask for" in evidence.reason
    pages.pop("/v1/models")
    assert last(context).sign is Sign.NEUTRAL


def test_of_many_models_the_one_in_use_is_asked_and_none_is_loaded() -> None:
    """As Ollama and llama-swap list what is loaded."""
    shown = [b'{"models": [{"name": "b"}]}']

    def answer(target: str) -> Answer:
        return reply(200, shown[0]) if target == "/api/ps" else TOKEN

    uses = (Use("chat", False, "a"), Use("chat", False, "b"))
    context = FakePatient(answer, models=frozenset("abc"), uses=uses)
    last(context)
    assert orjson.loads(context.asked[-1].body)["model"] == "b", "`a` is in use, but not loaded now"
    shown[0], context.asked = b'{"models": []}', []
    evidence = last(context)
    assert evidence.sign is Sign.GOOD
    assert "no model loaded" in evidence.reason
    assert {asked.method for asked in context.asked} == {"GET"}


def test_an_embedding_model_does_not_prove_the_others() -> None:
    def answer(target: str) -> Answer:
        model = orjson.loads(context.asked[-1].body or b"{}").get("model")
        if target == EMBEDDINGS:
            return reply(200, b'{"data": [{"embedding": [0.1]}]}')
        return TOKEN if (target, model) == (CHAT, "llm") else reply(400 if target == CHAT else 404)

    context = FakePatient(answer, models=frozenset({"bge", "llm"}), verdict=Verdict.STARTING)
    assert last(context).sign is Sign.GOOD
    assert orjson.loads(context.asked[-1].body)["model"] == "llm"


# How often a canary is sent to a unit at which canaries run out of time.

SENT_AT = 100.0


def after_timeouts(number: int, verdict: Verdict = Verdict.SUSPECT) -> FakePatient:
    """A unit at which so many canaries in a row have run out of time, and which has done nothing recently."""
    patient = FakePatient(lambda _: Trouble.TIMEOUT, verdict=verdict, progress_at=-1000.0)
    for _ in range(number):
        look(Canary(), patient)
    return patient


@pytest.mark.parametrize("verdict", [Verdict.UP, Verdict.SUSPECT])
@pytest.mark.parametrize(
    ("timeouts", "pause_s"), [(0, 1.0), (1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (40, 8.0)]
)
def test_a_unit_that_makes_progress_gets_fewer_from_one_timeout_to_the_next(
    verdict: Verdict, timeouts: int, pause_s: float
) -> None:
    patient = after_timeouts(timeouts, verdict)
    moving = replace(patient, progress_at=SENT_AT + 60.0 if timeouts else 0.0)
    assert Canary().due_at(moving, SENT_AT) == SENT_AT + pause_s


def test_a_suspect_that_is_seen_to_stand_still_is_asked_each_second() -> None:
    """An agent may say so, while what it has to do would explain the silence for longer."""
    patient = replace(after_timeouts(6), is_hiding=True)
    assert Canary().due_at(patient, SENT_AT) == SENT_AT + 8.0
    assert Canary().due_at(replace(patient, is_seen_still=True), SENT_AT) == SENT_AT + 1.0


def test_one_that_stops_making_progress_gets_the_next_as_soon_as_an_idle_one() -> None:
    patient = replace(after_timeouts(6), rules=Rules(canary_idle_s=3.0))
    idle_s = 3.0 * BLIND_IDLE
    assert Canary().due_at(replace(patient, progress_at=SENT_AT + 3.0), SENT_AT) == SENT_AT + 3.0 + idle_s
    assert Canary().due_at(replace(patient, progress_at=SENT_AT - 60.0), SENT_AT) == SENT_AT + 1.0


# Which canaries need a new connection.


@pytest.mark.parametrize("verdict", Verdict)
def test_a_suspicion_is_examined_on_a_new_connection(verdict: Verdict) -> None:
    context = FakePatient(lambda _: TOKEN, verdict=verdict)
    fly(context)
    assert context.asked[0].fresh is (verdict is not Verdict.UP)


def test_a_canary_that_timed_out_is_repeated_on_a_new_connection() -> None:
    context = FakePatient(lambda _: Trouble.TIMEOUT)
    fly(context)
    fly(context)
    assert [asked.fresh for asked in context.asked] == [False, True]
