"""Fields that nobody reads: they were added, and have no effect.

A field of a dataclass is read where the product has an attribute of its name, says the name to `attrgetter`
or `getattr`, or matches it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from tests.house.source import Finding, product

READ_OTHERWISE: dict[str, str] = {
    "LimitRules": "by the names that a table of limits has",
    "UnitReport.prefill_tokens_per_s": "by programs beside the gate: docs/redis.md",
}
"""Classes and fields that are read in another way, and in which."""


@cache
def read() -> frozenset[str]:
    """The names of all attributes that the product reads."""
    return frozenset(name for source in product().values() for name in _read_in(source.tree))


def _read_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()):
                yield name
            case ast.MatchClass(kwd_attrs=names):
                yield from names
            case ast.Call(func=ast.Name(id="attrgetter" | "getattr"), args=args):
                texts = (each.value for each in args if isinstance(each, ast.Constant))
                yield from (name for text in texts if isinstance(text, str) for name in text.split("."))


def dataclass_fields(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The dataclasses of a module, each with its fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(e) for e in node.decorator_list):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    yield node.name, each.target.id


def fields_unread() -> list[Finding]:
    """Fields of dataclasses that nobody reads."""
    return [
        Finding(f"{source.path} {holder}", name)
        for source in product().values()
        for holder, name in dataclass_fields(source.tree)
        if name not in read() and not READ_OTHERWISE.keys() & {holder, f"{holder}.{name}"}
    ]
