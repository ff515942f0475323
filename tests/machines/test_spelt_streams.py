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
from cellgate.proxy.resume.transcript import gives_ids
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
            return {"tokens": self.prompt_of(body), "max_model_len": 1000}
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
        first = "messages" in body
        sizes = (self.sizes[each % len(self.sizes)] for each in range(first, upto))
        return min(sum(sizes), len(self.said(body)[0]))

    def answer(self, body: dict[str, Any]) -> list[bytes]:
        """The events of its answer to a chat or a completion."""
        ids, shown, finish = self.said(body)
        prompt, chat, gives = self.prompt_of(body), "messages" in body, body.get("return_token_ids")
        frame = {"id": "x", "created": 1, "model": "m"}
        events: list[dict[str, Any]] = []
        if chat:
            first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            events.append(frame | {"choices": [first]} | ({"prompt_token_ids": prompt} if gives else {}))
        at = 0
        while at < len(ids):
            upto = at + self.sizes[len(events) % len(self.sizes)]
            text, last = "".join(shown[at:upto]), upto >= len(ids)
            choice: dict[str, Any] = {"index": 0} | ({"delta": {"content": text}} if chat else {"text": text})
            choice |= {"logprobs": None, "finish_reason": finish if last else None}
            choice |= {"token_ids": ids[at:upto]} if gives else {}
            if gives and not chat and not at:
                choice["prompt_token_ids"] = prompt
            events.append(frame | {"choices": [choice]})
            at = upto
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append(frame | {"choices": [], "usage": counts(len(prompt), len(ids))})
        return [b"data: %b\n\n" % orjson.dumps(each) for each in events] + [b"data: [DONE]\n\n"]


def counts(prompt: int, said: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def read(events: bytes) -> tuple[str, dict[str, int] | None, list[str]]:
    """Text, usage and ends, as a client reads them; it has not asked for ids."""
    text, usage, ends = "", None, []
    assert b'"token_ids":[' not in events
    assert events.endswith(b"data: [DONE]\n\n")
    for each in split(events)[0][:-1]:
        document = orjson.loads(payload(each) or b"{}")
        usage = document.get("usage") or usage
        for choice in document.get("choices", ()):
            text += choice.get("delta", choice).get("content") or choice.get("text") or ""
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, usage, ends


class Broken:
    """A stream that its units break one after the other. `lost`: nobody could resume it."""

    def __init__(self, body: dict[str, Any], engine: Engine) -> None:
        self.body, self.chat = body, "messages" in body
        ways = ways_of(body, chat=self.chat)
        has_ids = gives_ids(engine.name, "1.0", "chat" if self.chat else "completions")
        self.asked = body | ({"return_token_ids": True} if has_ids else {})
        self.replay = ReplayBuffer(framed=False, ways=ways if has_ids else ways & ~TOKENS)
        self.shown = b""
        self.generated = 0
        """Tokens that its units have generated of what was shown, where nothing was generated twice."""
        self.joiner: EventRewriter | None = None
        self.lost = ""

    def take(self, engine: Engine, upto: int) -> bool:
        """A unit answers up to this event; whether that was all."""
        events = engine.answer(self.asked)
        self.generated += engine.generated(self.asked, upto)
        for each in events[:upto]:
            if self.joiner is None:
                event = self.replay.tokens.strip(each) if self.replay.tokens is not None else each
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
            engine.name,
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


@fuzz(400)
@given(
    BODIES,
    st.sampled_from([("sglang", True), *itertools.product(["llamacpp", "vllm 0.10"], [True, False])]),
    WORDS,
    st.integers(1, 30),
)
def test_without_ids_it_is_counted_by_events_or_not_resumed(
    body: dict[str, Any], engine: tuple[str, bool], prompt: str, cut: int
) -> None:
    name, chat = engine
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body.pop("stop", None)
    engines = [Engine(name, f"u{number}") for number in range(2)]
    stream = broken(body, engines, [cut])
    given = engines[0].prompt_of(stream.asked)[len(engines[0].prompt_of(body)) :]
    check(body, engines, stream, is_exact=given == engines[0].said(body)[0][: len(given)])


def check(body: dict[str, Any], engines: list[Engine], stream: Broken, *, is_exact: bool = True) -> None:
    """A greedy answer is the one of a unit alone; a sampled one is as long as it says, or is not resumed.
    `is_exact`: units have seen the tokens that were generated, and not as many others of the same text.
    """
    alone = Engine(*engines[0]).answer(body)
    if body.get("temperature") == 0:
        assert stream.lost == ""
        if is_exact:
            assert read(stream.shown) == read(b"".join(alone))
            return
    if stream.lost:
        return
    _, usage, ends = read(stream.shown)
    assert len(ends) == 1
    if usage is not None and not engines[0].odd and "stop" not in body:
        assert usage["completion_tokens"] == stream.generated
        assert (ends == ["length"]) == (stream.generated == body["max_tokens"]) or ends == ["stop"]


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
