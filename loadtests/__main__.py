"""`python -m loadtests`: what there is to drill and to measure, a line for each tool, with its command."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PARTS = frozenset({"kit", "simunit", "sglang", "tests", "vllm", "wire"})
"""Folders of what tools are made of."""
HELPERS = frozenset(
    {"abuse.neighbour", "bench.bare", "bench.engine", "bench.generator", "puppet_gates", "replay.units"}
)
"""What a tool starts as a process of its own."""
_MAIN = 'if __name__ == "__main__":'


def tools() -> Iterator[tuple[str, str]]:
    """The module of each tool, and what its first line says of it."""
    for path in sorted(HERE.rglob("*.py")):
        *folders, name = path.relative_to(HERE).with_suffix("").parts
        module = ".".join(folders if name == "__main__" else [*folders, name])
        if not module or PARTS & set(folders) or module in HELPERS:
            continue
        text = path.read_text()
        if _MAIN in text:
            first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            yield f"loadtests.{module}", first


def main() -> int:
    """Print the list."""
    print(
        "Each runs as `.venv/bin/python -m NAME`, after `make check`, which sets up .venv. A tool that needs"
    )
    print("more installs it, or says which command does.\n")
    for module, first in tools():
        print(f"{module:<32}{first}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
