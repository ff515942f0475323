"""What would the tests notice? `python -m tests.mutants` puts faults into the product.

A mutant has, in one function, another operator, condition, number, statement or result: a seed takes so many.
The deterministic tests that call the function run, quickest first, until one fails; what none finds in
SECONDS of tests survives. Tests are collected once: a mutant is a fork, where the function has other code.
Mutants have lasting names, so that runs before and after a change of tests compare.

build/reach.jsonl keeps which test calls what; build/mutants.jsonl who found which, and is asked first again.
Both grow with the hunt: one that was interrupted loses nothing.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import importlib
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).parents[1]
OF = ("cellgate/router", "cellgate/proxy/http")
LANE = [f"tests/{folder}" for folder in ("unit", "laws", "machines", "sim", "scenarios", "sockets")]
"""Not tests/cost: it counts bytecodes, and so finds every mutant."""
REACH = ROOT / "build" / "reach.jsonl"
FOUND = ROOT / "build" / "mutants.jsonl"
UNCALLED, NOBODY, HANGS = "called by no test", "found by no test", "a test hangs"
FORKS = 2
PART = 50
"""As many tests share a fork while it is measured what they call."""
SECONDS = 10.0
"""Of a processor, for the tests that a mutant has to survive."""
HANGS_CPU_S = 4 * SECONDS
HANGS_S = 600
"""What takes longer hangs, which somebody would notice."""

PAIRS = "Lt LtE, Gt GtE, Eq NotEq, In NotIn, Is IsNot, And Or, Add Sub, Mult Div, Break Continue"
OTHER: dict[str, Any] = {}
for one, two in (pair.split() for pair in PAIRS.split(", ")):
    OTHER |= {one: getattr(ast, two), two: getattr(ast, one)}


def fault(node: ast.AST) -> Any:
    """A node with a fault for the place of this one; None where there is none to put."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right) if operator := other(op):
            return ast.Compare(left, [operator], right)
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(other(op), values)
        case ast.BinOp(left=left, op=op, right=one) if operator := other(op):
            return ast.BinOp(left, operator, one)
        case ast.AugAssign(target=target, op=op, value=value) if operator := other(op):
            return ast.AugAssign(target, operator, value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=bool() | int() | float() as value):
            return ast.Constant(not value if isinstance(value, bool) else value + 1)
        case ast.If(test=test, body=body, orelse=orelse):
            return ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            return ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Assign(targets=[ast.Attribute()]):
            return ast.Pass()
        case ast.Break() | ast.Continue():
            return other(node)
    return None


def other(operator: ast.AST) -> Any:
    """The operator that is nearly this one, if it has one."""
    kind: Any = OTHER.get(type(operator).__name__)
    return kind and kind()


@dataclass(frozen=True)
class Site:
    """Where a mutant is: a function of a file, its first line, and a node of it that can have a fault."""

    file: str
    tree: ast.Module
    function: str
    first_line: int
    number: int
    node: ast.AST

    @property
    def called(self) -> str:
        return f"{self.file}:{self.function}"

    @property
    def name(self) -> str:
        return f"{self.called}#{self.number}"

    def code(self) -> CodeType:
        """The code of the function with the fault, which stays in the tree."""
        path = str(ROOT / self.file)
        tree: ast.Module = Put(self.node).visit(self.tree)
        module = compile(ast.fix_missing_locations(tree), path, "exec")
        found = (path, self.function, self.first_line)
        return next(code for code in inside(module) if identity(code) == found)


class Put(ast.NodeTransformer):
    """Puts the fault of a node into its tree."""

    def __init__(self, node: ast.AST) -> None:
        self.node = node

    def visit(self, node: ast.AST) -> Any:
        return ast.copy_location(fault(node), node) if node is self.node else self.generic_visit(node)


def sites(file: str) -> Iterator[Site]:
    """Every mutant of a file, in the same order at each parsing."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    owners = [(node, "") for node in tree.body]
    while owners:
        owner, prefix = owners.pop()
        if isinstance(owner, ast.ClassDef):
            owners += [(node, f"{prefix}{owner.name}.") for node in owner.body]
        if isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min(node.lineno for node in (owner, *owner.decorator_list))
            nodes = (node for part in owner.body for node in ast.walk(part) if fault(node))
            for number, node in enumerate(nodes):
                yield Site(file, tree, f"{prefix}{owner.name}", first, number, node)


def chosen(folders: Sequence[str], mutants: int, seed: int) -> list[Site]:
    """So many mutants of these folders and files. Their names say which: a change elsewhere moves none."""
    paths = [path for each in folders for path in [ROOT / each, *(ROOT / each).rglob("*")]]
    files = sorted(str(path.relative_to(ROOT)) for path in paths if path.suffix == ".py")
    every = (site for file in files for site in sites(file))
    return sorted(every, key=lambda site: hashlib.sha256(f"{seed} {site.name}".encode()).digest())[:mutants]


def identity(code: CodeType) -> tuple[str, str, int]:
    """What the code that runs and the code of a mutant share."""
    return code.co_filename, code.co_qualname, code.co_firstlineno


def inside(code: CodeType) -> Iterator[CodeType]:
    """The code of every function that stands in this code."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from inside(constant)


