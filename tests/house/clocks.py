"""No test depends on how fast the machine is: what it needs it waits for, by looking or by being told.

1. A test reads no clock: no bound on time that has passed. What measures time or CPU bears the mark `alone`.
2. A test does not sleep so that something will have happened by then. A loop that looks again and again
   (`while not ...: sleep`) waits for something, and so may sleep; so may a peer that never answers (for
   `FOREVER_S`, or longer). In virtual time a sleep is exact.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from tests.house.source import Finding, Source

FOREVER_S = 60.0
CLOCKS = frozenset({"monotonic", "perf_counter", "process_time"})
REAL_FOLDERS = frozenset({"sockets", "processes", "real", "browser"})
REAL_LOOPS = frozenset({"asyncio.run", "uvloop.run"})
OTHER_RULES = frozenset({"alone", "nightly", "simulated"})
"""Decorators of a test, or marks of its file, with which it may do both."""

SLEEPS_LEFT: dict[str, int] = {
    "tests/processes/test_handover.py": 1,
    "tests/processes/extras/operator/test_recovery_in_kubernetes.py": 1,
    "tests/real/extras/redis/test_shared_limits.py": 1,
    "tests/sockets/test_admin_bounds.py": 4,
    "tests/sockets/test_admin_pages.py": 1,
    "tests/sockets/test_admin_port.py": 1,
    "tests/sockets/test_gate_clients.py": 4,
    "tests/sockets/extras/guardrail/test_gate_guardrail.py": 3,
    "tests/sockets/extras/web_tokens/test_web_tokens.py": 1,
    "tests/sockets/extras/realtime/test_gate_realtime.py": 2,
    "tests/sockets/test_gate_requests.py": 3,
    "tests/sockets/test_gate_tls.py": 1,
    "tests/sockets/test_haproxy_agent.py": 3,
    "tests/sockets/extras/operator/test_kubernetes_leases.py": 1,
    "tests/sockets/extras/kv_events/test_kv_events.py": 1,
    "tests/unit/process/test_process.py": 1,
    "tests/unit/extras/redis/test_link.py": 1,
}
"""Files of tests that sleep in real time still, and how often: a number may fall, and none may come."""


def clocks_and_sleeps(source: Source) -> list[Finding]:
    """Tests that read a clock, or sleep in real time more often than is left to their file."""
    path = str(source.path)
    if not (path.startswith("tests/") and source.path.name.startswith("test_")) or _is_apart(
        _marks(source.tree)
    ):
        return []
    reads, sleeps = of_file(source)
    found = [Finding(f"{path}:{line}", "reads a clock, and is not marked `alone`") for line in reads]
    if len(sleeps) != (left := SLEEPS_LEFT.get(path, 0)):
        lines = ", ".join(map(str, sleeps))
        found.append(Finding(path, f"sleeps {len(sleeps)} times (lines {lines}); left to it are {left}"))
    return found


def of_file(source: Source) -> tuple[list[int], list[int]]:
    """The lines that read a clock, and those that sleep in real time."""
    calls = [
        (ast.unparse(call.func), call, looks)
        for node in source.tree.body
        if not _is_apart(getattr(node, "decorator_list", ())) and getattr(node, "name", "") != "main"
        for call, looks in _calls(node, looks=False)
    ]
    is_real = source.path.parts[1] in REAL_FOLDERS or any(name in REAL_LOOPS for name, _, _ in calls)
    is_real |= _has_tests_of_asyncio(source.tree)
    reads = [call.lineno for name, call, _ in calls if name.rpartition(".")[2] in CLOCKS]
    sleeps = [
        call.lineno
        for name, call, looks in calls
        if name == "time.sleep" or (name == "asyncio.sleep" and is_real)
        if not looks and not _is_harmless(call.args[0])
    ]
    return reads, sleeps


def _calls(node: ast.AST, *, looks: bool) -> Iterator[tuple[ast.Call, bool]]:
    """The calls inside, and whether each is in a loop that looks whether something is so."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, looks
        is_look = isinstance(child, ast.While) and not isinstance(child.test, ast.Constant)
        yield from _calls(child, looks=looks or is_look)


def _has_tests_of_asyncio(tree: ast.Module) -> bool:
    """Whether it has async tests that nothing but `asyncio.run` runs (tests/conftest.py)."""
    names = {getattr(node, "name", "") for node in tree.body} | {ast.unparse(mark) for mark in _marks(tree)}
    return not names & {"play", "pytest.mark.usefixtures('play')"} and any(
        isinstance(node, ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and all("parametrize" in ast.unparse(each) for each in node.decorator_list)
        for node in tree.body
    )


def _is_harmless(delay: ast.expr) -> bool:
    """Whether it is no time at all, or for ever."""
    return isinstance(delay, ast.Constant) and not 0 < float(str(delay.value)) < FOREVER_S


def _marks(tree: ast.Module) -> list[ast.expr]:
    return [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]


def _is_apart(marks: Sequence[ast.expr]) -> bool:
    return any(ast.unparse(mark).partition("(")[0].rpartition(".")[2] in OTHER_RULES for mark in marks)
