"""`${NAME}` and `${NAME:-default}` in the values of a YAML file, taken from the environment.

A value is replaced after YAML has found where it begins and ends: no variable can add a key. Where it stood
without quotes it is then read as YAML reads what it has become, so that a number may come from a variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import yaml

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
