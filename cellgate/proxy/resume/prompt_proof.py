"""The proof that a unit continues an answer of blocks exactly where its text ends, by tokens. Pure.

vLLM (0.32) takes the tokens of a prompt in `kv_transfer_params.prompt_token_ids` of any request, in place of
its messages (renderers/online_renderer.py). The tokens of the old prompt come from `/v1/messages/render` or
`/v1/responses/render`, which do what the route does. Where these are switched off (they need
`--enable-scale-out`), they come from `/tokenize` of the chat that the request is converted to. Then the
engine must count as many tokens in the request as there are in that chat: this finds a conversion that adds,
leaves out or doubles anything. It does not find one that exchanges words for as many others; so only requests
that have one known conversion come so far.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from cellgate.proxy.resume.blocks import BlockTranscript
from cellgate.proxy.resume.blocks_stitch import Dialect
from cellgate.proxy.resume.messages_request import Chat, InexactError
from cellgate.proxy.resume.proof import (
    CONTEXT_TOKENS,
    UNKNOWN_CHARACTER,
    ProofRequest,
    Tokens,
    UnprovenError,
    check_same,
    tokens_of,
)


class Continued(NamedTuple):
    """What is proven: these `ids` are the old prompt and then the text shown, of so many `tokens`."""

    ids: list[int]
    tokens: Tokens


PromptProof = Generator[ProofRequest, dict[str, Any], Continued]


def given(ids: list[int]) -> dict[str, Any]:
    """The field of a request that makes these its prompt."""
    return {"kv_transfer_params": {"prompt_token_ids": ids}}


def prove_prompt(
    dialect: Dialect, body: dict[str, Any], shown: BlockTranscript, chat_of: Callable[[dict[str, Any]], Chat]
) -> PromptProof:
    """Prove it for a stream of which one text was `shown`. Raises UnprovenError."""
    text, path = shown.text or "", f"/v1/{dialect.name}"
    if UNKNOWN_CHARACTER in text:
        raise UnprovenError("its text contains a replacement character (U+FFFD)")
    rendered = (yield ProofRequest(f"{path}/render", body, is_optional=True)).get("token_ids")
    before = rendered if isinstance(rendered, list) else (yield from _converted(body, chat_of))
    counted = told = dialect.prompt_tokens(shown.frame)
    if counted is None and rendered is None:
        counted = yield from _counted(dialect, body)
    if counted not in (None, len(before)):
        raise UnprovenError(f"its engine counts {len(before)} tokens in a prompt of {counted}")
    model = {"model": body["model"]} if body.get("model") else {}
    added = yield from tokens_of(model | {"prompt": text, "add_special_tokens": False})
    ids = before + added
    yield from check_same(model, before, ids, max(0, len(before) - CONTEXT_TOKENS), text)
    if told is None and (yield from _counted(dialect, body | given(ids))) != len(ids):
        # Else the beginning of its answer tells.
        raise UnprovenError("its engine takes no tokens for a prompt")
    return Continued(ids, Tokens(len(before), len(added)))


def _converted(
    body: dict[str, Any], chat_of: Callable[[dict[str, Any]], Chat]
) -> Generator[ProofRequest, dict[str, Any], list[int]]:
    try:
        chat = chat_of(body)
    except InexactError as error:
        raise UnprovenError(f"the request has {error}") from error
    return (yield from tokens_of(chat | {"add_generation_prompt": True}))


def _counted(dialect: Dialect, body: dict[str, Any]) -> Generator[ProofRequest, dict[str, Any], int]:
    """How many tokens the engine counts in the prompt of a request, of which it generates one token."""
    short = body | dialect.unstored | {dialect.limit: 1, "stream": False}
    counted = dialect.prompt_tokens((yield ProofRequest(f"/v1/{dialect.name}", short)))
    if counted is None:
        raise UnprovenError("its engine does not count the tokens of a prompt")
    return counted
