"""A trace in Mooncake's format.

One JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one for
each 512 tokens of the prompt. Equal ids stand for equal text, equal beginnings of them for common prefixes.
https://github.com/kvcache-ai/Mooncake
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
"""Tokens that one id stands for."""


class TraceError(Exception):
    """A trace that cannot be read: file, line and reason, in one line."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it comes, in seconds after the trace's start, and how long it and its answer are."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[int, ...]


def read(path: Path, *, requests: int, max_tokens: int) -> list[Request]:
    """The first `requests` requests whose prompt has at most `max_tokens` tokens. Raises TraceError."""
    try:
        with path.open(encoding="utf-8") as lines:
            found = list(
                islice((each for each in _parsed(path, lines) if each.prompt_tokens <= max_tokens), requests)
            )
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    if not found:
        raise TraceError(f"{path}: holds no request of at most {max_tokens} tokens")
    return found


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


def _parsed(path: Path, lines: Iterator[str]) -> Iterator[Request]:
    at_s = 0.0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = parse(line)
            if request.at_s < at_s:
                raise ValueError(f"timestamp {request.at_s * 1000:g} is before the line before")
        except ValueError as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        at_s = request.at_s
        yield request


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
