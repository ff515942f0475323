"""The paths that engines serve, out of their own source: `python -m tests.engine_routes ENGINE FOLDER …`.

It prints a line for each path: `administers`, `computes` or `tells` if the table knows it, else `?`; its
engine, its methods. The table is `tests/unit/request/engine_routes.txt`, a line for each path; what the gate
does with them is compared in `tests/unit/request/test_routes.py`. FOLDER is in an installed package
(vLLM: `vllm/entrypoints`; SGLang: `sglang/srt/entrypoints`). The modules are read and never run.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parent / "unit" / "request" / "engine_routes.txt"
_VERBS = {"get", "post", "put", "delete", "patch", "head"}
_BY_NAME = {"api_route": "GET", "websocket": "GET", "add_api_route": "GET", "route": "GET"}
_ELSEWHERE = (
    "test",
    "/distributed/",
    "/disaggregation/",
    "/mem_cache/",
    "/model_loader/",
    "/platforms/",
    "/utils/",
)
"""Servers that are no part of an engine's API port."""


class Served(NamedTuple):
    """One path; `what` is what it does: `administers`, `computes` or `tells`."""

    what: str
    engine: str
    methods: str
    path: str


def table() -> list[Served]:
    """The paths that are known."""
    lines = TABLE.read_text().splitlines()
    return [Served(*line.split()) for line in lines if line and not line.startswith("#")]


def served(folder: Path) -> Iterator[tuple[str, str]]:
    """The methods and the path of each route in the modules of a folder."""
    for file in sorted(folder.rglob("*.py")):
        if not any(part in f"/{file.relative_to(folder)}" for part in _ELSEWHERE):
            yield from _in_module(ast.parse(file.read_text(errors="replace")))


def _in_module(module: ast.Module) -> Iterator[tuple[str, str]]:
    prefixes = dict(_prefixes(module))
    for call in ast.walk(module):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        name, of = call.func.attr, call.func.value
        path = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
        if isinstance(path, str) and path.startswith("/") and (name in _VERBS or name in _BY_NAME):
            prefix = prefixes.get(of.id, "") if isinstance(of, ast.Name) else ""
            yield _methods(call) or _BY_NAME.get(name, name.upper()), prefix + path


def _prefixes(module: ast.Module) -> Iterator[tuple[str, str]]:
    for assign in ast.walk(module):
        if isinstance(assign, ast.Assign) and isinstance(assign.value, ast.Call):
            for word in assign.value.keywords:
                if word.arg == "prefix" and isinstance(word.value, ast.Constant):
                    yield from (
                        (each.id, str(word.value.value))
                        for each in assign.targets
                        if isinstance(each, ast.Name)
                    )


def _methods(call: ast.Call) -> str:
    for word in call.keywords:
        if word.arg == "methods" and isinstance(word.value, ast.List):
            return ",".join(str(each.value) for each in word.value.elts if isinstance(each, ast.Constant))
    return ""


def main(engine: str, *folders: str) -> None:
    """Print what is there."""
    known = {(one.engine, one.path): one.what for one in table()}
    for methods, path in sorted(
        {found for folder in folders for found in served(Path(folder))}, key=lambda one: one[1]
    ):
        print(f"{known.get((engine, path), '?'):12} {engine:8} {methods:10} {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
