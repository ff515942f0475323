"""The sources: modules of the product with their rooms and imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PRODUCT = ("cellgate/router", "cellgate/policies", "cellgate/probes", "cellgate/proxy", "cellgate/extras")
FOLDERS = ("cellgate", "loadtests", "tests")


class Finding(NamedTuple):
    """One place where a rule is broken."""

    where: str
    detail: str


@dataclass(frozen=True)
class Source:
    """One file of Python."""

    path: Path
    """From the root of the repository."""

    @cached_property
    def text(self) -> str:
        return (ROOT / self.path).read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def module(self) -> str:
        """Its full name in the package, such as `cellgate.router.board`."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """A folder of proxy/ or one beside it, or an extra; a file on top of proxy/ is one too, and so is the
        table of extras.
        """
        _, folder, *rest = self.path.with_suffix("").parts
        match folder:
            case "proxy":
                return rest[0]
            case "extras":
                return "extras" if rest == ["__init__"] else f"extras/{rest[0]}"
        return folder

    def imports(self) -> Iterator[str]:
        """The full names of all that is imported, wherever in the file, for type checkers alone included."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno}: imports are absolute here"
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(*folders: str) -> Iterator[Source]:
    """All files of these folders."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return (Source(path.relative_to(ROOT)) for path in paths)


@lru_cache
def product() -> Mapping[str, Source]:
    """The modules of the product by name. A folder without a line of its own is none."""
    return MappingProxyType({source.module: source for source in sources(*PRODUCT) if source.text})


def owner(name: str) -> str | None:
    """The module of the product that an imported name is, or is in."""
    while name and name not in product():
        name = name.rpartition(".")[0]
    return name or None


@lru_cache
def uses() -> Mapping[str, frozenset[str]]:
    """The modules of the product that each of them imports."""
    owners = {name: map(owner, source.imports()) for name, source in product().items()}
    return {name: frozenset(o for o in used if o and o != name) for name, used in owners.items()}
