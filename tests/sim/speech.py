"""What the simulated engines say: words that are a function of all text before them.

So every engine gives the same answer to the same prompt, and whoever sends the prompt with the text so far
gets exactly what would have come next, as with a greedy engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from typing import Any

from tests.sim.agent_speech import CALLS_LIKE

_TAG = r"</?(?:think|tool_call)>"
_PIECE = re.compile(rf"{_TAG}|\s*(?:(?!{_TAG})\S)+|\s+")
_PIECES: dict[int, str] = {}


def words(text: str) -> Iterator[str]:
    """The words that follow `text`, for ever; each is one token with a space before it."""
    state = blake2b(text.encode(), digest_size=4)
    while True:
        word = " " + state.hexdigest()
        state.update(word.encode())
        yield word


def answer(text: str, tokens: int) -> str:
    """The first words that follow `text`."""
    return "".join(islice(words(text), tokens))


def chat_text(prompt: str) -> str:
    """What a chat with one user message is rendered to."""
    return render({"messages": [{"role": "user", "content": prompt}]})


def render(body: dict[str, Any]) -> str:
    """The text that a request asks to continue. Raises KeyError or TypeError for what is no request."""
    if ids := (body.get("kv_transfer_params") or {}).get("prompt_token_ids"):
        return detokenize(ids)
    if "messages" not in body:
        prompt = body["prompt"]
        return detokenize(prompt) if isinstance(prompt, list) else str(prompt)
    turns = [f"<{message['role']}>{message['content']}</>" for message in body["messages"]]
    if body.get("tools"):
        turns.insert(0, f"<system>{CALLS_LIKE}</>")
    if body.get("continue_final_message"):
        return "".join(turns).removesuffix("</>")
    return "".join(turns) + "<assistant>"


def render_blocks(body: dict[str, Any]) -> str:
    """The same for `/v1/messages` and `/v1/responses`; or the tokens given in place of a prompt."""
    ids: list[int] = (body.get("kv_transfer_params") or {}).get("prompt_token_ids", [])
    if ids:
        return detokenize(ids)
    given = body["messages"] if "messages" in body else body["input"]
    turns = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if system := body.get("system") or body.get("instructions"):
        turns = [{"role": "system", "content": system}, *turns]
    return render({"messages": turns})


def tokens_of(text: str) -> list[str]:
    """The text of each token."""
    return _PIECE.findall(text)


def tokenize(text: str) -> list[int]:
    """A token for each word with the space before it, and for each marker."""
    pieces = tokens_of(text)
    tokens = [int.from_bytes(blake2b(piece.encode(), digest_size=6).digest(), "big") for piece in pieces]
    _PIECES.update(zip(tokens, pieces, strict=True))
    return tokens


def detokenize(tokens: Iterable[int]) -> str:
    """The text of tokens that `tokenize` has made. Raises KeyError for others."""
    return "".join(_PIECES[token] for token in tokens)


def count_tokens(text: str) -> int:
    """Words in the text; a generated word is one token again."""
    return len(_PIECE.findall(text))
