"""Who may import whom: what keeps decisions apart from I/O, and the load tests outside of the product."""

from __future__ import annotations

import ast

from tests.house.source import FOLDERS, ROOT, Finding, Source, owner

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
# cannot be measured from outside; nor does a gate split requests where that does not pay. Puppets say what
# gates would say.
_SINGLE = (
    "kv_events_cost.py",
    "pick_cost.py",
    "puppet_gates.py",
    "vllm/splitting_gate.py",
    "vllm_dialects.py",
    "vllm_kv_events.py",
)
MEASURE_INSIDE = frozenset(
    {*(ROOT / "loadtests" / name for name in _SINGLE), *(ROOT / "loadtests" / "gym").glob("*.py")}
)
LINKS = ("policies", "probes", "proxy", "router")
"""The four folders of the product, under their names at the top as well."""


EXTRAS = "cellgate.extras"


def extras_in_core(source: Source) -> list[Finding]:
    """What the core says of an extra by its module, in an import or in a text. It asks the table for it."""
    if not source.path.is_relative_to("cellgate") or source.room.startswith("extras"):
        return []
    texts = (node.value for node in ast.walk(source.tree) if isinstance(node, ast.Constant))
    said = [text for text in texts if isinstance(text, str) and f"{EXTRAS}." in text]
    imported = [name for name in source.imports() if (owner(name) or "").startswith(f"{EXTRAS}.")]
    return [Finding(str(source.path), name) for name in (*imported, *said)]


def imports_refused(source: Source) -> list[Finding]:
    """What a file imports and may not."""
    is_test = ROOT / source.path in MEASURE_INSIDE or source.path.is_relative_to("loadtests/tests")
    folder = "/".join(source.path.parts[:2])
    allowed = MAY_IMPORT["tests" if is_test else folder if folder in MAY_IMPORT else source.path.parts[0]]
    ours = [name for name in source.imports() if name.partition(".")[0] in (*FOLDERS, *LINKS)]
    return [
        Finding(str(source.path), name)
        for name in ours
        if not any(f"{name}.".startswith(f"{module}.") for module in allowed)
    ]
