"""How an extra is installed: what a person types where this gate was installed."""

from __future__ import annotations

import sys
from pathlib import Path


def how_to_install(extra: str) -> str:
    """The command. There is no public index with this package: its name there would be somebody else's."""
    root, pip = Path(__file__).parents[3], Path(sys.prefix) / "bin/pip"
    if (root / "pyproject.toml").is_file() and (root / "Makefile").is_file():
        inside = pip.is_relative_to(root)
        return f"{pip.relative_to(root) if inside else pip} install '.[{extra}]' (in {root})"
    return f"{pip} install 'cellgate-VERSION-py3-none-any.whl[{extra}]' (the wheel's file, with its path)"
