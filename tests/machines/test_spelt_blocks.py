"""The same law for answers of blocks, `/v1/messages` and `/v1/responses`: these tell no token ids.

The engine is that of test_spelt_streams.py, its events are as vLLM writes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.http.sse import payload, split
from cellgate.proxy.resume.blocks import BlockTranscript, last_of
from cellgate.proxy.resume.chat import NextPart
from cellgate.proxy.resume.proof import UnprovenError
from cellgate.proxy.resume.replay import EventRewriter, ReplayBuffer
from cellgate.proxy.resume.shown import MismatchError
from cellgate.proxy.resume.streams import BLOCK_APIS, STREAMS, BlockApi, next_part
from loadtests.simunit.blocks import BlockSpeaker, MessagesSpeaker, ResponsesSpeaker
from tests.machines.test_spelt_streams import WORDS, Engine, proven
from tests.machines.test_wire_fuzz import fuzz

CONTEXT_TOKENS = 60
"""Of prompt and answer together, where no limit is asked for."""


class Told(NamedTuple):
    """An event, and how many tokens were generated when it came."""

    event: bytes
    tokens: int


def chat_of(body: dict[str, Any]) -> dict[str, Any]:
    """What the engine makes of a request."""
    said = body["input"] if "input" in body else body["messages"][0]["content"]
    kept = {name: body[name] for name in ("temperature", "kv_transfer_params") if name in body}
    chat = kept | {"messages": [{"role": "user", "content": said}]}
    room = CONTEXT_TOKENS - len(Engine("vllm").prompt_of(chat))
    return chat | {"max_tokens": body.get("max_output_tokens", body.get("max_tokens", room))}


def answer(engine: Engine, body: dict[str, Any]) -> list[Told]:
    """The events of its answer."""
    chat = chat_of(body)
    ids, shown, finish = engine.said(chat)
    prompt = len(engine.prompt_of(chat))
    one: BlockSpeaker = (
        ResponsesSpeaker(engine.luck, "m", prompt)
        if "input" in body
        else MessagesSpeaker(engine.luck, "m", prompt)
    )
    told = [Told(each, 0) for each in [*one.accept(), *one.begin()]]
    at = number = 0
    while at < len(ids):
        upto = min(at + engine.sizes[number % len(engine.sizes)], len(ids))
        # Events without a text are none.
        text = "".join(shown[at:upto])
        *before, last = one.word(text) if text else [b""]
        told += [*(Told(each, at) for each in before), *([Told(last, upto)] if last else [])]
        at, number = upto, number + 1
    tells = ("message_delta", "message_stop", "response.completed")
    for each in one.end(finish, len(ids)):
        # That a text has ended shows nothing of the token that ended it.
        is_told = orjson.loads(payload(each) or b"{}")["type"] in tells
        told.append(Told(each, len(ids) if is_told else told[-1].tokens))
    return told


class Read(NamedTuple):
    """What a client reads."""

    text: str
    end: str
    tokens: int
    prompt: int


def read(stream: bytes) -> Read:
    text = end = ""
    tokens = prompt = -1
    events, rest = split(stream)
    assert not rest
    for each in events:
        document = orjson.loads(payload(each) or b"{}")
        match document.get("type"):
            case "content_block_delta":
                text += document["delta"]["text"]
            case "response.output_text.delta":
                text += document["delta"]
            case "message_delta":
                end, usage = document["delta"]["stop_reason"], document["usage"]
                tokens, prompt = usage["output_tokens"], usage["input_tokens"]
            case "response.completed":
                response = document["response"]
                end, usage = response["status"], response["usage"]
                tokens, prompt = usage["output_tokens"], usage["input_tokens"]
                assert usage["total_tokens"] == tokens + prompt
                whole = "".join(part["text"] for item in response["output"] for part in item["content"])
                assert whole == text
    assert document["type"] in ("message_stop", "response.completed")
    return Read(text, end, tokens, prompt)


def texts(stream: bytes) -> list[str]:
    """The texts of events."""
    documents = [orjson.loads(payload(each) or b"{}") for each in split(stream)[0]]
    deltas = [each.get("delta") for each in documents if "delta" in each["type"]]
    return [each if isinstance(each, str) else each["text"] for each in deltas if "stop_reason" not in each]


class Broken:
    """A stream that its units break one after the other. `lost`: why nobody could resume it; `generated`:
    the tokens of what was shown, where none was generated twice.
    """

    def __init__(self, body: dict[str, Any], api: BlockApi) -> None:
        self.body, self.api = body, api
        self.asked = body
        ways = api.fields.ways_of(body)
        self.replay = ReplayBuffer(framed=False, ways=ways, shape=STREAMS[api.dialect.name].shape)
        self.lost = ""
        self.sent = b""
        self.generated = 0
        self.joiner: EventRewriter | None = None
        self.is_countable = True
        """Whether one can know how many: events of several tokens may look as if each had one."""

    def transcript(self) -> BlockTranscript:
        shown = self.replay.read()
        assert isinstance(shown, BlockTranscript)
        return shown

    def take(self, engine: Engine, upto: int) -> bool:
        """A unit answers up to this event; whether that was all."""
        told = answer(engine, self.asked)
        before = self.generated
        for event, tokens in told[:upto]:
            if self.joiner is None:
                self.replay.chunks.append(event)
                self.sent += event
            else:
                try:
                    self.sent += self.joiner.feed(event)
                except MismatchError as error:
                    self.lost = str(error)
                    return False
            self.generated = before + tokens
            if self.joiner is not None and self.joiner.is_over:
                return True
        return upto >= len(told)

    def resume(self, engine: Engine) -> bool:
        """Another unit goes on; False: nothing is left, or nobody can."""
        if engine.sizes != (1,):
            self.is_countable = self.is_countable and not engine.are_its_tokens(texts(self.sent))
        shown = self.transcript()
        if shown.is_done:
            return False
        if shown.finish:
            self.sent += last_of(self.api.dialect, shown, None)
            return False
        path = f"/v1/{self.api.dialect.name}".encode()
        try:
            found = proven(
                next_part(self.api, self.body, orjson.dumps(self.body), path, shown, engine.name), engine
            )
        except UnprovenError as error:
            self.lost = str(error)
            return False
        if isinstance(found, bytes):
            self.sent += found
            return False
        assert isinstance(found, NextPart)
        self.asked, self.joiner = orjson.loads(found.body), found.joiner
        if self.asked == self.body:
            self.generated = 0
        return True


def broken(body: dict[str, Any], api: BlockApi, engines: list[Engine], cuts: list[int]) -> Broken:
    stream = Broken(body, api)
    for engine, cut in zip(engines, [*cuts, 10**6], strict=True):
        if stream.sent and not stream.resume(engine):
            break
        if stream.take(engine, cut) or stream.lost:
            break
    return stream


def asked(dialect: str, prompt: str, limit: int | None, *, greedy: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"temperature": 0} if greedy else {}
    if dialect == "responses":
        return body | {"input": prompt} | ({} if limit is None else {"max_output_tokens": limit})
    return body | {"messages": [{"role": "user", "content": prompt}], "max_tokens": limit or 40}


def limit_of(body: dict[str, Any]) -> int:
    return int(chat_of(body)["max_tokens"])


@pytest.mark.parametrize("dialect", ["messages", "responses"])
@fuzz(400)
@given(
    WORDS,
    st.none() | st.integers(1, 24),
    st.booleans(),
    st.sampled_from([(1,), (1, 2), (3, 1, 1)]),
    st.booleans(),
    st.lists(st.integers(1, 30), min_size=1, max_size=2),
)
def test_a_resumed_answer_of_blocks_is_as_long_as_asked_or_is_not_resumed(
    dialect: str,
    prompt: str,
    limit: int | None,
    greedy: bool,
    sizes: tuple[int, ...],
    odd: bool,
    cuts: list[int],
) -> None:
    body, api = asked(dialect, prompt, limit, greedy=greedy), BLOCK_APIS[dialect]
    # Of sampled answers only events tell how many tokens they have: each is text.
    engines = [Engine("vllm", f"u{number}", sizes, odd and greedy) for number in range(len(cuts) + 1)]
    stream = broken(body, api, engines, cuts)
    alone = read(b"".join(each.event for each in answer(engines[0], body)))
    if greedy:
        assert (stream.lost, read(stream.sent)) == ("", alone)
    elif stream.is_countable and not stream.lost:
        seen = read(stream.sent)
        assert (seen.tokens, seen.prompt) == (stream.generated, alone.prompt)
        # The token that ends an answer may be the last that was allowed.
        assert seen.end in ("completed", "end_turn") or seen.tokens == limit_of(body)
        assert seen.tokens <= limit_of(body)


@pytest.mark.parametrize("dialect", ["messages", "responses"])
def test_the_law_of_blocks_is_not_empty(dialect: str) -> None:
    """Sampled answers go on where they are spelt as the tokenizer does, and only there."""
    whole = lost = 0
    for number in range(60):
        body = asked(dialect, "a" * (1 + number), 12, greedy=False)
        stream = broken(body, BLOCK_APIS[dialect], [Engine("vllm", luck) for luck in "xy"], [7])
        whole, lost = whole + (not stream.lost), lost + bool(stream.lost)
    assert whole > 10
    assert lost > 10
