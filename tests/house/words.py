"""Old words: those that the project has replaced, in names. A part of a name counts: `_door_of`, `KeyDoor`.

Words that have a good meaning too (`hold`, `take`, `rank`) are not here: a table cannot tell both.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from tests.house.source import Finding, Source, product

OLD: dict[str, str] = {
    "acquitted": "cleared",
    "agenda": "timers",
    "beside_s": "slowdown_of_others_s",
    "bill": "usage_record",
    "blameless": "is_healthy_unchanged",
    "collapse": "end_with",
    "conduct": "engine_control",
    "conductor": "engine_control",
    "continuation": "resume",
    "continued": "resumed",
    "deed": "action",
    "deeds": "actions",
    "devious": "ambiguous_path",
    "door": "admission, key_check",
    "doors": "admission",
    "doorway": "key_check",
    "doubt_s": "unknown_s",
    "elsewhere": "remote_load",
    "evict_s": "eviction_s",
    "fate": "common_cause",
    "gate_word": "upstream gate health",
    "give_up": "abort, end_with",
    "go_on": "resume_parsing, resume",
    "greeted": "hello_received",
    "habits": "token_estimator",
    "heard": "received",
    "held_blocks": "cached_blocks",
    "hold_back": "buffer_full",
    "let_go": "abort",
    "life_at": "progress_at",
    "line_s": "queue_penalty_s",
    "lose": "fail",
    "neighbours": "worker_peers",
    "nothing_to_learn": "ignores_good_evidence",
    "orphan": "unclaimed",
    "orphans": "unclaimed",
    "passage": "event_filter",
    "patient": "context",
    "purse": "budget",
    "quiescence": "pause",
    "reborn": "restarted",
    "risen_at": "up_since",
    "rota": "turns",
    "seat": "slot",
    "seats": "slots",
    "standstill": "pause",
    "stitch": "joiner",
    "taker": "waiter",
    "tariff": "cost_inputs",
    "told": "published",
    "turn_away": "refuse",
    "twisted": "ambiguous_path",
    "visitor": "keyed_request",
    "visitors": "keyed_requests",
}
"""Each with the word that has replaced it."""

PUBLIC = frozenset({"no_continuation"})
"""Keys of configurations: people have written them."""

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_OLD = re.compile(f"_(?:{'|'.join(sorted(OLD, key=len, reverse=True))})(?=_)")


def old_parts(name: str) -> list[str]:
    """The old words in a name."""
    return [part[1:] for part in _OLD.findall(f"_{_CAMEL.sub('_', name).lower().strip('_')}_")]


def names_of(source: Source) -> Iterator[str]:
    """The names in a source. What is in strings and comments is none, and neither is what is imported."""
    for node in ast.walk(source.tree):
        match node:
            case (
                ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name))
            ):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def old_words() -> list[Finding]:
    """Names with an old word in them: a line for each name in each file, with how often it is there."""
    found: list[Finding] = []
    for source in product().values():
        counts = Counter(name for name in names_of(source) if name not in PUBLIC and old_parts(name))
        found += [
            Finding(str(source.path), f"{name} ({count}): {', '.join(OLD[part] for part in old_parts(name))}")
            for name, count in sorted(counts.items())
        ]
    return found
