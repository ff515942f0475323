"""Answers that a model spells in other tokens than its tokenizer would: resumed, they are as long as asked.

The engine here generates ids, of which several spell the same text; its tokenizer knows one spelling of each.
What follows depends on the ids and not on the text, as in a model.
"""

from __future__ import annotations

import itertools
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.http.sse import payload, split
from cellgate.proxy.resume.chat import BrokenStream, NextPart, again, ending, ways_for
from cellgate.proxy.resume.eligible import TOKENS, stops_of, ways_of
from cellgate.proxy.resume.proof import ProofRequest, UnprovenError
from cellgate.proxy.resume.replay import EventRewriter, ReplayBuffer, plain
from cellgate.proxy.resume.shown import MismatchError
from cellgate.proxy.resume.transcript import TellingBody, asked_to_tell, can_tell
from tests.machines.test_wire_fuzz import fuzz

END = 0
PLAIN = ["", "<u>", "<a>", "a", "b", " ", "ab", "ba", " a", "a b", "aa", "bb ", "aab"]
BYTES = [b"\xc3", b"\xa9", "é".encode(), "aé".encode()]
"""Of which the first two are no text alone."""
STOPS = st.one_of(st.none(), st.sampled_from(["ab", "b a", "aab", "é"]))


class Engine(NamedTuple):
    """`name` as the gate knows it. `luck`: what a sampled answer depends on besides its tokens; `sizes`: how
    many tokens come in an event; `odd`: it has tokens that are no text alone.
    """

    name: str
    luck: str = ""
    sizes: tuple[int, ...] = (1,)
    odd: bool = False

    @property
    def vocabulary(self) -> list[bytes]:
        return [each.encode() for each in PLAIN] + (BYTES if self.odd else [])

    def text(self, ids: list[int]) -> str:
        return b"".join(self.vocabulary[each] for each in ids).decode("utf-8", "replace")

    def spelt(self, text: str) -> list[int]:
        """The one spelling that its tokenizer knows: always the longest token."""
        data, ids = text.encode(), []
        by_size = sorted(range(1, len(self.vocabulary)), key=lambda each: -len(self.vocabulary[each]))
        while data:
            ids.append(next((each for each in by_size if data.startswith(self.vocabulary[each])), 3))
            data = data[len(self.vocabulary[ids[-1]]) or 1 :]
        return ids

    def prompt_of(self, body: dict[str, Any]) -> list[int]:
        if ids := (body.get("kv_transfer_params") or {}).get("prompt_token_ids"):
            return list(ids)
        if "input" in body:
            body = {"messages": [{"role": "user", "content": body["input"]}]}
        if "messages" not in body:
            prompt = body["prompt"] if "prompt" in body else body["content"]
            return list(prompt) if isinstance(prompt, list) else self.spelt(prompt)
        *before, last = body["messages"]
        ids = [id for each in before for id in (1, *self.spelt(each["content"]))]
        if body.get("continue_final_message"):
            return [*ids, 2, *self.spelt(last["content"])]
        return [*ids, 1, *self.spelt(last["content"]), 2]

    def proof(self, question: ProofRequest) -> dict[str, Any]:
        """What it answers while a proof is made."""
        body = question.body
        if question.path == "/detokenize":
            return {"prompt": self.text(body["tokens"])}
        if question.path == "/tokenize":
            ids = self.prompt_of(body)
            # As a vocabulary of bytes shows them.
            strings = [self.vocabulary[each].decode("latin-1") for each in ids]
            return {"tokens": ids, "token_strs": strings, "max_model_len": 1000}
        if question.path == "/apply-template":
            return {"prompt": self.text(self.prompt_of(body))}
        if question.is_optional:
            return {}
        return {"usage": {"input_tokens": len(self.prompt_of(body))}}

    def said(self, body: dict[str, Any]) -> tuple[list[int], list[str], str]:
        """The ids of its answer, what is shown with each, and how it ends."""
        prompt, limit, stops = self.prompt_of(body), body.get("max_tokens", 16), stops_of(body)
        luck = "" if body.get("temperature") == 0 else self.luck
        hold = max(map(len, stops), default=1) - 1 if self.name == "vllm" else 0
        ids: list[int] = []
        shown: list[str] = []
        while True:
            state = blake2b(f"{luck} {prompt + ids}".encode(), digest_size=4).digest()
            ids.append(int.from_bytes(state, "big") % len(self.vocabulary))
            # A model neither speaks of roles nor says nothing.
            ids[-1] = 3 if ids[-1] in (1, 2) else ids[-1]
            text = self.text([each for each in ids if each != END])
            stop = next((stop for stop in stops if stop in text), None)
            finish = "stop" if stop or ids[-1] == END else "length" if len(ids) == limit else ""
            end = text.index(stop) if stop else len(text)
            if not finish:
                end = len(text.removesuffix("\ufffd")) if hold == 0 else max(0, len(text) - hold)
                end = min(end, len(text.removesuffix("\ufffd")))
            shown.append(text[sum(map(len, shown)) : end])
            if finish:
                return ids, shown, finish

    def generated(self, body: dict[str, Any], upto: int) -> int:
        """How many tokens so many events of its answer have brought."""
        return max((tokens for _, tokens in self.told(body)[:upto]), default=0)

    def answer(self, body: dict[str, Any]) -> list[bytes]:
        """The events of its answer to a chat or a completion."""
        return [event for event, _ in self.told(body)]

    def told(self, body: dict[str, Any]) -> list[tuple[bytes, int]]:
        """The same, each with the tokens that were generated when it was sent."""
        ids, shown, finish = self.said(body)
        prompt, chat, gives = self.prompt_of(body), "messages" in body, body.get("return_token_ids")
        options = body.get("stream_options") or {}
        frame = {"id": "x", "created": 1, "model": "m"}
        told: list[tuple[dict[str, Any], int]] = []
        if chat:
            first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            told.append((frame | {"choices": [first]} | ({"prompt_token_ids": prompt} if gives else {}), 0))
        # Its chats tell the end apart, without a usage, and nothing of what has no text.
        is_sglangs = chat and self.name == "sglang"
        at = 0
        for size in itertools.cycle(self.sizes):
            upto = min(at + size, len(ids))
            text, ends = "".join(shown[at:upto]), upto == len(ids) and not is_sglangs
            choice: dict[str, Any] = {"index": 0} | ({"delta": {"content": text}} if chat else {"text": text})
            choice |= {"logprobs": None, "finish_reason": finish if ends else None}
            choice |= {"token_ids": ids[at:upto]} if gives else {}
            if gives and not chat and not at:
                choice["prompt_token_ids"] = prompt
            if text or not is_sglangs:
                usage = counts(len(prompt), upto) if options.get("continuous_usage_stats") else None
                told.append((frame | {"choices": [choice]} | ({"usage": usage} if usage else {}), upto))
            at = upto
            if at == len(ids):
                break
        if is_sglangs:
            end = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish}
            told.append((frame | {"choices": [end]}, len(ids)))
        if options.get("include_usage"):
            told.append((frame | {"choices": [], "usage": counts(len(prompt), len(ids))}, len(ids)))
        events = [(b"data: %b\n\n" % orjson.dumps(each), tokens) for each, tokens in told]
        return [*events, (b"data: [DONE]\n\n", len(ids))]

    def are_its_tokens(self, pieces: list[str]) -> bool:
        """Whether the texts of events are just the tokens that its tokenizer makes of their whole."""
        whole = "".join(pieces)
        return pieces == [self.text([each]) for each in self.spelt(whole)]


