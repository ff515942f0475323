"""When the canary flies, what it asks, and what its fate proves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
import pytest

from cellgate.probes.base import Reply, Trouble
from cellgate.probes.canary import BLIND_IDLE, REFUSED_MAX_S, Canary, canary_timeout_s, late_at
from cellgate.probes.runner import RESOLUTION_S
from cellgate.router.judge import CANARY_SOURCE
from cellgate.router.nouns import Evidence, Load, Models, Rules, Served, Sign, Strength, Unit, Use, Verdict
from tests.patient import Answer, FakePatient, evidence_of, look, reply

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TOKEN = reply(200, b'{"choices": [{"message": {"content": "x"}}], "usage": {}}')
RULES = Rules(canary_idle_s=2.0, canary_timeout_s=2.5, warm_up_timeout_s=60.0)
SIGHTED = Load("u", 99.0, running=1, progress=5.0, sighted=True)
ENDED = b'{"choices": [{"message": {"content": ""}, "finish_reason": "stop"}]}'


fly = partial(evidence_of, Canary())


def serves(*paths: str) -> Callable[[str], Answer]:
    """A unit that answers these paths and knows no other."""
    return lambda target: TOKEN if target in paths else reply(404)


@pytest.mark.parametrize(
    ("answer", "state", "ranks"),
    [
        (TOKEN, {"ranks": 2}, [0, 1, 0]),
        (Trouble.TIMEOUT, {"ranks": 2}, [0, 0]),
        (TOKEN, {"ranks": 4, "stalled_rank": 2}, [2]),
        (TOKEN, {}, [None]),
    ],
    ids=["in turn", "one that does not answer is asked again", "one that stalls is first", "one scheduler"],
)
def test_each_data_parallel_rank_is_asked(answer: Answer, state: dict[str, Any], ranks: list[int]) -> None:
    context = FakePatient(lambda _: answer, **state)
    for _ in ranks:
        fly(context)
    assert [asked.rank for asked in context.asked] == ranks


@pytest.mark.parametrize("answer", [TOKEN, Trouble.REFUSED, reply(500)])
def test_what_the_process_before_has_answered_proves_nothing_of_the_next(answer: Answer) -> None:
    def restarts(_: str) -> Answer:
        context.restarted = ("engine_metrics", 100.0)
        return answer

    context = FakePatient(restarts)
    assert fly(context).sign is Sign.NEUTRAL


@pytest.mark.parametrize(
    ("answer", "sign"),
    [
        (TOKEN, Sign.GOOD),
        (reply(200, b'{"choices": []}'), Sign.BAD),
        (reply(200, b'{"error": {"message": "dead"}, "choices": [{}]}'), Sign.BAD),
        (reply(200, ENDED), Sign.BAD),
        # It may be one that is not shown.
        (reply(200, ENDED[:-1] + b', "usage": {"completion_tokens": 1}}'), Sign.GOOD),
        (reply(200, b"<html>"), Sign.BAD),
        (reply(200, b""), Sign.BAD),
        (reply(500, b'{"error": {"message": "EngineDeadError"}}'), Sign.BAD),
        *((reply(status), Sign.BAD) for status in (502, 401, 403, 307, 418)),
        *((reply(status), Sign.NEUTRAL) for status in (429, 503, 404, 501)),
        (Trouble.REFUSED, Sign.BAD),
        (Trouble.UNREACHABLE, Sign.BAD),
        (Trouble.BROKEN, Sign.BAD),
        (Trouble.TIMEOUT, Sign.BAD),
        (Trouble.OWN, Sign.NEUTRAL),
    ],
)
def test_each_fate_is_weighed(answer: Answer, sign: Sign) -> None:
    """A canary proves life or its absence strongly, or nothing; that nobody listens there is fatal. The judge
    tells canaries from other evidence by their name.
    """
    evidence = fly(FakePatient(lambda _: answer))
    assert (evidence.sign, evidence.source) == (sign, CANARY_SOURCE)
    strength = Strength.FATAL if answer is Trouble.REFUSED else Strength.STRONG
    assert evidence.strength is strength or sign is Sign.NEUTRAL


def test_a_timeout_while_the_unit_shows_life_or_restarts_proves_nothing() -> None:
    """Busy is not sick; and who has restarted while the canary waited may have to warm up."""

    def move(_: str) -> Answer:
        context.progress_at = 101.0
        return Trouble.TIMEOUT

    def restart(_: str) -> Answer:
        context.verdict = Verdict.STARTING
        return Trouble.TIMEOUT

    context = FakePatient(lambda _: Trouble.TIMEOUT, progress_at=90.0)
    assert fly(context).sign is Sign.BAD
    context.answer = move
    assert fly(context).sign is Sign.NEUTRAL
    context = FakePatient(restart, verdict=Verdict.DOWN)
    assert [fly(context).sign for _ in range(2)] == [Sign.NEUTRAL, Sign.BAD]


def test_the_reason_tells_the_operator_what_happened() -> None:
    """One line: the path, what was said there or was not, and what helps."""
    body = b'{"error": "EngineDeadError"}\n'
    said = fly(FakePatient(lambda _: reply(500, body))).reason
    assert said == "POST /v1/chat/completions: HTTP 500 'EngineDeadError'", "its own words"
    body = b'{"error": {"message": "No space left on device\r\n' + b"x" * 99 + b'", "code": 500}}'
    said = fly(FakePatient(lambda _: reply(500, body))).reason
    assert said.startswith("POST /v1/chat/completions: HTTP 500 'No space left on device\\r\\nxx")
    assert len(said) < 140
    assert "HTTP 502 '<html>" in fly(FakePatient(lambda _: reply(502, b"<html>bad gateway"))).reason
    late = fly(FakePatient(lambda _: Trouble.TIMEOUT))
    assert late.reason == "no token within 2.5 s: timeout, so it was said"
    keyless = fly(FakePatient(lambda _: reply(401)))
    assert keyless.reason.endswith("; set `api_key_file:` to a key that the unit accepts")
    context = FakePatient(serves(CHAT), unit=Unit("u", "c", "http://u", canary="embeddings"))
    assert fly(context).reason == (
        "the canary was refused: POST /v1/embeddings: HTTP 404 ''; set `canary:` to an API that the unit "
        "serves, if its engine was started with the right model"
    )
    own = fly(FakePatient(lambda _: reply(404, b'{"error": {"message": "no KV cache"}}')))
    assert own.reason.endswith("; see its engine's log")
    chat = Unit("u", "c", "http://u", canary="chat")
    path = fly(FakePatient(lambda _: reply(404, b'{"detail":"Not Found"}'), unit=chat))
    assert "; set `canary:` to an API" in path.reason
    # As vLLM says it.
    wrong = reply(404, b'{"error": {"message": "The model `m` does not exist."}}')
    other = fly(FakePatient(lambda _: wrong, unit=Unit("u", "c", "http://u", models=("m",))))
    assert other.reason.endswith("; it does not serve `m`: see what its engine was started with")
    assert [asked.target for asked in context.asked] == [EMBEDDINGS], "no other than the configured one"


def test_it_asks_for_one_token_of_a_short_unique_prompt() -> None:
    """No priority, its own id, the first configured model. What is not served is not asked again."""
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
    context = FakePatient(serves(COMPLETIONS))
    assert fly(context).sign is Sign.GOOD
    assert fly(context).sign is Sign.GOOD
    assert [asked.target for asked in context.asked] == [CHAT, COMPLETIONS, COMPLETIONS]
    assert set(orjson.loads(context.asked[-1].body)) == {"model", "prompt", "max_tokens"}

    context.answer = serves(CHAT)
    context.asked.clear()
    assert fly(context).sign is Sign.GOOD
    assert [asked.target for asked in context.asked] == [COMPLETIONS, CHAT]


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        (b'{"data": [{"id": "told"}]}', ("told",)),
        # It would take the place of one that clients use. Adapters may come first in the list.
        (b'{"data": [{"id": "a", "parent": "base"}, {"id": "base"}]}', ("base",)),
        # The engine then takes its own.
        (b'{"data": []}', ()),
    ],
    ids=["told", "never an adapter", "none"],
)
def test_it_asks_for_what_is_served_first_if_no_model_is_known(listed: bytes, names: tuple[str, ...]) -> None:
    def answer(target: str) -> Answer:
        return reply(200, listed) if target == "/v1/models" else TOKEN

    context = FakePatient(answer, models=frozenset())
    *found, evidence = look(Canary(), context)
    assert isinstance(evidence, Evidence)
    assert evidence.sign is Sign.GOOD
    assert orjson.loads(context.asked[-1].body).get("model", "") == "".join(names)
    if names == ("told",):
        assert found == [Served("u", "openai", 100.0), Models("u", names, 100.0)]


def test_the_fallbacks_share_one_timeout() -> None:
    """A look takes no longer than one canary may."""

    def slow(target: str) -> Answer:
        context.now_s += 1.0
        return reply(404)

    context = FakePatient(slow, rules=RULES, load=SIGHTED)
    fly(context)
    assert [asked.timeout_s for asked in context.asked] == [2.5, 1.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("state", "timeout_s"),
    [
        # It has time to warm a unit up; users' units are judged sooner.
        *(({"verdict": verdict}, 60.0) for verdict in (Verdict.STARTING, Verdict.PROBATION)),
        *(({"verdict": verdict}, 2.5) for verdict in (Verdict.UP, Verdict.SUSPECT, Verdict.DOWN)),
        # A long prompt holds it up like anybody else; what explains its time-out is asked then.
        ({"stall_limit_s": 7.0}, 7.0),
        ({"stall_limit_s": 600.0}, 8.0),
        # Where no steps are shown, nothing but its answers shows that it moves, while it may have work.
        ({"load": None}, 5.0),
        ({"load": Load("u", 99.0, running=1, progress=5.0)}, 5.0),
        ({"load": Load("u", 99.0, progress=5.0)}, 2.5),
    ],
    ids=str,
)
def test_it_waits_as_long_as_the_unit_may_be_silent(state: dict[str, Any], timeout_s: float) -> None:
    context = FakePatient(lambda _: TOKEN, **{"rules": RULES, "load": SIGHTED, **state})
    assert canary_timeout_s(context) == timeout_s


@pytest.mark.parametrize(("borne_s", "timeout_s"), [(2.0, 2.5), (4.0, 4.0), (6.0, 2.5)])
def test_while_a_unit_is_borne_it_is_asked_again_and_the_last_one_waits_to_the_end(
    borne_s: float, timeout_s: float
) -> None:
    """One alone may be late by chance, and says nothing of the unit until it is answered."""
    idle = FakePatient(lambda _: Trouble.TIMEOUT, rules=RULES, load=SIGHTED, borne_s=borne_s)
    busy = replace(idle, borne_s=0.0, in_flight=1, borne_until=idle.now_s + borne_s, notes={})
    for context in (idle, busy):
        assert canary_timeout_s(context) == timeout_s
        first_at = context.now_s
        while context.now_s < first_at + borne_s:
            assert fly(context).sign is (Sign.NEUTRAL if context.now_s < first_at + borne_s else Sign.BAD)


@pytest.mark.parametrize(("early_s", "sign"), [(RESOLUTION_S, Sign.BAD), (0.05, Sign.NEUTRAL)])
def test_one_that_waited_until_its_unit_is_not_borne_any_more_counts_though_its_timer_is_early(
    early_s: float, sign: Sign
) -> None:
    """Else the next one decides, a whole timeout later. One that ended well before that says nothing."""

    def early(_: str) -> Trouble:
        context.now_s -= early_s
        return Trouble.TIMEOUT

    context = FakePatient(early, rules=RULES, load=SIGHTED, in_flight=1, borne_until=104.0)
    assert fly(context).sign is sign


def test_the_next_one_waits_half_as_long_where_nothing_has_moved_since_the_last() -> None:
    """They have waited together for the same work. One on its way is late as one sent with the doubt."""
    context = FakePatient(lambda _: Trouble.TIMEOUT, rules=RULES, load=SIGHTED, stall_limit_s=7.0)
    fly(context)
    assert canary_timeout_s(context) == 3.5
    context.progress_at = context.now_s
    assert canary_timeout_s(context) == 7.0
    context = FakePatient(lambda _: Trouble.TIMEOUT, rules=RULES, verdict=Verdict.SUSPECT, load=SIGHTED)
    sent_at = context.now_s
    fly(context)
    timeout_s = canary_timeout_s(context)
    assert late_at(context, doubted_at=sent_at + 3.0) == sent_at + 3.0 + timeout_s
    assert late_at(context, doubted_at=sent_at - 60.0) == sent_at + timeout_s


@pytest.mark.parametrize(
    ("state", "takes_s", "usual_s"),
    [
        ({"load": replace(SIGHTED, running=0)}, 2.0, 8.0),
        ({"in_flight": 1}, 20.0, 2.5),
        ({"load": SIGHTED}, 20.0, 2.5),
        ({"verdict": Verdict.DOWN}, 20.0, 2.5),
    ],
    ids=["idle", "among others", "among others' others", "to warm up"],
)
def test_a_unit_whose_canaries_are_usually_slow_gets_the_time_they_take(
    state: dict[str, Any], takes_s: float, usual_s: float
) -> None:
    """Four times the usual, which follows what canaries take that have the unit for themselves: others would
    make the next ones wait for nothing.
    """

    def slow(_: str) -> Answer:
        context.now_s += takes_s
        return TOKEN

    context = FakePatient(slow, rules=RULES, **state)
    for _ in range(30 if usual_s == 8.0 else 1):
        fly(context)
    context.verdict, context.in_flight, context.load = Verdict.UP, 0, SIGHTED
    assert canary_timeout_s(context) == pytest.approx(usual_s, abs=0.1)


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


def test_after_a_start_the_second_canary_shows_what_is_usual() -> None:
    """The first may have warmed the engine up."""
    context = FakePatient(lambda _: TOKEN, verdict=Verdict.STARTING, engine="openai")
    assert fly(context).sign is Sign.GOOD
    assert len(context.asked) == 2
    context = FakePatient(lambda _: reply(500), verdict=Verdict.STARTING)
    assert fly(context).sign is Sign.BAD
    assert len(context.asked) == 1


def test_a_busy_unit_is_asked_again_until_it_has_room() -> None:
    """Each quarter of a second."""
    context = FakePatient(
        lambda _: TOKEN if len(context.asked) > 3 else reply(503), rules=RULES, load=SIGHTED
    )
    assert fly(context).sign is Sign.GOOD
    assert (len(context.asked), context.now_s) == (4, 100.75)
    assert [asked.timeout_s for asked in context.asked] == [2.5, 2.25, 2.0, 1.75]


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("excuse", ["", "moves", "nothing of ours", "counts no steps"])
def test_a_unit_that_stays_busy_while_nothing_of_ours_moves_is_stuck(status: int, excuse: str) -> None:
    """Its queue is full because nobody empties it. With an excuse, full is not sick."""

    def busy(_: str) -> Answer:
        if excuse == "moves":
            context.progress_at = context.now_s
        return reply(status)

    context = FakePatient(busy, rules=RULES, load=SIGHTED, progress_at=99.0)
    context.in_flight = 0 if excuse == "nothing of ours" else 8
    context.load = replace(SIGHTED, sighted=excuse != "counts no steps")
    evidence = fly(context)
    assert context.now_s == 102.25 + 2.5 * (excuse == "counts no steps")
    assert evidence.sign is (Sign.NEUTRAL if excuse else Sign.BAD)
    if not excuse:
        assert evidence.strength is Strength.STRONG
        assert "busy, but without progress for 2.25 s" in evidence.reason


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


IDLE = replace(SIGHTED, running=0)


@pytest.mark.parametrize(
    ("state", "last_at", "due_at"),
    [
        # Signs of life do not answer a suspicion: only a canary does.
        *(({"verdict": verdict}, 99.5, 100.5) for verdict in Verdict if verdict is not Verdict.UP),
        # Work is the better proof, and free.
        ({"rules": RULES, "load": IDLE}, 50.0, 102.0),
        ({"rules": RULES, "load": IDLE, "progress_at": 10.0}, 50.0, 51.0),
        # One with work gets it soon when it shows no life, and sooner where steps are counted.
        ({"in_flight": 1}, 50.0, 102.0),
        ({"in_flight": 1, "load": SIGHTED}, 50.0, 101.5),
        ({"load": SIGHTED}, 50.0, 101.5),
        # A little later where another gate's may spare it; but a suspicion is one's own.
        ({"rules": RULES, "load": IDLE, "is_peers_turn": True}, 50.0, 102.75),
        ({"rules": RULES, "load": IDLE, "is_peers_turn": True, "verdict": Verdict.SUSPECT}, 101.5, 102.5),
        # It could not bring a unit back that a fault of a node holds down.
        ({"verdict": Verdict.DOWN, "held_down": True}, 50.0, math.inf),
    ],
    ids=str,
)
def test_when_it_flies(state: dict[str, Any], last_at: float, due_at: float) -> None:
    context = FakePatient(lambda _: TOKEN, **{"progress_at": 100.0, **state})
    assert Canary(period_s=1.0).due_at(context, last_at) == due_at


def test_one_that_counts_no_steps_gets_it_sooner_because_it_takes_longer_to_fail() -> None:
    blind = FakePatient(lambda _: TOKEN, progress_at=100.0)
    counts = replace(blind, load=replace(SIGHTED, running=0))
    due_s, blind_due_s = (Canary().due_at(each, 50.0) - 100.0 for each in (counts, blind))
    assert due_s == 14.0
    assert blind_due_s == pytest.approx(14.0 * 2.0 / 3.0)
    timeout_s, blind_timeout_s = (canary_timeout_s(each) for each in (counts, replace(blind, in_flight=1)))
    assert max(due_s + 2.0 * timeout_s, blind_due_s + 2.0 * blind_timeout_s) < 17.0


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
    """A suspect for all of them; the kind of a request that waits comes next."""
    context = FakePatient(lambda _: TOKEN, uses=(WHOLE_CHAT, Use("completions", False, "m")))
    for _ in range(4):
        fly(context)
    assert [target for target, _ in bodies(context)] == [CHAT, COMPLETIONS] * 2
    context = FakePatient(lambda _: TOKEN, uses=(CHAT_STREAM, WHOLE_CHAT), verdict=Verdict.SUSPECT)
    fly(context)
    assert sorted(bodies(context)) == [(CHAT, False), (CHAT, True)]
    context = FakePatient(lambda _: STREAMED, uses=(WHOLE_CHAT, CHAT_STREAM), waiting=CHAT_STREAM)
    assert fly(context).sign is Sign.GOOD
    assert bodies(context) == [(CHAT, True)]


def test_a_kind_that_alone_hangs_is_a_failure_and_one_that_was_never_served_is_none() -> None:
    """What came later cannot have been in the way. Units of one model may serve different paths."""

    def hangs(target: str) -> Answer:
        context.progress_at = context.now_s + 1.0
        return Trouble.TIMEOUT

    context = FakePatient(hangs, uses=(WHOLE_CHAT,), notes={"api": ("chat", "m")})
    assert fly(context).sign is Sign.NEUTRAL
    context.is_answering = True
    evidence = fly(context)
    assert (evidence.sign, evidence.strength) == (Sign.BAD, Strength.STRONG)
    assert "chat, while others are answered" in evidence.reason
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


def test_a_unit_that_starts_and_refuses_canaries_is_asked_less_and_less_often() -> None:
    """One that no canary can ask is proven by its pages, and says so."""
    context = FakePatient(lambda _: reply(401), verdict=Verdict.STARTING)
    pauses = []
    for _ in range(5):
        evidence = last(context)
        assert evidence.sign is Sign.NEUTRAL
        assert "its key?" in evidence.reason
        pauses.append(Canary().due_at(context, 0.0))
    assert pauses == sorted(pauses)
    assert pauses[-1] == REFUSED_MAX_S
    pages = {"/v1/models": reply(200, b'{"data": [{"id": "m"}]}'), "/health": reply(200)}
    context = FakePatient(lambda target: pages.get(target, reply(404)), verdict=Verdict.STARTING)
    evidence = last(context)
    assert evidence.sign is Sign.GOOD
    assert "serves no API that a canary could ask for" in evidence.reason
    pages.pop("/v1/models")
    assert last(context).sign is Sign.NEUTRAL


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
def test_a_unit_that_makes_progress_gets_fewer_from_one_timeout_to_the_next(verdict: Verdict) -> None:
    pauses_s = []
    for timeouts in (0, 1, 2, 3, 4, 40):
        patient = after_timeouts(timeouts, verdict)
        moving = replace(patient, progress_at=SENT_AT + 60.0 if timeouts else 0.0)
        pauses_s.append(Canary().due_at(moving, SENT_AT) - SENT_AT)
    assert pauses_s == [1.0, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_one_that_stands_still_gets_the_next_as_soon_as_an_idle_one() -> None:
    """An agent may say so, while what it has to do would explain the silence for longer: each second then."""
    patient = replace(after_timeouts(6), is_hiding=True)
    assert Canary().due_at(patient, SENT_AT) == SENT_AT + 8.0
    assert Canary().due_at(replace(patient, is_seen_still=True), SENT_AT) == SENT_AT + 1.0
    patient = replace(after_timeouts(6), rules=Rules(canary_idle_s=3.0))
    idle_s = 3.0 * BLIND_IDLE
    assert Canary().due_at(replace(patient, progress_at=SENT_AT + 3.0), SENT_AT) == SENT_AT + 3.0 + idle_s
    assert Canary().due_at(replace(patient, progress_at=SENT_AT - 60.0), SENT_AT) == SENT_AT + 1.0


# Which canaries need a new connection.


@pytest.mark.parametrize("verdict", Verdict)
def test_a_suspicion_is_examined_on_a_new_connection(verdict: Verdict) -> None:
    """And a canary that timed out is repeated on one."""
    context = FakePatient(lambda _: Trouble.TIMEOUT, verdict=verdict)
    for _ in range(2):
        fly(context)
    assert [asked.fresh for asked in context.asked] == [verdict is not Verdict.UP, True]


def test_a_unit_whose_canaries_are_as_slow_though_clients_have_come_gets_the_time_from_then_on() -> None:
    def answer(_: str) -> Answer:
        context.now_s, context.in_flight = context.now_s + 30.0, 3
        return TOKEN

    context = FakePatient(answer, verdict=Verdict.STARTING)
    assert fly(context).sign is Sign.GOOD
    context.verdict = Verdict.UP
    assert canary_timeout_s(context) >= 30.0
