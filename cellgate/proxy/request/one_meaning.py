"""Why a body that means two things is refused: the gate would read one, an engine perhaps the other. Pure.

1. A field that is there twice: parsers take the last (orjson, pydantic), the first (nlohmann's ordered_json,
   which llama.cpp has), or neither. Of fields that say who answers, how long, and for whom, and `messages`;
   also in objects that engines read them from (`parameters`). Where a guardrail reads the body, any field.
2. Two fields whose names differ in case alone, or such a field in another case.
3. Fields beside `model` that name another one: adapters, fallbacks, what a client library would have merged.
   These are no mistake, but a key that is for some models must be for all of them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from typing import Any
from urllib.parse import parse_qsl

from cellgate.probes.engines import any_of
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.request.answer_limits import COUNT_NAMES, LIMIT_NAMES, NESTED

BESIDE = ("lora_path", "lora_name", "lora_request", "adapter_id", "models", "fallbacks", "extra_body")
"""Fields that may name other models: SGLang, vLLM, TGI, and gateways that may stand before an engine."""
WEIGHTY = frozenset(
    (
        *("model", "messages", "stream", "priority", "previous_response_id", "conversation", "request_id"),
        *(*BESIDE, *COUNT_NAMES, *LIMIT_NAMES),
    )
)
_INSIDE = frozenset((*NESTED, *BESIDE))
"""Objects of a body with such fields: TGI's and Triton's, and what a client library would have merged."""
# It begins with a quote, to which `re` jumps; an alternative at the top would be tried at each byte.
_WEIGHTY_FIELDS = re.compile(rb'"%b"[ \t\r\n]*:' % any_of(name.encode() for name in WEIGHTY))
_ESCAPED_LETTERS = re.compile(rb"\\u00[4-7]")
_MEANING_NAMES_MAX = 16
ONCE = "once"
"""In place of a route, for those who read large bodies: whether no object has a field twice."""


def why_twofold(names: tuple[str, ...], body: bytes) -> Failure | None:
    """Why a body whose top has these names, and that seems to have more of those that matter, is refused."""
    folded = Counter(map(str.casefold, names))
    if len(folded) < len(names):
        return _refusal(next(name for name in reversed(names) if folded[name.casefold()] > 1))
    if odd := (WEIGHTY & folded.keys()) - WEIGHTY.intersection(names):
        return _refusal(next(name for name in names if name.casefold() in odd))
    try:
        top = json.loads(body, object_pairs_hook=_Pairs)
    except ValueError:
        return None
    except RecursionError:
        # It is nested too deeply to be looked at: the name that is there most often may be there twice.
        [(most, _)] = Counter(weighty_in(body)).most_common(1)
        return _refusal(most.strip(b'": \t\r\n').decode())
    if not isinstance(top, _Pairs):
        return None
    # Without a loop over its names, of which there may be hundreds of thousands.
    found, last = _twice(top), dict(top)
    for name in sorted(_INSIDE & last.keys()):
        if found is None and isinstance(within := last[name], _Pairs):
            found = _twice(within)
    return found


def weighty_in(body: bytes) -> list[bytes]:
    """What looks like such fields, at any depth, and escaped ASCII letters, which no program writes."""
    # A backslash alone is looked for at a tenth of the price, and small bodies mostly have none.
    if b"\\" in body and b"\\u00" in body:
        return _WEIGHTY_FIELDS.findall(body) + _ESCAPED_LETTERS.findall(body)
    found: list[bytes] = _WEIGHTY_FIELDS.findall(body)
    return found


class _Pairs(list[tuple[str, Any]]):
    """An object, with the fields that are there twice."""


def _twice(pairs: _Pairs) -> Failure | None:
    times = Counter(map(itemgetter(0), pairs))
    return next((_refusal(name) for name in sorted(WEIGHTY | _INSIDE) if times[name] > 1), None)


def count_weighty(names: tuple[str, ...]) -> int:
    """How many of these fields matter; -1: one differs in case alone from another, or one that matters."""
    # By sets, because a body may have a hundred thousand names.
    exact, folded = WEIGHTY.intersection(names), set(map(str.casefold, names))
    return -1 if len(folded) < len(names) or (WEIGHTY & folded) - exact else len(exact)


def _refusal(name: str) -> Failure:
    """The failure for the client."""
    shown = name[:64]
    reason = f"the body has {shown!r} twice, or in another case: engines read it differently; send it once"
    return Failure(FailureKind.BAD_JSON, reason, param=shown)


def why_repeated(body: bytes) -> Failure | None:
    """Why a body with a field twice, in any object, is refused: whoever checks it may read the other one."""
    try:
        json.loads(body, object_pairs_hook=_once)
    except _RepeatedNameError as error:
        return _refusal(str(error))
    except (ValueError, RecursionError):
        # Whatever it is, it is refused or read elsewhere.
        return None
    return None


class _RepeatedNameError(Exception):
    """A field that an object has twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        times = Counter(map(itemgetter(0), pairs))
        raise _RepeatedNameError(next(name for name in times if times[name] > 1))
    return found


def models_beside(data: dict[str, Any]) -> tuple[str, ...]:
    """Models, or adapters, that a body names beside `model`."""
    found = [each for name in BESIDE if name in data for each in _models_in(data[name])]
    return tuple(dict.fromkeys(found))[:_MEANING_NAMES_MAX] if found else ()


def _models_in(value: Any, depth: int = 3) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and depth:
        for each in value[:_MEANING_NAMES_MAX]:
            yield from _models_in(each, depth - 1)
    elif isinstance(value, dict) and depth:
        for name in ("model", *BESIDE):
            if name in value:
                yield from _models_in(value[name], depth - 1)


def models_in_query(target: bytes) -> set[str]:
    query = target.partition(b"?")[2].decode("latin-1")
    names = {"model", *BESIDE}
    return {value for name, value in parse_qsl(query, max_num_fields=None) if name.casefold() in names}