class Hunt:
    """The plugin of pytest: what runs in the place of its own loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.has_failed = False
        self.items: dict[str, pytest.Item] = {}
        self.alive: dict[tuple[str, str, int], FunctionType] = {}
        self.works: list[tuple[Site, list[str]]] = []
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.has_failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Measure the tests that are new, then try each mutant on those that call it."""
        session.config.pluginmanager.unregister(name="terminalreporter")
        mutants = chosen(self.options.of, self.options.mutants, self.options.seed)
        for file in {site.file for site in mutants}:
            # Some are imported where they are needed only, and then a fork has no function to change.
            importlib.import_module(".".join(Path(file).with_suffix("").parts).removesuffix(".__init__"))
        gc.unfreeze()
        functions = [each for each in gc.get_objects() if isinstance(each, FunctionType)]
        self.alive = {identity(each.__code__): each for each in functions}
        gc.freeze()
        self.items = {item.nodeid: item for item in session.items}
        reach, before = kept(REACH), kept(FOUND)
        new = [test for test in self.items if test not in reach]
        for part in forks(self.calls, [new[start : start + PART] for start in range(0, len(new), PART)]):
            reach |= keep(REACH, part or {})
        callers = defaultdict(list)
        for seconds, test in sorted((reach[test][0], test) for test in self.items):
            for called in reach[test][1]:
                callers[called].append((seconds, test))
        for site in mutants:
            tests = [before[site.name]] if before.get(site.name) in self.items else []
            left_s = SECONDS
            for seconds, test in callers[site.called]:
                left_s -= seconds
                tests += [test] if left_s > 0 else []
            self.works.append((site, tests))
        for (site, _), by in zip(self.works, forks(self.who_finds, range(len(self.works))), strict=True):
            self.found |= keep(FOUND, {site.name: by or HANGS})
            print(f"{site.file}:{getattr(site.node, 'lineno', '')} {site.name}: {by or HANGS}", flush=True)
        return True

    def run(self, tests: Sequence[str]) -> Iterator[str]:
        """Run tests, each as it is asked for."""
        items = [self.items[test] for test in tests]
        for item, after in itertools.zip_longest(items, items[1:]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            yield item.nodeid

    def who_finds(self, work: int) -> str:
        """The first test that fails with a mutant. The function remains what it becomes."""
        site, tests = self.works[work]
        if not tests:
            return UNCALLED
        signal.setitimer(signal.ITIMER_PROF, HANGS_CPU_S)
        signal.alarm(HANGS_S)
        code = site.code()
        self.alive[identity(code)].__code__ = code
        return next((test for test in self.run(tests) if self.has_failed), NOBODY)

    def calls(self, tests: Sequence[str]) -> dict[str, tuple[float, list[str]]]:
        """For each test its seconds, and which functions of the product it calls."""
        found, running = {}, self.run(tests)
        for test in tests:
            called: set[CodeType] = set()
            began = time.process_time()
            sys.settrace(partial(note, called))
            next(running)
            sys.settrace(None)
            ours = (code for code in called if code.co_filename.startswith(f"{ROOT}/cellgate/"))
            names = {f"{code.co_filename[len(str(ROOT)) + 1 :]}:{code.co_qualname}" for code in ours}
            found[test] = (time.process_time() - began, sorted(names))
        return found


def note(called: set[CodeType], frame: FrameType, event: str, _: object) -> None:
    """What `sys.settrace` calls at each call of a function, and at nothing else."""
    called.add(frame.f_code)


def forks(work: Callable[[Any], object], parts: Iterable[Any]) -> Iterator[Any]:
    """What the work says of each part, in order, each in a fork of its own: None for one that hangs."""
    running: deque[Callable[[], Any]] = deque()
    for part in parts:
        running.append(forked(work, part))
        if len(running) == FORKS:
            yield running.popleft()()
    for result in running:
        yield result()


def forked(work: Callable[[Any], object], part: Any) -> Callable[[], Any]:
    """Begin the work; what is returned waits for its end."""
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    file = Path(folder.name, "result")
    if not (pid := os.fork()):
        try:
            os.environ["PYTEST_DEBUG_TEMPROOT"] = folder.name
            file.write_text(json.dumps(work(part)))
        finally:
            os._exit(0)

    def result() -> Any:
        os.waitpid(pid, 0)
        with folder:
            return json.loads(file.read_text()) if file.exists() else None

    return result


def keep(file: Path, part: dict[str, Any]) -> dict[str, Any]:
    """Add a part to what a file keeps."""
    with file.open("a") as rows:
        rows.write(json.dumps(part) + "\n")
    return part


def kept(file: Path) -> dict[str, Any]:
    """All that a file keeps; of what was said twice the last."""
    rows = file.read_text().splitlines() if file.exists() else []
    return {key: value for row in rows for key, value in json.loads(row).items()}


def main() -> int:
    """Hunt, and say how many were found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--of", nargs="+", default=OF, help="folders or files of the product")
    parser.add_argument("--mutants", type=int, default=300, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    hunt = Hunt(parser.parse_args())
    settings.register_profile("once", settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate))
    FOUND.parent.mkdir(exist_ok=True)
    quiet = ("--hypothesis-profile=once", "-W", "ignore:Module already imported")
    pytest.main(["-m", "not (alone or nightly)", *quiet, *LANE], plugins=[hunt])
    by = Counter(each if each in (UNCALLED, NOBODY) else "found" for each in hunt.found.values())
    print(f"{by['found']} of {len(hunt.found)} mutants found")
    print(f"{by[NOBODY]} {NOBODY}, {by[UNCALLED]} {UNCALLED}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
