"""Who may import whom: what keeps decisions apart from I/O, and the load tests outside of the product."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.house.source import ROOT, Source, sources

# Folder -> the modules of this repository that it may import, with what is inside them.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "cellgate": ("cellgate",),
    "cellgate/policies": ("cellgate.policies", "cellgate.router.nouns"),
    "cellgate/probes": ("cellgate.probes", "cellgate.router.nouns"),
    "cellgate/router": ("cellgate.router",),
    "loadtests": ("loadtests",),
    "tests": ("tests", "cellgate", "loadtests"),
}
# What takes microseconds, or compares choices in virtual time, or an index or a conversion with an engine,
# cannot be measured from outside; nor does a gate split requests where that does not pay.
_SINGLE = (
    "kv_events_cost.py",
    "pick_cost.py",
    "vllm/splitting_gate.py",
    "vllm_dialects.py",
    "vllm_kv_events.py",
)
MEASURE_INSIDE = frozenset(
    {*(ROOT / "loadtests" / name for name in _SINGLE), *(ROOT / "loadtests" / "gym").glob("*.py")}
)
# Pure decisions: no clock, no I/O, no randomness but what they are handed.
IMPURE = frozenset({"asyncio", "os", "socket", "ssl", "subprocess", "sys", "threading", "time"})
FOLDERS = ("cellgate", "loadtests", "tests")
LINKS = ("policies", "probes", "proxy", "router")
"""The four folders of the product, under their names at the top as well."""
SOURCES = sources(*FOLDERS)


def is_within(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


def test_imports_follow_the_layout() -> None:
    assert [f"{source.path}: {name}" for source in SOURCES for name in refused(source)] == []


def refused(source: Source) -> list[str]:
    """What a file imports and may not."""
    is_test = ROOT / source.path in MEASURE_INSIDE or source.path.is_relative_to("loadtests/tests")
    folder = "/".join(source.path.parts[:2])
    allowed = MAY_IMPORT["tests" if is_test else folder if folder in MAY_IMPORT else source.path.parts[0]]
    ours = [name for name in source.imports() if name.partition(".")[0] in (*FOLDERS, *LINKS)]
    return [name for name in ours if not any(is_within(name, module) for module in allowed)]


@pytest.mark.parametrize("folder", ["cellgate/router", "cellgate/policies"])
def test_decisions_are_pure(folder: str) -> None:
    used = {name.partition(".")[0] for source in sources(folder) for name in source.imports()}
    assert used & IMPURE == set()


@pytest.mark.parametrize("folder", ["cellgate/router", "cellgate/policies"])
def test_chance_is_handed_in(folder: str) -> None:
    """`random` is imported for its type alone."""
    for source in sources(folder):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id != "random" or node.attr == "Random", f"{source.path}:{node.lineno}"


def test_the_names_at_the_top_are_links_and_nothing_is_imported_by_them() -> None:
    """Other projects have packages of these names. The test above refuses to import ours by them."""
    links = {path.name: path.readlink() for path in ROOT.iterdir() if path.is_symlink()}
    assert {name: links[name] for name in LINKS} == {name: Path("cellgate", name) for name in LINKS}
    assert not [path for path in (ROOT / "cellgate").rglob("*") if path.is_symlink()]


def test_every_folder_has_sources() -> None:
    assert {source.path.parts[0] for source in SOURCES} == set(FOLDERS)