def counts(prompt: int, said: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def read(events: bytes) -> tuple[str, dict[str, int] | None, list[str]]:
    """Text, usage and ends, as a client reads them; it has not asked for ids."""
    text, usage, ends = "", None, []
    assert b'"token_ids":[' not in events
    assert b'}],"usage":{' not in events
    assert events.endswith(b"data: [DONE]\n\n")
    for each in split(events)[0][:-1]:
        document = orjson.loads(payload(each) or b"{}")
        usage = document.get("usage") or usage
        for choice in document.get("choices", ()):
            text += choice.get("delta", choice).get("content") or choice.get("text") or ""
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, usage, ends


def pieces(events: bytes) -> list[str]:
    """The texts of events."""
    documents = [orjson.loads(payload(each) or b"{}") for each in split(events)[0]]
    choices = [each["choices"][0] for each in documents if each.get("choices")]
    return [text for each in choices if (text := each.get("delta", each).get("content") or each.get("text"))]


class Broken:
    """A stream that its units break one after the other. `lost`: nobody could resume it."""

    def __init__(self, body: dict[str, Any], engine: Engine) -> None:
        self.body, self.chat = body, "messages" in body
        ways = ways_of(body, chat=self.chat)
        engine_is, _, version = engine.name.partition(" ")
        route = "chat" if self.chat else "completions"
        sent, tells = orjson.dumps(body), can_tell(engine_is, version or "1.0", route)
        asked = asked_to_tell(sent, tells) if tells else TellingBody(sent, 0)
        self.asked = orjson.loads(asked.body)
        self.replay = ReplayBuffer(framed=False, ways=ways & ~TOKENS | asked.tells)
        self.shown = b""
        self.generated = 0
        """Tokens that its units have generated of what was shown, where nothing was generated twice."""
        self.joiner: EventRewriter | None = None
        self.lost = ""
        self.is_exact = True
        """Whether units have seen the tokens that were generated."""
        self.is_countable = True
        """Whether one can know how many were generated: not where nobody tells, and events of several tokens
        look as if each had one, such as that of "a" and "b" for "ab".
        """

    def take(self, engine: Engine, upto: int) -> bool:
        """A unit answers up to this event; whether that was all."""
        events = engine.answer(self.asked)
        self.generated += engine.generated(self.asked, upto)
        for each in events[:upto]:
            if self.joiner is None:
                log = self.replay.tokens
                event = log.strip(each) if log is not None else each
                self.replay.chunks.append(event)
            else:
                try:
                    event = self.joiner.feed(each)
                except MismatchError as error:
                    self.lost = str(error)
                    return False
            self.shown += event
            if self.joiner is not None and self.joiner.is_over:
                return True
        return upto >= len(events)

    def resume(self, engine: Engine) -> bool:
        """Another unit proves that it can go on; False: nothing is left, or nobody can."""
        if self.replay.tokens is None and engine.sizes != (1,):
            self.is_countable = self.is_countable and not engine.are_its_tokens(pieces(self.shown))
        transcript = plain(self.replay)
        if transcript.is_done:
            return False
        if transcript.finish and (last := ending(self.body, transcript, None, chat=self.chat)) is not None:
            self.shown += last
            return False
        stream = BrokenStream(
            self.body,
            orjson.dumps(self.body),
            b"/v1/chat/completions" if self.chat else b"/v1/completions",
            transcript,
            self.replay.ways,
            self.chat,
            engine.name.partition(" ")[0],
        )
        for make in ways_for(stream):
            try:
                found = proven(make(stream), engine)
            except UnprovenError as error:
                self.lost = self.lost or str(error)
                continue
            self.lost = ""
            if isinstance(found, bytes):
                self.shown += found
                return False
            self.asked, self.joiner = orjson.loads(found.body), found.joiner
            self.generated *= make is not again
            given = engine.prompt_of(self.asked)[len(engine.prompt_of(self.body)) :]
            self.is_exact = self.is_exact and given == engine.said(self.body)[0][: len(given)]
            return True
        return False


def proven(proof: Any, engine: Engine) -> NextPart | bytes | Any:
    answer = None
    while True:
        try:
            question = proof.send(answer)
        except StopIteration as end:
            return end.value
        answer = engine.proof(question)


BODIES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 24)},
    optional={
        "temperature": st.just(0),
        "stop": STOPS,
        "stream_options": st.just({"include_usage": True}),
    },
)
WORDS = st.text("ab ", min_size=1, max_size=6)


