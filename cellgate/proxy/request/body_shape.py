"""What follows from the names of a body's fields alone: what its prompt is made of, in which order.

A client sends the same names with each of its requests, so it is worked out once. What is kept is bounded:
a client may send any names.
"""

from __future__ import annotations

from typing import Any

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.request.answer_limits import LIMIT_NAMES, MULTIPLIES, ONLY_LIMIT
from cellgate.proxy.request.one_meaning import BESIDE, count_weighty

SHAPES_KEPT = 512
"""Shapes that are kept. If there are more, all are forgotten."""
_KEPT_CHARS = 1024
"""The names of a shape that is kept have so many characters at most, all together."""
_SHAPE_PREAMBLE = ("tools", "functions", "documents", "instructions", "system")
_SHAPE_PROMPTS = ("messages", "prompt", "input", "text", "text_input", "input_ids", "token_ids")
_RENDERING = ("cache_salt", "chat_template", "chat_template_kwargs", "mm_processor_kwargs")
"""Fields that change the whole prompt."""
NAMES = frozenset((*_SHAPE_PREAMBLE, *_SHAPE_PROMPTS, *_RENDERING))
"""All fields of a body that its prompt depends on."""
_SHAPE_MULTIPLIES = MULTIPLIES | (LIMIT_NAMES - ONLY_LIMIT.keys())
_PERSONAL = frozenset(
    (
        *("previous_response_id", "conversation", "input_file_id", "request_id", "prompt_cache_key", "user"),
        *("priority", *BESIDE),
    )
)
VARIES = frozenset(
    (
        *("stream", "stream_options", "user", "metadata", "store", "priority", "request_id", "service_tier"),
        *("safety_identifier", "prompt_cache_key"),
        *LIMIT_NAMES,
    )
)
"""Fields that clients change from one try to the next, and that change nothing of what is computed, but how
long.
"""
USUAL = (
    VARIES
    | LIMIT_NAMES
    | {
        *("seed", "temperature", "top_p", "top_k", "min_p", "stop"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    }
)
"""Fields that stand beside messages."""
_NO_PART = NAMES | VARIES | {"model"}
"""Fields that the fingerprint has from the prompt, or leaves out."""


class BodyShape:
    """The names of one kind of body, by what they mean: the prompt is made of `preamble` and `prompts`, in
    this order; `rendering` changes all of it; `more` are other fields that change the work of an engine;
    `weighty` counts the fields that say who answers, and how long (see one_meaning.py). `limit` is the one
    field that bounds the answer on `limit_routes`, empty if there is none; `multiplies`: others may as well,
    or ask for several. `is_personal`: it tells its session, a priority, its name, the response that it
    follows, or other models.
    """

    __slots__ = (
        *("is_personal", "limit", "limit_routes", "more", "multiplies", "preamble", "prompts", "rendering"),
        "weighty",
    )

    def __init__(self, names: tuple[str, ...]) -> None:
        present = frozenset(names)
        self.weighty = count_weighty(names)
        self.preamble = tuple(name for name in _SHAPE_PREAMBLE if name in present)
        self.prompts = tuple(name for name in _SHAPE_PROMPTS if name in present)
        # With only one of these names, that one is the prompt, or there is none.
        has_several = len(present & NAMES) > 1
        self.rendering = tuple(name for name in _RENDERING if name in present) if has_several else ()
        more = present - _NO_PART
        self.more = tuple(sorted(more)) if len(more) <= LIMITS.fields else names
        limits = present & LIMIT_NAMES
        self.limit = next(iter(limits)) if len(limits) == 1 else ""
        self.limit_routes = ONLY_LIMIT.get(self.limit, frozenset())
        self.multiplies = len(limits) > 1 or not present.isdisjoint(_SHAPE_MULTIPLIES)
        self.is_personal = not present.isdisjoint(_PERSONAL)


shapes: dict[tuple[str, ...], BodyShape] = {}


def shape_of_body(body: dict[str, Any]) -> BodyShape:
    names = tuple(body)
    return shapes.get(names) or new_shape(names)


def new_shape(names: tuple[str, ...]) -> BodyShape:
    shape = BodyShape(names)
    if len(names) <= LIMITS.fields and sum(map(len, names)) <= _KEPT_CHARS:
        if len(shapes) >= SHAPES_KEPT:
            shapes.clear()
        shapes[names] = shape
    return shape
