"""The proof that a unit can go on, against tokenizers and templates of all sorts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from cellgate.proxy.resume.proof import ProofRequest, Tokens, UnprovenError, prove

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Once "}
TEXT = " upon a time"

_PIECES = re.compile(r"\s*\w+|\s+|.")


class Tokenizer:
    """Of words; `template` renders messages, `spell` is what the tokenizer makes of text."""

    def __init__(
        self,
        template: Callable[[str], str] = str,
        spell: Callable[[str], str] = str,
        *,
        drops_space: bool = False,
        takes_messages: bool = True,
    ) -> None:
        self._template = template
        self._spell = spell
        self._drops_space = drops_space
        self._takes_messages = takes_messages
        self._known: list[str] = []
        self.asked: list[ProofRequest] = []

    def answer(self, question: ProofRequest) -> dict[str, Any]:
        self.asked.append(question)
        body = question.body
        if question.path == "/detokenize":
            text = "".join(self._known[token] for token in body["tokens"])
            return {"text": text.removeprefix(" ") if self._drops_space else text}
        if "content" in body:
            assert body["add_special"]
            return self._tokens(body["content"])
        if "messages" in body:
            assert self._takes_messages
            continues = body.get("continue_final_message", False)
            assert body.get("add_generation_prompt", True) is not continues
            turns = "".join(f"<{turn['role']}>{turn['content']}</>" for turn in body["messages"])
            rendered = turns.removesuffix("</>") if continues else turns + "<assistant>"
            if question.path == "/apply-template":
                return {"prompt": self._template(rendered)}
            return self._tokens(self._template(rendered))
        return self._tokens(body["prompt"])

    def _tokens(self, text: str) -> dict[str, Any]:
        pieces = _PIECES.findall(self._spell(text))
        self._known += [piece for piece in pieces if piece not in self._known]
        return {"tokens": [self._known.index(piece) for piece in pieces]}


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


def test_a_token_that_the_seam_made_of_two_counts_as_shown() -> None:
    assert proven(Tokenizer(), COMPLETION) == Tokens(2, 3)


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
    with pytest.raises(UnprovenError):
        proven(Tokenizer(template), text=TEXT + " \n")


def test_text_of_unknown_bytes_is_not_even_tried() -> None:
    tokenizer = Tokenizer()
    with pytest.raises(UnprovenError, match="replacement character"):
        proven(tokenizer, text="\ufffd")
    assert not tokenizer.asked


def test_sglang_is_asked_for_the_text_alone() -> None:
    tokenizer = Tokenizer(takes_messages=False)
    assert proven(tokenizer, engine="sglang") == Tokens(None, 3)
    with pytest.raises(UnprovenError):
        proven(Tokenizer(spell=lambda text: text.replace(" upon", "  upon")), engine="sglang")


def test_llama_cpp_is_asked_for_the_prompt_as_text_and_then_for_its_tokens() -> None:
    tokenizer = Tokenizer()
    assert proven(tokenizer, engine="llamacpp").shown == 3
    asked = ["/apply-template", "/tokenize"] * 2 + ["/detokenize"] * 2
    assert [question.path for question in tokenizer.asked] == asked
    assert proven(Tokenizer(), COMPLETION | {"prompt": "Once"}, engine="llamacpp") == Tokens(1, 3)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_templates_of_llama_cpp_are_found_out_as_well(template: Callable[[str], str]) -> None:
    with pytest.raises(UnprovenError):
        proven(Tokenizer(template), text=TEXT + " \n", engine="llamacpp")


def test_a_message_that_is_continued_already_is_continued_further() -> None:
    begun = CHAT | {
        "messages": [*CHAT["messages"], {"role": "assistant", "content": "It was"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert proven(Tokenizer(), begun).shown == 3


@pytest.mark.parametrize("answer", [{}, {"tokens": None}, {"tokens": ["a"]}, {"tokens": "abc"}])
def test_answers_of_no_use_prove_nothing(answer: dict[str, Any]) -> None:
    proof = prove(CHAT, TEXT, chat=True, engine="vllm")
    next(proof)
    with pytest.raises(UnprovenError):
        proof.send(answer)
