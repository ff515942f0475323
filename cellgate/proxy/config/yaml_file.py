"""Reads a YAML file, with variables of the environment in its values, into a plain mapping, or reports the
line and column of each error.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

KeyPath = tuple[str | int, ...]
"""Where in the configuration something stands: keys and indexes from the top."""

Problem = tuple[KeyPath, str]
"""What is wrong at a place, as a sentence."""


class UnreadableError(Exception):
    """The file holds no YAML mapping, or names a variable that is not set. `problems` has a line for each."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class YamlFile(NamedTuple):
    """The mapping of a file, what is wrong with keys that stand there twice, and where everything stands."""

    found: dict[object, object]
    repeated: list[Problem]
    node: yaml.Node | None = None

    def line(self, key_path: KeyPath) -> int:
        """In which line this stands, or what it is missing from; 0: not known."""
        return _line_of(self.node, key_path) if self.node is not None and key_path else 0


def _line_of(node: yaml.Node, key_path: KeyPath) -> int:
    line: int = node.start_mark.line + 1
    for part in key_path:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if str(key.value) == str(part)), None)
            if found is None:
                break
            key, node = found
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


def read(path: str, environ: Mapping[str, str] = os.environ) -> YamlFile:
    """The mapping in the file at `path` (`-`: standard input).

    Raises UnreadableError. YAML itself would let the last of two keys win in silence.
    """
    return parse(title(path), _bytes(path), environ=environ)


def title(path: str) -> str:
    """How a file is called in messages."""
    return "<stdin>" if path == "-" else path


def parse(
    path: str, data: bytes, such_as: str = "cells", environ: Mapping[str, str] = os.environ
) -> YamlFile:
    """`read` for bytes that were read already; `such_as` is a key that is expected there."""
    text = _text(path, data)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None and (unset := substitute(loader, node, environ)):
            raise UnreadableError(*(f"{path}:{m.line + 1}:{m.column + 1}: {text}" for m, text in unset))
        found = loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        problem = " ".join(str(error.problem).split())
        hint = _hint(problem, text, mark)
        raise UnreadableError(f"{where}: expected YAML, {problem}{hint}") from None
    except yaml.reader.ReaderError as error:
        where = _line_and_column(text[: error.position])
        raise UnreadableError(
            f"{path}:{where}: expected printable text, found {chr(error.character)!r}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path}: expected plain YAML without deep nesting: {error}") from None
    if node is None or not isinstance(found, dict):
        what = "an empty file" if found is None else f"a {type(found).__name__}"
        raise UnreadableError(f"{path}: expected a mapping such as '{such_as}: [...]', found {what}")
    return YamlFile(found, list(_repeated_keys(node, (), set())), node)


def _hint(problem: str, text: str, mark: yaml.Mark | None) -> str:
    """What to do about the usual mistakes."""
    if "'\\t'" in problem:
        return "; indent with spaces"
    if mark is not None and any("${" in line for line in text.splitlines()[mark.line : mark.line + 1]):
        return "; put ${…} in quotes where it stands within braces"
    return ""


def _bytes(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise UnreadableError(
            f"{path}: expected a readable file: {getattr(error, 'strerror', error)}"
        ) from None


def _text(path: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = _line_and_column(data[: error.start].decode("utf-8"))
        raise UnreadableError(
            f"{path}:{where}: expected UTF-8, found byte 0x{data[error.start]:02x}"
        ) from None


def _line_and_column(before: str) -> str:
    """The place right after `before`, as editors count."""
    return f"{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"


def _repeated_keys(node: yaml.Node, key_path: KeyPath, seen: set[yaml.Node]) -> Iterator[Problem]:
    """Each key that stands twice in one mapping; `seen` keeps aliases from being walked again."""
    if node in seen:
        return
    seen.add(node)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated_keys(item, (*key_path, index), seen)
    elif isinstance(node, yaml.MappingNode):
        keys: set[object] = set()
        for key, value in node.value:
            here = (*key_path, str(key.value))
            if (key.tag, str(key.value)) in keys:
                yield here, f"duplicate key, again in line {key.start_mark.line + 1}"
            keys.add((key.tag, str(key.value)))
            yield from _repeated_keys(value, here, seen)


# `${NAME}` and `${NAME:-default}` in the values of a YAML file, taken from the environment.
#
# A value is replaced after YAML has found where it begins and ends: no variable can add a key. Where it stood
# without quotes it is then read as YAML reads what it has become, so that a number may come from a variable.


_REFERENCE = re.compile(
    r"\$\$\{|\$\{(?P<name>[A-Za-z_]\w*)(?P<otherwise>:-(?P<default>[^}]*))?\}|\$\{", re.ASCII
)
_FORM = "${NAME} or ${NAME:-DEFAULT}"


class VariableError(ValueError):
    """A reference that cannot be replaced. `str()` is a sentence that says what to do."""


def substitute(
    loader: yaml.SafeLoader, node: yaml.Node, environ: Mapping[str, str]
) -> list[tuple[yaml.Mark, str]]:
    """Replaces all references within `node`; those that could not be, each with its place. Keys are left."""
    return list(_substitute(loader, node, environ, set()))


def _substitute(
    loader: yaml.SafeLoader, node: yaml.Node, environ: Mapping[str, str], seen: set[yaml.Node]
) -> Iterator[tuple[yaml.Mark, str]]:
    if node in seen:
        return
    seen.add(node)
    if isinstance(node, yaml.ScalarNode):
        if "${" in node.value:
            try:
                node.value = replaced(node.value, environ)
            except VariableError as error:
                yield node.start_mark, str(error)
            if node.style is None:
                node.tag = loader.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
    else:
        inner = node.value if isinstance(node, yaml.SequenceNode) else [value for _, value in node.value]
        for each in inner:
            yield from _substitute(loader, each, environ, seen)


def replaced(text: str, environ: Mapping[str, str]) -> str:
    """The text with its references replaced; `$${` stands for `${`. Raises VariableError."""

    def value(found: re.Match[str]) -> str:
        name = found["name"]
        if found[0] == "$${":
            return "${"
        if name is None:
            raise VariableError(f"expected {_FORM}, found {text!r}; write $${{ for ${{ itself")
        given = environ.get(name)
        if found["otherwise"] is not None:
            return given or found["default"]
        if given is None:
            raise VariableError(f"the variable {name} is not set; set it, or write ${{{name}:-DEFAULT}}")
        return given

    return _REFERENCE.sub(value, text)