def broken(body: dict[str, Any], engines: list[Engine], cuts: list[int]) -> Broken:
    """The answer to `body`, which each engine but the last breaks at its cut."""
    stream = Broken(body, engines[0])
    for engine, cut in zip(engines, [*cuts, 10**6], strict=True):
        if (stream.joiner is not None or stream.shown) and not stream.resume(engine):
            break
        if stream.take(engine, cut) or stream.lost:
            break
    return stream


@fuzz(600)
@given(
    BODIES,
    st.sampled_from([("vllm", True), ("vllm", False), ("sglang", False)]),
    WORDS,
    st.sampled_from([(1,), (1, 2), (3, 1, 1)]),
    st.booleans(),
    st.lists(st.integers(1, 30), min_size=1, max_size=2),
)
def test_with_token_ids_a_resumed_answer_has_the_text_the_usage_and_the_end_of_one_that_did_not_break(
    body: dict[str, Any],
    engine: tuple[str, bool],
    prompt: str,
    sizes: tuple[int, ...],
    odd: bool,
    cuts: list[int],
) -> None:
    name, chat = engine
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    engines = [Engine(name, f"u{number}", sizes, odd) for number in range(len(cuts) + 1)]
    check(body, engines, broken(body, engines, cuts))


@fuzz(800)
@given(
    BODIES,
    st.sampled_from([("sglang", True), *itertools.product(["llamacpp", "vllm 0.10"], [True, False])]),
    WORDS,
    st.sampled_from([(1,), (1, 2), (3, 1, 1), (2,)]),
    st.lists(st.integers(1, 30), min_size=1, max_size=2),
)
def test_without_ids_it_is_counted_by_what_each_event_tells_or_not_resumed(
    body: dict[str, Any], engine: tuple[str, bool], prompt: str, sizes: tuple[int, ...], cuts: list[int]
) -> None:
    """llama.cpp sends each token in an event of its own."""
    name, chat = engine
    sizes = (1,) if name == "llamacpp" else sizes
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body.pop("stop", None)
    engines = [Engine(name, f"u{number}", sizes) for number in range(len(cuts) + 1)]
    stream = broken(body, engines, cuts)
    check(body, engines, stream, is_exact=stream.is_exact)


