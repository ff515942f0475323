"""A chat goes on as raw text where all that was shown comes out of it; and the proof that a unit can."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.resume.chat import StreamJoiner
from cellgate.proxy.resume.eligible import TOKENS
from cellgate.proxy.resume.proof import ProofRequest, Tokens, UnprovenError, prove
from cellgate.proxy.resume.raw import RawAnswer, RawChat, RawPart
from cellgate.proxy.resume.shown import MismatchError
from cellgate.proxy.resume.transcript import Transcript
from tests.unit.resume.test_chat import call, event, told

ARGUMENTS = '{"q": "a {\\"}<tool_call>", "in": [1, {"x": "}]"}], "empty": {}}'
CALL = f'<tool_call>\n{{"name": "find", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER = '<tool_call>{"name":"open","arguments":{}}</tool_call>'
RAW = f"<think>\nHm < think> so.</think>\n\nI <look>. {CALL}\n{OTHER}"


def split(raw: Iterable[str], *, is_reasoning: bool = True, calls: bool = True) -> list[tuple[RawPart, str]]:
    """The parts, with neighbours of one kind joined."""
    answer, out = RawAnswer(is_reasoning=is_reasoning, calls=calls), list[tuple[RawPart, str]]()
    for text in raw:
        for piece in answer.feed(text):
            if out and out[-1][0] is piece.part is not RawPart.NAME:
                out[-1] = (piece.part, out[-1][1] + piece.text)
            else:
                out.append((piece.part, piece.text))
    return out


WHOLE = [
    (RawPart.REASONING, "\nHm < think> so."),
    (RawPart.TEXT, "\n\nI <look>. "),
    (RawPart.NAME, "find"),
    (RawPart.ARGUMENTS, ARGUMENTS),
    (RawPart.NAME, "open"),
    (RawPart.ARGUMENTS, "{}"),
]


@given(st.lists(st.integers(1, 12), min_size=1))
def test_an_answer_is_split_alike_wherever_it_is_cut(sizes: list[int]) -> None:
    pieces, at = [], 0
    for size in sizes * len(RAW):
        pieces.append(RAW[at : at + size])
        at += size
    assert split(pieces) == WHOLE
    assert orjson.loads(WHOLE[3][1])["in"][1]["x"] == "}]"


def test_reasoning_that_the_prompt_has_opened_has_no_marker_and_without_it_and_tools_all_is_text() -> None:
    assert split(["Hm", " so.</thi", "nk>Yes"]) == [(RawPart.REASONING, "Hm so."), (RawPart.TEXT, "Yes")]
    assert split([RAW], is_reasoning=False, calls=False) == [(RawPart.TEXT, RAW)]


def test_the_beginning_of_a_marker_and_white_space_in_arguments_wait_for_what_follows() -> None:
    assert split(["So <tool"], is_reasoning=False) == [(RawPart.TEXT, "So ")]
    assert split(["So <tool", "box>"], is_reasoning=False) == [(RawPart.TEXT, "So <toolbox>")]
    begun = '<tool_call>{"name": "f", "arguments": {"a":  '
    assert split([begun], is_reasoning=False)[-1] == (RawPart.ARGUMENTS, '{"a":')
    assert split([begun, "1}}"], is_reasoning=False)[-1] == (RawPart.ARGUMENTS, '{"a":  1}')


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>\n<function=find>\n<parameter=q>\n1</parameter></function></tool_call>",
        '<tool_call>{"name": "find", "arguments": "a text"}</tool_call>',
        '<tool_call>{"name": "find", "arguments": {}, "more": 1}</tool_call>',
        "<tool_call>" + " " * 5000,
    ],
)
def test_calls_in_another_format_are_refused(call: str) -> None:
    with pytest.raises(MismatchError):
        split([call], is_reasoning=False)


# A chat goes on as raw text: it is split only where all that was shown comes out of it.

TOOLS = [{"type": "function", "function": {"name": "find"}}]
BODY: dict[str, Any] = {"tools": TOOLS, "stream_options": {"include_usage": True}}
PROMPT = 'Return <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'


def completion(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "token_ids": [5]}
    document = {"id": "cmpl-b", "object": "text_completion", "created": 2, "choices": [choice]}
    return b"data: " + orjson.dumps(document) + b"\n\n"


def transcript_of(*events: bytes) -> Transcript:
    transcript = Transcript(ways=TOKENS)
    transcript.read([*events])
    return transcript


def shown_of(raw: str) -> bytes:
    """What an engine shows of it: as this very parser does, in events of a chat."""
    chat = RawChat(BODY, transcript_of(event({"role": "assistant", "content": ""})), "<think>", PROMPT)
    out = event({"role": "assistant", "content": ""})
    for char in raw.removeprefix("<think>"):
        document = orjson.loads(completion(char)[6:])
        document["choices"][0].pop("token_ids")
        out += b"data: " + orjson.dumps(chat.translated(document) | {"id": "a"}) + b"\n\n"
    return out


SHOWN = [shown_of(RAW[:at]) for at in range(len(RAW) + 1)]


@given(st.integers(len("<think>\n"), len(RAW)), st.lists(st.integers(1, 30), min_size=1))
def test_an_answer_broken_anywhere_goes_on_as_one(at: int, sizes: list[int]) -> None:
    transcript = transcript_of(SHOWN[at])
    chat = RawChat(BODY, transcript, RAW[:at], PROMPT)
    stitch = StreamJoiner(BODY, transcript, Tokens(9, 4, is_exact=True), raw=chat)
    out, left = SHOWN[at], RAW[at:]
    for size in sizes * len(RAW):
        out += stitch.feed(completion(left[:size])) if left[:size] else b""
        left = left[size:]
    out += stitch.feed(completion("", "stop"))
    seen, whole = told(out), told(SHOWN[-1])
    assert (seen["reasoning"], seen["content"]) == (whole["reasoning"], whole["content"])
    assert [each["arguments"] for each in seen["calls"].values()] == [ARGUMENTS, "{}"]
    assert [each["name"] for each in seen["calls"].values()] == ["find", "open"]
    assert all(each["id"].startswith("chatcmpl-tool-") for each in seen["calls"].values())
    assert (seen["finish"], seen["ids"]) == (["tool_calls"], {"a"})
    assert b"token_ids" not in out.removeprefix(SHOWN[at])
    assert b"text_completion" not in out


@pytest.mark.parametrize(
    ("shown", "raw", "more", "content"),
    [
        ("Hm", "<think>Hm so</think>Yes", ", it is", "Yes, it is"),
        ("<think>Hm", "<think>Hm", " so</think>Yes", "Yes"),
    ],
    ids=["what the engine has held back comes first", "reasoning that is shown with its marker"],
)
def test_reasoning_goes_on_however_it_was_shown(shown: str, raw: str, more: str, content: str) -> None:
    transcript = transcript_of(event({"reasoning": shown}))
    chat = RawChat({}, transcript, raw, "")
    out = StreamJoiner({}, transcript, Tokens(9, 4), raw=chat).feed(completion(more))
    assert (told(out)["reasoning"], told(out)["content"]) == (" so", content)


UNLIKE: dict[str, tuple[list[dict[str, Any]], str]] = {
    "other text": ([{"content": "No"}], "Yes"),
    "text in two": ([{"content": "Yes"}, call(0, "{}", name="f")], "Ye"),
    "reasoning that is shown as text": ([{"content": "<think>Hm"}], "<think>Hm"),
    "another name": ([call(0, "", name="find")], '<tool_call>{"name": "open", "arguments": {'),
    "a call of another format": ([call(0, "{}", name="find")], "<tool_call>\n<function=find></tool_call>"),
    "arguments rewritten": ([call(0, '{"a": 1', name="f")], '<tool_call>{"name":"f","arguments":{"a":1'),
    "a call that was not made": ([call(0, "", name="f")], "Yes"),
    "text behind text that is missing": ([{"content": "Yes"}], "<think>Hm</think>Yes"),
}


@pytest.mark.parametrize(("deltas", "raw"), UNLIKE.values(), ids=UNLIKE)
def test_what_comes_out_otherwise_than_shown_is_not_continued(deltas: list[dict[str, Any]], raw: str) -> None:
    with pytest.raises(UnprovenError):
        RawChat(BODY, transcript_of(*map(event, deltas)), raw, PROMPT)


def test_what_an_engine_does_to_chats_alone_is_not_continued() -> None:
    strict = {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}
    for fields in ({"logprobs": True}, {"stop": ["x"]}, {"parallel_tool_calls": False}, strict):
        with pytest.raises(UnprovenError):
            RawChat(BODY | fields, transcript_of(event({"reasoning": "Hm"})), "<think>Hm", PROMPT)


@pytest.mark.parametrize("prompt", ["", "<tool_call>\n<function=name>", PROMPT + "<function=name>"])
def test_calls_that_may_come_must_be_explained_in_the_prompt(prompt: str) -> None:
    transcript = transcript_of(event({"reasoning": "Hm"}))
    with pytest.raises(UnprovenError, match="format of its tool calls"):
        RawChat(BODY, transcript, "<think>Hm", prompt)
    RawChat({}, transcript, "<think>Hm", prompt)


# The proof that a unit can go on, against tokenizers and templates of all sorts.

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Once "}
TEXT = " upon a time"

_PIECES = re.compile(r"\s*\w+|\s+|.")


@dataclass
class Tokenizer:
    """Of words; `template` renders messages, `spell` is what the tokenizer makes of text."""

    template: Callable[[str], str] = str
    spell: Callable[[str], str] = str
    drops_space: bool = False
    known: list[str] = field(default_factory=list)
    asked: list[ProofRequest] = field(default_factory=list)

    def answer(self, question: ProofRequest) -> dict[str, Any]:
        self.asked.append(question)
        body = question.body
        if question.path == "/detokenize":
            text = "".join(self.known[token] for token in body["tokens"])
            return {"text": text.removeprefix(" ") if self.drops_space else text}
        if "content" in body:
            assert body["add_special"]
            return self._tokens(body["content"])
        if "messages" in body:
            continues = body.get("continue_final_message", False)
            assert body.get("add_generation_prompt", True) is not continues
            turns = "".join(f"<{turn['role']}>{turn['content']}</>" for turn in body["messages"])
            rendered = turns.removesuffix("</>") if continues else turns + "<assistant>"
            if question.path == "/apply-template":
                return {"prompt": self.template(rendered)}
            return self._tokens(self.template(rendered))
        return self._tokens(body["prompt"])

    def _tokens(self, text: str) -> dict[str, Any]:
        pieces = _PIECES.findall(self.spell(text))
        self.known += [piece for piece in pieces if piece not in self.known]
        return {"tokens": [self.known.index(piece) for piece in pieces]}


def proven(
    tokenizer: Tokenizer, body: dict[str, Any] = CHAT, text: str = TEXT, engine: str = "vllm"
) -> Tokens:
    proof = prove(body, text, chat="messages" in body, engine=engine)
    answer = None
    while True:
        try:
            question = proof.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            tokens: Tokens = end.value
            return tokens
        answer = tokenizer.answer(question)


def test_what_comes_back_as_it_was_is_proven_and_counted() -> None:
    assert proven(Tokenizer()).shown == 3
    assert proven(Tokenizer(drops_space=True)).shown == 3
    assert proven(Tokenizer(), COMPLETION | {"prompt": "Once"}) == Tokens(1, 3)
    # A message that is continued already is continued further.
    begun: dict[str, Any] = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "It was"}]}
    begun |= {"continue_final_message": True, "add_generation_prompt": False}
    assert proven(Tokenizer(), CHAT | begun).shown == 3
    # A token that the seam made of two counts as shown.
    assert proven(Tokenizer(), COMPLETION) == Tokens(2, 3, spans=True)


TEMPLATES: dict[str, Callable[[str], str]] = {
    "trims": lambda text: text.replace("<assistant> ", "<assistant>"),
    "trims the end": str.rstrip,
    "wraps": lambda text: text.replace("<assistant> ", "<assistant><think></think> "),
    "closes": lambda text: text if text.endswith("<assistant>") else text + "</>",
    "repeats": lambda text: text + text,
    "changes what came before": lambda text: text if text.endswith("<assistant>") else "!" + text,
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_templates_that_do_anything_to_the_text_are_found_out(template: Callable[[str], str]) -> None:
    for engine in ("vllm", "llamacpp"):
        with pytest.raises(UnprovenError):
            proven(Tokenizer(template), text=TEXT + " \n", engine=engine)


def test_text_of_unknown_bytes_is_not_even_tried() -> None:
    tokenizer = Tokenizer()
    with pytest.raises(UnprovenError, match="replacement character"):
        proven(tokenizer, text="\ufffd")
    assert not tokenizer.asked


def test_sglang_is_asked_for_the_text_alone() -> None:
    tokenizer = Tokenizer()
    assert proven(tokenizer, engine="sglang") == Tokens(None, 3)
    assert not any("messages" in question.body for question in tokenizer.asked)
    with pytest.raises(UnprovenError):
        proven(Tokenizer(spell=lambda text: text.replace(" upon", "  upon")), engine="sglang")


def test_llama_cpp_is_asked_for_the_prompt_as_text_and_then_for_its_tokens() -> None:
    tokenizer = Tokenizer()
    assert proven(tokenizer, engine="llamacpp").shown == 3
    asked = ["/apply-template", "/tokenize"] * 2 + ["/detokenize"] * 2
    assert [question.path for question in tokenizer.asked] == asked
    assert proven(Tokenizer(), COMPLETION | {"prompt": "Once"}, engine="llamacpp") == Tokens(1, 3)


def test_answers_of_no_use_prove_nothing() -> None:
    answers: tuple[dict[str, Any], ...] = ({}, {"tokens": None}, {"tokens": ["a"]}, {"tokens": "abc"})
    for answer in answers:
        proof = prove(CHAT, TEXT, chat=True, engine="vllm")
        next(proof)
        with pytest.raises(UnprovenError):
            proof.send(answer)
