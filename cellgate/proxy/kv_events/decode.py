"""The payload of one message of KV events, as vLLM and SGLang write it: msgpack, unpacked event by event.

    batch     [time, [event, ...], data-parallel rank or nil]      (a default at its end may be left out)
    event     {"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ..., "token_ids": [...],
               "block_size": n, "lora_name": ..., "medium": ..., "extra_keys": [[...] or nil, ...], ...}
              {"type": "BlockRemoved", "block_hashes": [...]}      {"type": "AllBlocksCleared"}
    before    ["BlockStored", hashes, parent, token ids, block size, LoRA id, medium, LoRA name, extra keys]
              ["BlockRemoved", hashes, medium]                     ["AllBlocksCleared"]

A hash is an integer, or bytes of which the last eight count. Sources: vllm/distributed/kv_events.py,
sglang/srt/disaggregation/kv_events.py. Unknown kinds of events, and groups of layers that keep only the end
of a prompt (a sliding window), are left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgpack
import orjson

from cellgate.router.kv_index import TOKEN_BYTES, Cleared, Event, Removed, Stored

PAYLOAD_MAX = 2 << 20
"""Bytes of one message: a step of 65,536 tokens takes a quarter of that."""
EVENTS_MAX = 1 << 16
"""Events of one message, of whatever kind: an engine names each block that it evicts in one of its own."""
ITEMS_MAX = 1 << 16
"""Tokens, or hashes, of one event: to unpack so many takes 2 ms."""
PART_BLOCKS = 128
"""An event of more blocks is handed out in parts of so many: 0.3 ms of work each."""

_HASH = (1 << 60) - 1
_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
_WHOLE = frozenset({None, "", "full_attention", "mla_attention"})
"""Kinds of groups of layers that keep the whole prompt."""


class MalformedError(ValueError):
    """The payload is not what an engine sends."""


def events(payload: bytes, rank: int | None = None) -> Iterator[Event]:
    """The events of a batch, unpacked as they are taken. Raises MalformedError: what was taken before counts.

    `rank`: the batch must be of this one, if it names one.
    """
    try:
        yield from _events(payload, rank)
    except MalformedError:
        raise
    except (
        msgpack.UnpackException,
        ValueError,
        TypeError,
        LookupError,
        OverflowError,
        AttributeError,
    ) as error:
        raise MalformedError(f"{type(error).__name__}: {str(error)[:80]}") from error


def _events(payload: bytes, rank: int | None) -> Iterator[Event]:
    unpacker = msgpack.Unpacker(
        max_buffer_size=PAYLOAD_MAX, max_array_len=ITEMS_MAX, max_map_len=64, strict_map_key=False
    )
    unpacker.feed(payload)
    fields = unpacker.read_array_header()
    if not 2 <= fields <= 16 or not isinstance(unpacker.unpack(), int | float):
        raise MalformedError("a batch does not begin with a time")
    removed: list[int] = []
    count = unpacker.read_array_header()
    if count > EVENTS_MAX:
        raise MalformedError(f"a batch has {count} events, more than {EVENTS_MAX}")
    for _ in range(count):
        found = unpacker.unpack()
        kind = found.get("type") if type(found) is dict else _kind(found)
        if kind == "BlockRemoved":
            # An engine names each block that it evicts in an event of its own: they are handed out together.
            names = found["block_hashes"] if type(found) is dict else found[1]
            removed += map(_name, names)
            if len(removed) < PART_BLOCKS:
                continue
        if removed:
            yield from (Removed(removed[at : at + PART_BLOCKS]) for at in range(0, len(removed), PART_BLOCKS))
            removed = []
        if kind == "BlockStored":
            yield from _stored(found if type(found) is dict else dict(zip_longest(_STORED, found[1:9])))
        elif kind == "AllBlocksCleared":
            yield Cleared()
    if removed:
        yield Removed(removed)
    if fields > 2 and rank is not None and (named := unpacker.unpack()) not in (None, rank):
        raise MalformedError(f"a batch of rank {str(named)[:20]} came from the endpoint of rank {rank}")


def _kind(found: Any) -> object:
    if type(found) is list and found:
        return found[0]
    raise MalformedError(f"an event is {type(found).__name__}")


def _stored(found: Mapping[str, Any]) -> Iterator[Stored]:
    if found.get("kv_cache_spec_kind") not in _WHOLE or found.get("kv_cache_spec_sliding_window"):
        return
    names, before = [_name(one) for one in found["block_hashes"] or ()], found.get("parent_block_hash")
    parent = None if before is None else _name(before)
    tokens = array("I", found.get("token_ids") or ()).tobytes()
    lora = found.get("lora_name") or found.get("lora_id") or ""
    has_extra = any(found.get("extra_keys") or ()) or found.get("cache_salt")
    extra = _extra(found, str(lora), len(names)) if has_extra else None
    block_tokens = int(found.get("block_size") or 0)
    size = block_tokens * TOKEN_BYTES
    if tokens and len(tokens) != len(names) * size:
        raise MalformedError(
            f"{len(names)} blocks of {block_tokens} with {len(tokens) // TOKEN_BYTES} tokens"
        )
    if len(names) <= PART_BLOCKS:
        yield Stored(names, parent, tokens, block_tokens, str(lora).encode(), extra)
        return
    for at in range(0, len(names), PART_BLOCKS):
        part = slice(at, at + PART_BLOCKS)
        data = tokens[at * size : (at + PART_BLOCKS) * size]
        more = extra[part] if extra else None
        yield Stored(names[part], parent, data, block_tokens, str(lora).encode(), more)
        parent = names[part][-1]


def _name(found: Any) -> int:
    if type(found) is int:
        return found & _HASH
    if type(found) is bytes:
        return int.from_bytes(found[-8:], "big") & _HASH
    raise MalformedError(f"a hash is {type(found).__name__}")


def _extra(found: Mapping[str, Any], lora: str, count: int) -> list[bytes]:
    """By block: what its hash has beside tokens and adapter. The first has the salt, and those behind it
    depend on it by their parent; SGLang names the salt for all.
    """
    keys: Sequence[Any] = found.get("extra_keys") or ()
    by_block = [_bytes_of(block, lora) for block in list(keys)[:count]]
    by_block += [b""] * (count - len(by_block))
    if (salt := found.get("cache_salt")) and found.get("parent_block_hash") is None and count:
        by_block[0] += _bytes_of([salt], lora)
    return by_block


def _bytes_of(keys: Any, lora: str) -> bytes:
    kept = [key for key in keys or () if key != lora]
    return orjson.dumps(kept, default=_hex) if kept else b""


def _hex(value: Any) -> str:
    return bytes(value).hex()
