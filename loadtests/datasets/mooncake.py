"""Mooncake's format: one JSON object a line.

`timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one for each 512 tokens of the
prompt. Equal ids stand for equal text, equal beginnings of them for common prefixes.
https://github.com/kvcache-ai/Mooncake
"""

import json
from typing import Any

from loadtests.datasets.nouns import Request

BLOCK_TOKENS = 512
"""Tokens that one id stands for."""


def parse(line: str) -> Request:
    """One line of a trace. Raises ValueError with the reason."""
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"is not a JSON object but {line.strip()[:40]!r}")
    at_ms = _number(fields, "timestamp", int | float)
    prompt_tokens, answer_tokens = _number(fields, "input_length", int), _number(fields, "output_length", int)
    if prompt_tokens < 1:
        raise ValueError("input_length is 0: there is no prompt")
    blocks = _blocks(fields.get("hash_ids"), -(-prompt_tokens // BLOCK_TOKENS))
    # An answer of no token cannot be asked for.
    return Request(at_ms / 1000, prompt_tokens, max(answer_tokens, 1), blocks)


def _number(fields: dict[str, Any], name: str, kind: Any) -> Any:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 <= value < 1e12:
        raise ValueError(f"{name} has to be a number from 0 on, found {json.dumps(value)[:40]}")
    return value


def _blocks(ids: Any, needed: int) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
        raise ValueError(f"hash_ids has to be a list of whole numbers, found {json.dumps(ids)[:40]}")
    if len(ids) != needed:
        raise ValueError(f"hash_ids has {len(ids)} ids; a prompt of this input_length has {needed} blocks")
    return tuple(ids)
