"""Imports follow the layout; decisions are pure; the names at the top are links."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

from tests.extras import needs
from tests.house.layout import LINKS
from tests.house.rules import RULES
from tests.house.source import FOLDERS, ROOT, sources

# Pure decisions: no clock, no I/O, no randomness but what they are handed.
IMPURE = frozenset({"asyncio", "os", "socket", "ssl", "subprocess", "sys", "threading", "time"})


def test_imports_follow_the_layout() -> None:
    assert RULES["imports against the layout"]() == []


@pytest.mark.parametrize("folder", ["cellgate/router", "cellgate/policies"])
def test_decisions_are_pure_and_chance_is_handed_in(folder: str) -> None:
    """`random` is imported for its type alone."""
    for source in sources(folder):
        assert {name.partition(".")[0] for name in source.imports()} & IMPURE == set(), source.path
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id != "random" or node.attr == "Random", f"{source.path}:{node.lineno}"


def test_the_names_at_the_top_are_links_and_nothing_is_imported_by_them() -> None:
    """Other projects have packages of these names. The test above refuses to import ours by them."""
    links = {path.name: path.readlink() for path in ROOT.iterdir() if path.is_symlink()}
    assert {name: links[name] for name in LINKS} == {name: Path("cellgate", name) for name in LINKS}
    assert not [path for path in (ROOT / "cellgate").rglob("*") if path.is_symlink()]
    assert all(sources(folder) for folder in FOLDERS)


@pytest.mark.parametrize(
    "module",
    [
        "proxy.app",
        pytest.param("extras.demo.demo", marks=needs("demo")),
        pytest.param("extras.workers.supervisor", marks=needs("workers")),
        pytest.param("extras.agent", marks=needs("agent")),
    ],
)
def test_what_is_only_installed_with_an_extra_is_imported_by_nothing_that_all_need(module: str) -> None:
    """`make run` and a bare `pip install` have none of it."""
    asked = [each for each in requires("cellgate") or () if "extra ==" in each]
    extras = {re.split(r"[^\w-]", each.replace("_", "-"))[0].lower() for each in asked} - {"cellgate"}
    missing = [
        name
        for name, packages in packages_distributions().items()
        if extras & {each.replace("_", "-").lower() for each in packages}
    ]
    assert {"jwt", "dns", "boto3", "zmq", "kubernetes_asyncio"} <= set(missing)
    # None stands for a module that is not there.
    program = f"import sys; sys.modules.update(dict.fromkeys({missing})); import cellgate.{module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
