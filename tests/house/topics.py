"""Each file is one thing, and begins with it.

1. The first class or function of a file is what its docstring names: they share a word, or it shares one with
   the file's name. What that class needs when it is imported may stand before it.
2. A block comment between blank lines heads a section, and stands below the file's own topic.
3. Where a docstring says "In this order: `A`, `B`", these are there, and in this order.
"""

from __future__ import annotations

import ast
import re

from tests.house.source import Finding, Source

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_ENDINGS = ("ing", "ion", "ed", "er", "es", "s")
_ORDER = re.compile(r"In this order: ((?:[^.]|\.(?=\w))*)\.")


def strangers_first(source: Source) -> list[Finding]:
    """The file, if what it begins with is not what its docstring or its name says. Against rule 1."""
    if not source.path.is_relative_to("cellgate"):
        return []
    made = beginning(definitions(source.tree))
    said = words(docstring(source.tree).split("\n\n")[0]) | words(source.path.stem)
    if not made or any(words(each.name) & said for each in made):
        return []
    return [Finding(f"{source.path}:{made[-1].lineno}", f"{made[-1].name} is not what the docstring says")]


def beginning(made: list[_Definition]) -> list[_Definition]:
    """The first definition that none of those below needs at import, behind those before it that are."""
    for number, each in enumerate(made):
        if not any(each.name in needed_at_import(other) for other in made[number + 1 :]):
            return made[: number + 1]
    return made


def needed_at_import(made: _Definition) -> set[str]:
    """The names that are looked up when the definition is executed: not those in bodies of functions."""
    parts: list[ast.AST | None] = [*made.decorator_list]
    if isinstance(made, ast.ClassDef):
        parts += [*made.bases, *(each.value for each in made.keywords)]
        parts += [each.value for each in made.body if isinstance(each, ast.Assign | ast.AnnAssign)]
        inner = [each for each in made.body if isinstance(each, _Definition)]
    else:
        parts += [*made.args.defaults, *made.args.kw_defaults]
        inner = []
    found = {node.id for part in parts if part for node in ast.walk(part) if isinstance(node, ast.Name)}
    return found.union(*map(needed_at_import, inner))


def sections_above(source: Source) -> list[Finding]:
    """Block comments that head a section above the first definition. Against rule 2."""
    if not source.path.is_relative_to("cellgate"):
        return []
    made = definitions(source.tree)
    lines = source.text.splitlines()
    first = min((each.lineno for each in made), default=0)
    return [
        Finding(f"{source.path}:{number}", lines[number - 1])
        for number in range(2, first)
        if lines[number - 1].startswith("#")
        and not lines[number - 2]
        and not lines[end_of_comment(lines, number)].strip()
    ]


def end_of_comment(lines: list[str], number: int) -> int:
    """The index of the first line behind the comment that has line `number`."""
    while lines[number].startswith("#"):
        number += 1
    return number


def order_wrong(source: Source) -> list[Finding]:
    """Names in a docstring's "In this order" that are not there, or elsewhere. Against rule 3."""
    told = _ORDER.search(docstring(source.tree)) if source.path.is_relative_to("cellgate") else None
    if told is None:
        return []
    named = re.findall(r"`(\w+)`", told[1])
    there = [each.name for each in definitions(source.tree) if each.name in named]
    return [] if there == named else [Finding(str(source.path), f"{named} is {there}")]


def definitions(tree: ast.Module) -> list[_Definition]:
    """The classes and functions on top of a module."""
    return [each for each in tree.body if isinstance(each, _Definition)]


def docstring(tree: ast.Module) -> str:
    """The docstring of a module; empty if it has none."""
    return ast.get_docstring(tree) or ""


def words(text: str) -> set[str]:
    """The words of a sentence, or of a name, without their endings."""
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text).replace("_", " ")
    return {stem(word.lower()) for word in re.findall(r"[A-Za-z0-9]+", apart)}


def stem(word: str) -> str:
    """A word without its usual endings: `relays`, `relaying` and `relay` are one."""
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word.removesuffix(ending)
    return word.rstrip("e")
