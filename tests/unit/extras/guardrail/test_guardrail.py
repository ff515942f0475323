"""The guardrail: what a screen lets through and when, the text of answers, and the example in deploy/."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from cellgate.extras.guardrail import guardrail_client
from cellgate.extras.guardrail.guardrail import Screen
from cellgate.extras.guardrail.guardrail_client import (
    ALLOWED,
    GUARDRAIL_FAILED,
    GuardAction,
    GuardrailVerdict,
    OnOpinion,
    WrittenText,
    written_in,
)
from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import Overrides
from cellgate.proxy.config.settings import GuardrailSettings
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.http.reply import CHUNKED, LAST_CHUNK, unframed

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
LINE_ENDS = (b"\n", b"\r\n", b"\r")
SECRET = "a secret"
DENIED = GuardrailVerdict(GuardAction.DENY, "it is one")


class Stage:
    """A screen, what its client got, and the clock and the hook that it has."""

    def __init__(self, mode: str, *, is_events: bool = True, is_chunked: bool = True, **options: Any) -> None:
        self.sent = self.wrote = b""
        self.finished = 0
        self.asked: list[dict[str, Any]] = []
        self.told: list[dict[str, Any]] = []
        self.is_held = False
        self.judge: Callable[[dict[str, Any]], GuardrailVerdict] = lambda _: ALLOWED
        self.stopped: Failure | None = None
        self._tells: list[OnOpinion] = []
        self._due: list[Callable[[], None]] = []
        self._is_chunked = is_chunked
        self._head = HEAD
        self._fail = options.get("fail", "closed")
        response = SimpleNamespace(begun=False, is_chunked=is_chunked, is_events=is_events, in_event=False)
        vars(response).update(route="chat", request_id=b"r", lines=b"")
        client = SimpleNamespace(peer="", secure=False, shows_internals=False, send=self._send)
        client.finish = self._finish
        exchange = SimpleNamespace(client=client, response=response, buffer_full=self._hold, stop=self._stop)
        hook = SimpleNamespace(ask=self._ask, failed=self._failed)
        loop = SimpleNamespace(call_later=self._later, call_soon=partial(self._later, 0.0))
        settings = GuardrailSettings("http://h:1/", answer=cast(Any, mode), **options)
        self.screen = Screen(cast(Any, exchange), cast(Any, hook), settings, cast(Any, loop), {})

    # -- what may happen -----------------------------------------------------------------------------------

    def write(self, body: bytes, cuts: tuple[int, ...] = ()) -> None:
        """The unit writes, in chunks that end there as well."""
        begun, self._head = self._head, b""
        ends = (*sorted(cut for cut in cuts if 0 < cut < len(body)), len(body))
        parts = [body[one:end] for one, end in zip((0, *ends), ends, strict=False)]
        self._put(begun + (b"".join(map(CHUNKED.frame, parts)) if self._is_chunked else body))

    def end(self) -> None:
        """The unit ends its answer."""
        if self._is_chunked:
            self._put(LAST_CHUNK)
        if self.stopped is None:
            self.screen.finish(cast(Any, None), keep_alive=True)

    def pass_time(self) -> None:
        """What is due is done."""
        due, self._due = self._due, []
        for each in due:
            each()

    def tell(self) -> None:
        """The verdict comes."""
        if self._tells:
            self.told.append(asked := self.asked[len(self.told)])
            self._tells.pop(0)(self.judge(asked))

    def settle(self) -> None:
        """Time passes and verdicts come, until nothing is left to do."""
        while self._tells or self._due:
            self.pass_time()
            self.tell()

    # -- what was seen -------------------------------------------------------------------------------------

    @property
    def body(self) -> bytes:
        """What the client got behind the head."""
        body = self.sent.removeprefix(HEAD)
        return unframed(body)[0] if self._is_chunked else body

    @property
    def judged(self) -> str:
        """The text that has a verdict."""
        return "".join(asked["text"] for asked in self.told)

    # -- inside --------------------------------------------------------------------------------------------

    def _put(self, data: bytes) -> None:
        if self.stopped is None:
            self.wrote += data
            self.screen.send(data)

    def _send(self, data: bytes) -> None:
        self.sent += data

    def _finish(self, _request: object, *, keep_alive: bool) -> None:
        self.finished += 1

    def _hold(self, held: bool) -> None:
        self.is_held = held

    def _stop(self, failure: Failure) -> None:
        self.stopped = failure

    def _failed(self, _phase: str, _how: str) -> GuardrailVerdict | Failure:
        return ALLOWED if self._fail == "open" else GUARDRAIL_FAILED

    def _ask(self, _phase: str, about: dict[str, Any], name: str, content: bytes, tell: OnOpinion) -> None:
        self.asked.append({**about, name: orjson.loads(content)})
        self._tells.append(tell)

    def _later(self, _delay: float, call: Callable[..., None], *args: object) -> SimpleNamespace:
        due = partial(call, *args)
        self._due.append(due)

        def cancel() -> None:
            self._due = [each for each in self._due if each is not due]

        return SimpleNamespace(cancel=cancel)


# Streams at random


def written(text: str, rng: Random, end: bytes) -> bytes:
    """An event that says this, spelled in one of many ways."""
    is_tool = rng.random() < 0.3
    delta = {"tool_calls": [{"function": {"arguments": text}}]} if is_tool else {"content": text}
    data = orjson.dumps({"id": "x", "choices": [{"index": 0, "delta": delta}]})
    if rng.random() < 0.2:
        # Data of several lines are one.
        one, colon, other = data.partition(b'"choices":')
        data = one + colon + end + b"data: " + other
    named = b"event: message" + end if rng.random() < 0.3 else b""
    return named + rng.choice((b"data: ", b"data:")) + data + end


def make_stream(rng: Random) -> tuple[list[bytes], list[str]]:
    """The events of a stream, and the text of each."""
    events, texts = [], []
    for number in range(rng.randrange(1, 12)):
        end, kind = rng.choice(LINE_ENDS), rng.random()
        text = ""
        if kind < 0.1:
            event = b": a comment" + end
        elif kind < 0.2:
            event = b'data: {"choices":[{"delta":{"role":"assistant"}}]}' + end
        else:
            text = f"<{number}:{'x' * rng.choice((0, 3, 40, 40, 40, 20_000))}>"
            event = written(text, rng, end)
        events.append(event + end)
        texts.append(text)
    if rng.random() < 0.2:
        # The last one is not complete.
        events[-1] = events[-1].rstrip(b"\r\n")
    elif rng.random() < 0.5:
        events.append(b"data: [DONE]\n\n")
        texts.append("")
    return events, texts


def pieces_of(stream: bytes, rng: Random) -> list[bytes]:
    """The same, cut anywhere."""
    pieces = []
    while stream:
        size = rng.choice((1, 2, 3, 7, 60, 60, 5000, 5000, 30_000))
        pieces.append(stream[:size])
        stream = stream[size:]
    return pieces


def check_sent(stage: Stage, events: list[bytes], texts: list[str]) -> None:
    """Every event of which the client has a byte was judged with its whole text."""
    assert b"".join(events).startswith(stage.body)
    at, text = 0, ""
    for event, its_text in zip(events, texts, strict=True):
        if its_text:
            text += its_text
            # A line end before an event belongs to the one before.
            assert at + 1 >= len(stage.body) or stage.judged.startswith(text)
        at += len(event)


def play(stage: Stage, rng: Random, pieces: list[bytes], check: Callable[[], None]) -> None:
    """The unit writes these, while time passes and verdicts come, in any order."""
    for piece in pieces:
        stage.write(piece, tuple(rng.sample(range(1, 60), rng.randrange(3))))
        check()
        while rng.random() < 0.3:
            rng.choice((stage.pass_time, stage.tell))()
            check()
    stage.end()
    check()
    stage.settle()


@pytest.mark.parametrize("mode", ["windows", "whole"])
@pytest.mark.parametrize("seed", range(30))
def test_no_byte_of_an_event_is_sent_before_a_verdict_on_all_of_it(seed: int, mode: str) -> None:
    rng = Random(seed)
    events, texts = make_stream(rng)
    stage = Stage(mode, window_bytes=rng.choice((1, 50, 2048)), is_chunked=rng.random() < 0.8)
    comes_whole = rng.random() < 0.25
    pieces = events if comes_whole else pieces_of(b"".join(events), rng)
    play(stage, rng, pieces, lambda: check_sent(stage, events, texts))
    assert stage.body == b"".join(events)
    assert stage.sent == stage.wrote or not comes_whole, "events that come whole are sent as they came"
    assert "".join(asked["text"] for asked in stage.asked) == "".join(texts)
    assert (stage.finished, stage.is_held, stage.stopped) == (1, False, None)
    assert mode == "windows" or len(stage.asked) == 1


@pytest.mark.parametrize("mode", ["windows", "whole"])
@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_sent_of_an_event_that_is_denied(seed: int, mode: str) -> None:
    rng = Random(seed)
    events, _ = make_stream(rng)
    # Not behind the last one: if that is a comment that does not end, whatever follows belongs to it.
    at = rng.randrange(len(events))
    end = rng.choice(LINE_ENDS)
    events.insert(at, written(SECRET * rng.choice((1, 3000)), rng, end) + end)
    stage = Stage(mode, window_bytes=rng.choice((1, 50, 2048)))
    stage.judge = lambda asked: DENIED if SECRET in asked["text"] else ALLOWED
    play(stage, rng, pieces_of(b"".join(events), rng), lambda: None)
    sent, _, error = stage.sent.partition(b"guardrail_denied")
    assert SECRET.encode() not in sent
    assert stage.stopped is not None or error
    before = b"".join(events[:at])
    assert stage.stopped is None or before.startswith(stage.body)


# What is large


def event_of(text: str, end: bytes = b"\n") -> bytes:
    return b"data: %b%b%b" % (orjson.dumps({"choices": [{"text": text}]}), end, end)


@pytest.mark.parametrize("end", LINE_ENDS)
def test_a_stream_that_is_held_above_its_bound_waits_for_a_verdict_and_goes_on(end: bytes) -> None:
    stage, event = Stage("windows"), event_of("x" * 60_000, end)
    wrote = 0
    for _ in range(10):
        while not stage.is_held:
            stage.write(event)
            wrote += 1
        assert len(event) * wrote - len(stage.body) <= 2 * LIMITS.guardrail_held_bytes
        stage.tell()
        assert stage.body
        while stage.is_held:
            stage.tell()
    stage.end()
    stage.settle()
    assert stage.body == event * wrote
    assert stage.judged == "x" * 60_000 * wrote


def test_events_without_text_are_not_held_for_ever() -> None:
    stage, event = Stage("windows"), b'data: {"choices":[],"usage":{"a":"%b"}}\n\n' % (b"x" * 30_000)
    for _ in range(100):
        stage.write(event)
    assert (stage.asked, stage.is_held) == ([], False)
    assert stage.body.startswith(event)


@pytest.mark.parametrize("fail", ["open", "closed"])
def test_of_an_event_that_cannot_be_held_nothing_is_sent_unless_the_rule_says_so(fail: Any) -> None:
    stage = Stage("windows", fail=fail, window_bytes=1)
    event, part = event_of("x" * (LIMITS.guardrail_held_bytes + 200_000)), 50_000
    stage.write(event_of("first"))
    stage.tell()
    first = stage.body
    for at in range(0, len(event), part):
        stage.write(event[at : at + part])
        assert stage.body == first
    assert stage.is_held
    stage.pass_time()
    if fail == "closed":
        assert (stage.stopped, stage.body) == (GUARDRAIL_FAILED, first)
        return
    stage.write(event_of("next"))
    assert not stage.body.endswith(event_of("next"))
    stage.end()
    stage.settle()
    assert stage.body == first + event + event_of("next")
    assert stage.judged == "firstnext"


# What is no stream


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"choices":[{"text":"a secret"}]}', "body"),
        (b'{"choices":[{"text":"a secret"', "text"),
        (b' [{"logprob":NaN,"text":"a secret"}]', "text"),
    ],
)
def test_a_plain_answer_is_shown_even_if_it_is_damaged_json(body: bytes, name: str) -> None:
    stage = Stage("whole", is_events=False, is_chunked=False)
    stage.write(body[:9])
    stage.write(body[9:])
    assert stage.sent == b""
    stage.end()
    assert [name in asked for asked in stage.asked] == ([True] if name else [])
    assert all(SECRET in str(asked[name]) for asked in stage.asked)
    stage.settle()
    assert (stage.body, stage.finished) == (body, 1)


@pytest.mark.parametrize(
    ("body", "is_events"),
    [(b"\xff\xf3 sound", False), (b'data: {"choices":[{"index":0,"token_ids":[1,2]}]}\n\n', True)],
)
def test_what_cannot_be_read_is_refused_where_all_must_be_seen(body: bytes, is_events: bool) -> None:
    stage = Stage("windows", is_events=is_events, is_chunked=False)
    stage.write(body)
    stage.end()
    stage.settle()
    assert stage.asked == []
    assert body not in stage.body
    assert b"guardrail_failed" in stage.body


# The text of answers, as the four APIs write it.


def events(*values: object) -> bytes:
    """An event for each; bytes stand there as they are."""
    data = (value if isinstance(value, bytes) else orjson.dumps(value) for value in values)
    return b"".join(b"event: x\ndata: %b\n\n" % each for each in data)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([{"choices": [{"delta": {"role": "assistant"}}]}], ""),
        ([{"choices": [{"delta": {"content": "a"}}, {"delta": {"reasoning_content": "b"}}]}], "ab"),
        ([{"choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}}]}], "f{x"),
        ([{"choices": [{"text": "plain"}]}], "plain"),
        ([{"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hi"}}], "hi"),
        ([{"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}}], "{"),
        ([{"type": "response.output_text.delta", "delta": "re"}], "re"),
        ([{"type": "response.output_text.delta", "delta": "re"}, {"type": "x.done", "text": "re"}], "re"),
        ([{"type": "response.output_text.done", "text": "never shown"}], "never shown"),
        ([{"model_name": "m", "text_output": "triton"}], "triton"),
        ([{"token": {"id": 3, "text": "tgi", "logprob": 0.1}, "generated_text": None}], "tgi"),
        ([{"model": "m", "response": "ollama", "done": False}], "ollama"),
        ([{"message": {"role": "assistant", "content": "chat"}}], "chat"),
        ([{"choices": [{"delta": {"refusal": "no"}}]}], "no"),
        ([{"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "hm"}}], "hm"),
        ([{"type": "response.custom_tool_call_input.delta", "delta": "rm -rf"}], "rm -rf"),
        ([{"type": "response.audio_transcript.delta", "delta": "said"}], "said"),
        ([{"type": "content_block_start", "content_block": {"type": "tool_use", "name": "f"}}], "f"),
        ([{"choices": [{"delta": {"annotations": [{"url_citation": {"title": "t"}}]}}]}], "t"),
        ([{"a": {"field": "that nobody knows"}}], "that nobody knows"),
        ([{"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [0.1]}}]}], "a"),
        ([{"choices": [{"delta": {}, "logprobs": {"content": [{"token": "alone"}]}}]}], "alone"),
        ([{"id": "x" * 300}], "x" * 300),
        ([{"choices": [{"delta": {"content": "a"}, "token_ids": [1]}]}], "a"),
        ([b"{broken"], "{broken"),
    ],
)
def test_what_a_model_wrote_is_found(values: list[object], text: str) -> None:
    """Tokens beside their text are read with it; what is not understood is shown as it is."""
    written = written_in(events(*values) + b"data: [DONE]\n\n")
    assert ("".join((*written.run, *written.beside)), written.is_unread) == (text, False)


@pytest.mark.parametrize(
    "data",
    [
        events({"choices": [{"index": 0, "token_ids": [1, 2]}]}),
        events({"output_ids": [3], "meta_info": {"id": "a"}}),
        events({"token": {"id": 1}, "ids": [[4]]}),
        events({"choices": [{"delta": {"audio": {"data": "UklGRg=="}}}]}),
        events({"type": "response.audio.delta", "delta": "UklGRg=="}),
        events({"b64_json": "iVBORw0KGgo="}),
        b"\x1f\x8b\x08\x00\xff\xfe",
    ],
)
def test_what_is_no_text_cannot_be_read(data: bytes) -> None:
    assert written_in(data).is_unread


def test_events_in_parts_are_read_whole() -> None:
    written = WrittenText(has_head=True, is_chunked=True, is_events=True)
    event = events({"choices": [{"text": "whole"}]})
    written.feed(b"HTTP/1.1 200 OK\r\n\r\n%x\r\n%b\r\n" % (9, event[:9]))
    assert written.take().run == []
    written.feed(b"%x;q=1\r\n%b\r\n0\r\n\r\n" % (len(event) - 9, event[9:]))
    assert (written.size, written.take().run) == (5, ["whole"])


# The guardrail in deploy/: what it finds, and what it answers.

FOLDER = Path(__file__).parents[4] / "deploy" / "guardrail"


@pytest.fixture(scope="module")
def example() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(FOLDER / "guardrail.py")))


def test_requests_are_changed_and_answers_denied(example: SimpleNamespace) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "I am jo@x.org, card 4111 1111 1111 1111."}],
    }
    told = example.verdict({"phase": "request", "body": body}, example.by_patterns)
    assert (told["action"], told["body"]["model"]) == ("change", "m")
    assert told["body"]["messages"][0]["content"] == "I am <EMAIL>, card <CARD>."
    asked = {"phase": "answer", "context": "write to jo@", "text": "x.org", "final": True}
    assert example.verdict(asked, example.by_patterns) == {"action": "deny", "reason": "it has EMAIL"}
    whole = {"phase": "answer", "body": {"choices": [{"message": {"content": "no data"}}]}}
    for plain in ({"phase": "request", "body": {"prompt": "order 4111 1111 1111 1112"}}, whole):
        assert example.verdict(plain, example.by_patterns) == {"action": "allow"}


def test_finds_that_overlap_are_replaced_once(example: SimpleNamespace) -> None:
    text = "pay DE12 4111 1111 1111 1111 to jo@x.org and 5 more"
    assert {"IBAN", "CARD"} <= {name for _, _, name in example.by_patterns(text)}
    assert example.masked(text, example.by_patterns) == "pay <IBAN> to <EMAIL> and 5 more"
    parts = [(4, 9, "B"), (2, 6, "A"), (9, 11, "C")]
    assert example.masked("0123456789abc", lambda _: parts) == "01<A><C>bc"


def test_its_configuration_is_valid() -> None:
    settings = load(str(FOLDER / "cellgate.yaml"), Overrides())
    assert settings.guardrail is not None
    assert (settings.guardrail.answer, settings.guardrail.target) == ("windows", "/check")


# What a guardrail is not asked: what is too large, and more than there may be at one time.

BOUND = 100


class Question:
    """A hook whose server never answers."""

    def __init__(self, fail: Any = "closed") -> None:
        self.told: list[GuardrailVerdict | Failure] = []
        self.taken = 0
        pool = SimpleNamespace(lines=b"", take=self._take, cancel=lambda _: None)
        handle = SimpleNamespace(cancel=lambda: None)
        loop = SimpleNamespace(call_later=lambda *_: handle, call_soon=self._soon)
        settings = GuardrailSettings("http://h:1/", fail=fail)
        self.hook = guardrail_client.Hook(settings, cast(Any, pool), cast(Any, loop))

    def ask(self, size: int, payer: str = "") -> Callable[[], None]:
        """Ask about so many bytes."""
        return self.hook.ask("request", {}, "body", b"1" * size, self.told.append, payer=payer)

    def _take(self, _call: object, *, fresh: bool) -> None:
        self.taken += 1

    def _soon(self, call: Callable[..., None], *args: object) -> SimpleNamespace:
        call(*args)
        return SimpleNamespace(cancel=lambda: None)


@pytest.fixture
def _bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = replace(LIMITS, guardrail_body_bytes=BOUND, guardrail_bytes=2 * BOUND + 50, guardrail_calls=5)
    monkeypatch.setattr(guardrail_client, "LIMITS", bounds)


@pytest.mark.usefixtures("_bounds")
def test_all_questions_together_are_bounded_until_they_are_over() -> None:
    here = Question()
    stop = here.ask(BOUND)
    here.ask(BOUND)
    here.ask(BOUND)
    assert here.told == [GUARDRAIL_FAILED]
    for _ in range(2):
        stop()
        assert here.hook.bytes == BOUND
    here.ask(BOUND)
    assert (len(here.told), here.taken) == (1, 3)
    here = Question()
    for _ in range(6):
        here.ask(1)
    assert (here.told, here.taken) == ([GUARDRAIL_FAILED], 5), "so is their number"


def test_one_payer_leaves_room_for_the_questions_of_others() -> None:
    here = Question()
    for _ in range(1000):
        here.ask(1, "greedy")
    assert here.taken == LIMITS.guardrail_calls // 2
    for payer in ("a", "b"):
        told = len(here.told)
        for _ in range(20):
            here.ask(1, payer)
        assert len(here.told) == told, "each of them is asked"
