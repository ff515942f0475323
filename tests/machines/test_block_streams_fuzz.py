"""Streams of `/v1/messages` and `/v1/responses` break anywhere, twice: the client reads one answer.

A unit says the words that follow what it is given, as greedy engines do. Its bytes arrive in any pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.proxy.http.errors import Failure
from cellgate.proxy.http.sse import payload, split
from cellgate.proxy.resume.blocks import BlockJoiner, BlockTranscript, Dialect, last_of
from cellgate.proxy.resume.messages import Messages
from cellgate.proxy.resume.proof import Tokens
from cellgate.proxy.resume.replay import EventFilter, ReplayBuffer
from cellgate.proxy.resume.responses import Responses
from cellgate.proxy.resume.shown import MismatchError
from cellgate.proxy.resume.streams import STREAMS
from loadtests.simunit.blocks import BlockSpeaker, MessagesSpeaker, ResponsesSpeaker

PROMPT = 7
DIALECTS: dict[str, Dialect] = {"messages": Messages(), "responses": Responses()}
WORDS = st.lists(st.sampled_from([" a", " bc", "\n\n", "é", ' "', "\\", " data:"]), min_size=1, max_size=30)
CALLS = st.none() | st.lists(st.sampled_from(['{"city":', ' "Rome"', "}"]), max_size=4)


class Answer(NamedTuple):
    """What greedy units say; `call` are the arguments of a tool that is called after the text."""

    words: list[str]
    call: list[str] | None
    finish: str


def speaker(dialect: str, unit: str, prompt: int) -> BlockSpeaker:
    if dialect == "messages":
        return MessagesSpeaker(unit, "tiny", prompt)
    return ResponsesSpeaker(unit, "tiny", prompt)


def events_of(dialect: str, unit: str, answer: Answer, given_words: int = 0) -> list[bytes]:
    """The events of a unit that has so many of the words in its prompt."""
    one, words = speaker(dialect, unit, PROMPT + given_words), answer.words[given_words:]
    events = [*one.accept(), *one.begin()]
    for word in words:
        events += one.word(word)
    if answer.call is not None:
        events += one.call("weather", answer.call)
    said = len(words) + len(answer.call or ())
    return events + one.end("tool_calls" if answer.call is not None else answer.finish, said)


class Client:
    """Reads what the gate sends of one answer."""

    def __init__(self, dialect: str) -> None:
        self.replay = ReplayBuffer(framed=False, ways=3, shape=STREAMS[dialect].shape)
        self.sent = b""

    def get(self, events: bytes) -> None:
        self.sent += events
        self.replay.chunks.append(events)
        if len(self.sent) % 3 == 0:
            # What was kept is folded anywhere.
            self.replay.read()

    @property
    def shown(self) -> BlockTranscript:
        shown = self.replay.read()
        assert isinstance(shown, BlockTranscript)
        return shown


def relay(passage: EventFilter, client: Client, pieces: Sequence[bytes], *, ended: bool) -> Failure | None:
    """Pass on what arrives; what is stitched is in the transcript already."""
    for piece in pieces:
        events, failure = passage.feed(piece, ended=False)
        if passage.joiner is None:
            client.get(events)
        else:
            client.sent += events
        if failure is not None:
            return failure
    return passage.feed(b"", ended=True)[1] if ended else None


def pieces_of(stream: bytes, data: st.DataObject) -> list[bytes]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12), "cuts"))
    return [stream[one:other] for one, other in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


def documents(stream: bytes) -> list[dict[str, Any]]:
    events, rest = split(stream)
    assert not rest
    found = [orjson.loads(body) for event in events if (body := payload(event))]
    for event, document in zip([each for each in events if payload(each)], found, strict=True):
        assert event.startswith(b"event: %b\n" % document["type"].encode())
    return found


def nameless(document: Any, names: dict[str, str]) -> Any:
    """A document whose names are numbered as they come: two answers differ in nothing else."""
    if isinstance(document, dict):
        # Only the unit that ended the answer knows the details of its usage.
        known = {key: value for key, value in document.items() if not key.endswith("_tokens_details")}
        return {key: nameless(value, names) for key, value in known.items()}
    if isinstance(document, list):
        return [nameless(each, names) for each in document]
    if isinstance(document, str) and "-unit" in document:
        return names.setdefault(document, f"name {len(names)}")
    return document


def merged(stream: bytes) -> list[Any]:
    """The events of a stream; pieces that follow each other in one block are one."""
    out: list[Any] = []
    names: dict[str, str] = {}
    for number, document in enumerate(documents(stream)):
        assert document.get("sequence_number", number) == number
        document.pop("sequence_number", None)
        if document["type"] == "response.in_progress":
            # It says nothing; the gate sends it only once.
            continue
        document = nameless(document, names)
        delta = document.get("delta")
        key = next((k for k in ("text", "partial_json") if isinstance(delta, dict) and k in delta), "delta")
        holder = delta if key != "delta" else document
        last = out[-1] if out else {}
        if isinstance(holder.get(key), str) and last.get("type") == document["type"]:
            before = last["delta"] if key != "delta" else last
            before[key] += holder[key]
        else:
            out.append(document)
    return out


def resume(
    dialect: str, client: Client, answer: Answer, *, again: bool
) -> tuple[BlockJoiner, list[bytes]] | None:
    """What the next unit is asked, and says; None: the gate ended the answer."""
    shown, unit = client.shown, f"unit{len(client.sent)}"
    text = shown.text
    if shown.is_done or shown.finish:
        if not shown.is_done:
            client.get(last_of(DIALECTS[dialect], shown, None))
        return None
    if again or not text:
        return BlockJoiner(DIALECTS[dialect], shown, None), events_of(dialect, unit, answer)
    said = sum(1 for at in range(len(answer.words)) if len("".join(answer.words[: at + 1])) <= len(text))
    if answer.finish == "length" and answer.call is None and said == len(answer.words):
        client.sent += last_of(DIALECTS[dialect], shown, Tokens(PROMPT, said))
        return None
    stitch = BlockJoiner(DIALECTS[dialect], shown, Tokens(PROMPT, said), len(text))
    return stitch, events_of(dialect, unit, answer, said)


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=150)
@given(
    answer=st.builds(Answer, WORDS, CALLS, st.sampled_from(["length", "stop"])),
    again=st.lists(st.booleans(), min_size=2, max_size=2),
    data=st.data(),
)
def test_a_continued_answer_is_the_answer_of_one_unit(
    dialect: str, answer: Answer, again: list[bool], data: st.DataObject
) -> None:
    client, passage = Client(dialect), EventFilter()
    stream = b"".join(events_of(dialect, "unit", answer))
    for is_again in again:
        at = data.draw(st.integers(0, len(stream)), "breaks at")
        relay(passage, client, pieces_of(stream[:at], data), ended=False)
        following = resume(dialect, client, answer, again=is_again)
        if following is None:
            break
        passage = EventFilter()
        passage.joiner, events = following
        stream = b"".join(events)
    else:
        assert relay(passage, client, pieces_of(stream, data), ended=True) is None
    assert merged(client.sent) == merged(b"".join(events_of(dialect, "unit", answer)))


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=100)
@given(
    answer=st.builds(Answer, WORDS, CALLS, st.just("length")),
    other=st.builds(Answer, WORDS, CALLS, st.just("length")),
    data=st.data(),
)
def test_a_unit_that_says_something_else_than_was_shown_is_found_out(
    dialect: str, answer: Answer, other: Answer, data: st.DataObject
) -> None:
    client = Client(dialect)
    stream = b"".join(events_of(dialect, "unit", answer))
    relay(EventFilter(), client, [stream[: data.draw(st.integers(0, len(stream) - 1))]], ended=False)
    stitch = BlockJoiner(DIALECTS[dialect], client.shown, None)
    try:
        client.sent += stitch.feed(b"".join(events_of(dialect, "unit2", other)))
    except MismatchError as error:
        client.sent += error.shown
    if stitch.is_over:
        # It has repeated all that was shown, so the answer is its own.
        assert merged(client.sent) == merged(b"".join(events_of(dialect, "unit", other)))
