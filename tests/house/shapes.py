"""Nothing too long, and no variation by inheritance."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.source import Finding, Source, product

FILE_LINES = 800
FUNCTION_LINES = 50
SHIPPED_ALONE = "cellgate/extras/agent.py"
"""One file by its purpose: it is copied into engine images."""

COMPOSED = frozenset({"Exchange", "Gate", "Gateway", "Plane", "Search", "Selection", "Attempt", "Response"})
"""Variants of these are fields and parts, not subclasses: two of them could not be had together."""


def files_long(source: Source) -> list[Finding]:
    """Files with more lines than `FILE_LINES`."""
    is_long = source.lines > FILE_LINES and str(source.path) != SHIPPED_ALONE
    return [Finding(str(source.path), f"{source.lines} lines")] if is_long else []


def functions_long(source: Source) -> list[Finding]:
    """Functions with more lines than `FUNCTION_LINES`, docstring and signature included."""
    return [
        Finding(f"{source.path} {name}", f"{lines} lines")
        for name, lines in _functions(source.tree, "")
        if lines > FUNCTION_LINES
    ]


def _functions(parent: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, (node.end_lineno or node.lineno) - node.lineno + 1
            yield from _functions(node, f"{name}.")
        elif not isinstance(node, ast.expr):
            yield from _functions(node, prefix)


def subclasses() -> list[Finding]:
    """Subclasses of what is composed, and classes that are made at run time."""
    found = []
    for source in product().values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                bases = {_last_name(base) for base in node.bases} & COMPOSED
                found += [
                    Finding(node.name, f"{source.path}: a subclass of {base}") for base in sorted(bases)
                ]
            elif isinstance(node, ast.Call) and _last_name(node.func) == "type" and len(node.args) == 3:
                found.append(
                    Finding(str(source.path), f"{source.path}:{node.lineno}: makes a class at run time")
                )
    return sorted(found)


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return _last_name(value)
        case _:
            return ""
