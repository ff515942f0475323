"""Protocols with one implementation (pass the object itself), and constants whose name says too little.

A class implements a Protocol if it has all its members, itself or by what it inherits.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache

from tests.house.source import Finding, Source, product


@cache
def classes() -> Mapping[str, tuple[Source, ast.ClassDef]]:
    """All classes of the product by name: a name is there once (names.py)."""
    return {
        node.name: (source, node)
        for source in product().values()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    }


def bases(node: ast.ClassDef) -> Iterator[str]:
    """The names of its bases as they are written, without parameters."""
    for base in node.bases:
        yield ast.unparse(base.value if isinstance(base, ast.Subscript) else base)


def is_port(node: ast.ClassDef) -> bool:
    return "Protocol" in bases(node)


@cache
def members(name: str) -> frozenset[str]:
    """What a class has: methods, fields, and attributes that it sets on itself; those of its bases too."""
    if name not in classes():
        return frozenset()
    found: set[str] = set()
    node = classes()[name][1]
    for each in node.body:
        match each:
            case ast.FunctionDef(name=member) | ast.AsyncFunctionDef(name=member):
                found.add(member)
            case ast.AnnAssign(target=ast.Name(id=member)) | ast.Assign(targets=[ast.Name(id=member)]):
                found.add(member)
    found |= {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return frozenset(found).union(*(members(base) for base in bases(node))) - {"__slots__"}


def ports_of_one() -> list[Finding]:
    """Protocols that one class of the product implements, or none. One of a call is a type of function."""
    plain = [name for name, (_, node) in classes().items() if not is_port(node)]
    found = []
    for port, (source, node) in classes().items():
        asked = members(port)
        if is_port(node) and asked != {"__call__"}:
            makers = [name for name in plain if asked <= members(name)]
            if len(makers) <= 1:
                found.append(Finding(f"{source.path} {port}", ", ".join(makers) or "none"))
    return sorted(found)


def constants_of_many() -> list[Finding]:
    """Names of constants that have several values, each in its file."""
    values: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for source in product().values():
        for name, value in constants(source):
            values[name.lstrip("_")][value].add(str(source.path))
    return [
        Finding(name, ", ".join(sorted({file for files in of.values() for file in files})))
        for name, of in sorted(values.items())
        if len(of) > 1
    ]


def constants(source: Source) -> Iterator[tuple[str, str]]:
    """The constants of a module, and how their value is written."""
    for node in source.tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case _:
                continue
        if name.isupper() and len(name.strip("_")) > 1:
            yield name, ast.unparse(value)


def absent_attributes() -> list[Finding]:
    """Attributes that a class declares and none of the methods that make it sets: they may be absent."""
    return [
        Finding(f"{source.path} {name}", ", ".join(absent))
        for name, (source, node) in classes().items()
        if (absent := sorted(_slots(node) - _set_at_once(name)))
    ]


def _slots(node: ast.ClassDef) -> set[str]:
    for each in node.body:
        match each:
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=names)):
                return {str(name.value) for name in names if isinstance(name, ast.Constant)} - {"__weakref__"}
    return set()


def _set_at_once(name: str) -> set[str]:
    """What `__init__` sets, with the methods that it calls, and those of its bases; in any depth."""
    found: set[str] = set()
    pending, done = ["__init__", "__new__"], set[str]()
    while pending:
        method = pending.pop()
        if method in done:
            continue
        done.add(method)
        for node in _methods(name, method):
            for each in ast.walk(node):
                if isinstance(each, ast.Attribute) and ast.unparse(each.value) in ("self", "made"):
                    found.add(each.attr) if isinstance(each.ctx, ast.Store) else pending.append(each.attr)
    return found


def _methods(name: str, method: str) -> Iterator[ast.FunctionDef]:
    if name in classes():
        node = classes()[name][1]
        yield from (each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == method)
        for base in bases(node):
            yield from _methods(base, method)
