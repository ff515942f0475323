"""What a body says of a transfer of KV blocks, and only the gate may say to a decoder. Pure.

Engines read it at the top of a body, in `sampling_params.extra_args` (vLLM's `/inference/v1/generate`), in
`vllm_xargs`, and in parameters that are JSON in a string (Triton's backends). So it is taken out wherever it
stands beside the prompt: by its name, and by what is in it, because the blocks of another request are as good
to an engine under any name that it reads.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from cellgate.proxy.request.body_shape import NAMES as OF_THE_PROMPT

_NAMES = re.compile(r"(?:kv|ec)_transfer_params|disaggregated_params|bootstrap_(?:host|port|room)")
_SHAPE = frozenset(
    (
        *("do_remote_decode", "do_remote_prefill", "remote_block_ids", "remote_engine_id", "remote_host"),
        *("remote_port", "remote_request_id", "bootstrap_host", "bootstrap_room", "ctx_request_id"),
    )
)
"""Fields of the parameters of vLLM's connectors, SGLang's and TensorRT-LLM's."""
_MARKS = (b"_transfer_params", b"remote_", b"bootstrap_", b"disaggregated_params", b"ctx_request_id")
_ESCAPED = re.compile(rb"(?<!\\)(?:\\\\)*\\u00[4-7]")
"""A letter of a name that is written as an escape. No encoder of JSON does that."""
_DEPTH = 16


def may_have_some(body: bytes) -> bool:
    """Whether a body may have such a field somewhere, known without parsing it."""
    return any(mark in body for mark in _MARKS) or (b"\\u00" in body and _ESCAPED.search(body) is not None)


def named_in(body: bytes) -> bool:
    """Whether a body that is too large to be parsed here has a key of such a name: in a text a quotation mark
    is escaped.
    """
    quoted = any(b'"%b"' % name in body for name in (b"kv_transfer_params", b"ec_transfer_params"))
    return quoted or (b"\\u00" in body and _ESCAPED.search(body) is not None)


def without_transfer(body: bytes) -> bytes:
    """The JSON object without them. What is nested too deeply to be looked at is left out as well."""
    document = orjson.loads(body)
    found = {
        name: value if name in OF_THE_PROMPT else _bare(value, _DEPTH)
        for name, value in document.items()
        if not _is_of_transfer(name, value)
    }
    return body if found == document else orjson.dumps(found)


def _bare(value: Any, depth: int) -> Any:
    if isinstance(value, dict):
        if not depth:
            return {}
        return {
            name: _bare(each, depth - 1) for name, each in value.items() if not _is_of_transfer(name, each)
        }
    if isinstance(value, list):
        return [_bare(each, depth - 1) for each in value] if depth else []
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") and may_have_some(value.encode()):
        return _bare_text(value, depth)
    return value


def _bare_text(text: str, depth: int) -> str:
    """The same of JSON in a string."""
    try:
        return orjson.dumps(_bare(orjson.loads(text), depth - 1)).decode() if depth else ""
    except orjson.JSONDecodeError:
        return text


def _is_of_transfer(name: str, value: Any) -> bool:
    return _NAMES.fullmatch(name) is not None or (isinstance(value, dict) and not _SHAPE.isdisjoint(value))
