"""Each name means one thing.

1. A class or a type (a name in CamelCase) is defined once in the package: it is read far from its import.
2. Any other name that is imported by itself (`from x import name`) comes from one module only. Names that are
   used only in their own module, or with its name in front (`schema.read`), may be defined several times.
3. No two files have the same name, except those in ALLOWED_FILES.
4. A file that is named in the product is there: by its name in the same folder, else by its path.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.house.source import ROOT, Finding, Source, product

ALLOWED_FILES: dict[str, str] = {
    "__init__": "every folder has one",
    "base": "what the files of a registry have in common",
    "start": "what a room does when a gate starts; imported by gates that use the room alone",
    "comparisons": "router/ compares units, control/ acts on what it finds",
    "keys": "admission/ checks them, a command of cli/ makes them",
    "limits": "config/ has bounds of a gate, admission/ what clients may use",
    "prefill_decode": "router/ pairs units, request/ sends a request to both",
    "reports": "what is told: to load balancers, to Redis",
}
"""Names of files that mean one thing wherever they are, with the reason."""

REGISTRIES = frozenset({"policies", "probes", "discovery"})
"""Files here are called what a configuration calls them."""


def defined(source: Source) -> Iterator[str]:
    """The public names that a module defines."""
    for node in source.tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case ast.Assign(targets=targets):
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case _:
                names = []
        yield from (name for name in names if not name.startswith("_") and name != "T")


def taken() -> dict[str, set[str]]:
    """The names that modules import by themselves, each with the files that it is taken from."""
    modules, places = product(), defaultdict[str, set[str]](set)
    for source in modules.values():
        for full in source.imports():
            module, _, name = full.rpartition(".")
            if full not in modules and module in modules:
                places[name].add(str(modules[module].path))
    return places


def names_twice() -> list[Finding]:
    """Names that mean several things, against rules 1 and 2."""
    places: defaultdict[str, set[str]] = defaultdict(set)
    for source in product().values():
        for name in defined(source):
            if is_type(name):
                places[name].add(str(source.path))
    others = {name: files for name, files in taken().items() if not is_type(name)}
    return _twice({**places, **others})


def is_type(name: str) -> bool:
    """Whether it is written as types are."""
    return name[0].isupper() and not name.isupper()


def files_twice() -> list[Finding]:
    """Files that share a name, against rule 3."""
    places: defaultdict[str, set[str]] = defaultdict(set)
    for source in product().values():
        if source.path.stem not in ALLOWED_FILES and source.room not in REGISTRIES:
            places[source.path.stem].add(str(source.path))
    return _twice(places)


def _twice(places: Mapping[str, set[str]]) -> list[Finding]:
    return sorted(Finding(name, ", ".join(sorted(files))) for name, files in places.items() if len(files) > 1)


FOREIGN = (
    "vllm/",
    "sglang/",
    "entrypoints/",
    "renderers/",
    "toy_proxy_server",
    "neuron-monitor-",
    "tensorrt_llm/",
)
"""Files of engines and tools begin so, where one is the source of a wire format."""
_FILE = re.compile(r"[\w/-]*\w\.py\b")


def files_gone(source: Source) -> list[Finding]:
    """Files that a comment or a docstring of the product names, and that are not there."""
    if not source.path.is_relative_to("cellgate"):
        return []
    return [
        Finding(f"{source.path}:{number}", name)
        for number, line in enumerate(source.text.splitlines(), 1)
        for name in _FILE.findall(line)
        if not name.startswith(FOREIGN) and not is_there(source.path, name)
    ]


def is_there(path: Path, name: str) -> bool:
    """Whether the file is in the folder of the one at `path`, or below one of the folders around it."""
    return any((ROOT / around / name).is_file() for around in path.parents)