def check(body: dict[str, Any], engines: list[Engine], stream: Broken, *, is_exact: bool = True) -> None:
    """A greedy answer is the one of a unit alone; a sampled one is as long as it says, or is not resumed.
    `is_exact`: units have seen the tokens that were generated, and not as many others of the same text.
    """
    alone = Engine(*engines[0]).answer(body)
    if body.get("temperature") == 0:
        # Whoever was given other tokens may have gone on otherwise, which no third unit repeats.
        assert stream.lost == "" or not (is_exact or len(engines) == 2)
        if is_exact:
            assert read(stream.shown) == read(b"".join(alone))
            return
    if stream.lost:
        return
    if not stream.is_countable:
        return
    _, usage, ends = read(stream.shown)
    assert len(ends) == 1
    if usage is not None and not engines[0].odd and "stop" not in body:
        assert usage["completion_tokens"] == stream.generated
        assert (ends == ["length"]) == (stream.generated == body["max_tokens"]) or ends == ["stop"]


def test_chats_that_tell_how_many_tokens_there_are_go_on_with_several_in_an_event() -> None:
    """Of sampled answers, most are not spelt as the tokenizer would."""
    whole = odd = 0
    for number in range(60):
        body = {"max_tokens": 12, "stream_options": {"include_usage": True}}
        body |= {"messages": [{"role": "user", "content": "a" * (1 + number)}]}
        engines = [Engine("sglang", luck, (1, 2)) for luck in "xy"]
        stream = broken(body, engines, [4])
        if stream.lost:
            continue
        text, usage, _ = read(stream.shown)
        assert usage is not None
        whole, odd = whole + 1, odd + (usage["completion_tokens"] > 1 + len(engines[0].spelt(text)))
    assert whole > 50
    assert odd > 10


def test_the_law_is_not_empty() -> None:
    """Of sampled answers without stop strings all go on; most are not spelt as the tokenizer would."""
    odd = 0
    for number in range(60):
        body = {"max_tokens": 12, "stream_options": {"include_usage": True}}
        body |= {"messages": [{"role": "user", "content": "a" * (1 + number)}]}
        engines = [Engine("vllm", luck, (1, 2)) for luck in "xy"]
        stream = broken(body, engines, [4])
        assert stream.lost == ""
        text, usage, _ = read(stream.shown)
        assert usage is not None
        odd += usage["completion_tokens"] > 1 + len(engines[0].spelt(text))
    assert odd > 10
