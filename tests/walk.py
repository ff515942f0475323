"""Walks requests through the gate: which of our functions are called, in which files, for which objects.

`python -m tests.walk` shows it and fails when docs/evidence/walk.md says otherwise; `--write` writes it.
A gate without sockets (tests/cost/bench.py) is handed a streamed request and a plain one. Comprehensions are
no functions here. What happens by time alone (a tick, a probe, a scrape) is no part of a request.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import TypeVar

import cellgate
from cellgate.router.pick import Router
from tests.cost.bench import Bench
from tests.cost.traffic import END, HEAD, WHOLE, request, token
from tests.sim.loop import SimLoop

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence" / "walk.md"
BEGIN, STOP = "<!-- python -m tests.walk --write -->", "<!-- end of the walk -->"
TOLERANCE = 3
"""By so much the calls, files or depth of a step may be others than the page says."""
GOALS = "at most 165 calls, 30 files, a depth of 12 and 9 objects a streamed request; 2 calls a chunk"
STEP_S = 0.02
WARM_UP = 4
"""So many requests of each kind go before."""

_PACKAGE = str(Path(cellgate.__file__).parent)
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})


@dataclass
class Step:
    """A part of a request's life: how often our functions were called in it."""

    title: str
    calls: Counter[CodeType] = field(default_factory=Counter)
    depth: int = 0
    """How deep calls into another file were nested at most."""
    stack: int = 0
    """How many of our functions were on the stack at most."""

    @property
    def files(self) -> set[Path]:
        """Where these functions are, below cellgate/."""
        return {Path(code.co_filename).resolve().relative_to(ROOT / "cellgate") for code in self.calls}


class Walker:
    """Does things, and counts the calls of our functions meanwhile."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._entered: list[tuple[str, int]] = []
        """Of our functions on the stack: the file, and how many calls into another one lead there."""

    async def step(self, title: str, do: Callable[[], T]) -> T:
        """Do it, and let time pass. What is called is a step, or several: the pick is one of its own."""
        self.steps.append(Step(title))
        sys.setprofile(self._on_event)
        try:
            return do()
        finally:
            sys.setprofile(None)
            await asyncio.sleep(STEP_S)

    def _on_event(self, frame: FrameType, event: str, _arg: object) -> None:
        code, is_pick = frame.f_code, frame.f_code is Router.pick.__code__
        if not code.co_filename.startswith(_PACKAGE) or code.co_name in _COMPREHENSIONS:
            return
        if event == "call":
            if is_pick:
                self.steps.append(Step("pick"))
            self._count(code)
        elif event == "return":
            self._entered.pop()
            if is_pick:
                self.steps.append(Step("sent to the unit"))

    def _count(self, code: CodeType) -> None:
        """One of our functions is called."""
        step, entered = self.steps[-1], self._entered
        file, depth = entered[-1] if entered else ("", 0)
        entered.append((code.co_filename, depth + (file != code.co_filename)))
        step.calls[code] += 1
        step.depth, step.stack = max(step.depth, entered[-1][1]), max(step.stack, len(entered))


@dataclass(frozen=True)
class Walked:
    """The steps of a streamed request, its chunk apart, and of a plain one. `objects` of our classes live in
    the middle of a stream for its sake.
    """

    stream: list[Step]
    chunk: Step
    plain: list[Step]
    objects: Counter[str]


def walk() -> Walked:
    """Walk a streamed request and a plain one, neither the first of its unit, in virtual time."""
    loop = SimLoop(limit_s=60.0)
    try:
        return loop.run_until_complete(_walk())
    finally:
        loop.close()


async def _walk() -> Walked:
    bench = Bench(asyncio.get_running_loop())
    # What else this process holds may be so much that connections grow old while it is looked through.
    gc.freeze()
    try:
        for _ in range(WARM_UP):
            await _streamed(bench)
            await _plain(bench)
        stream, objects = await _streamed(bench)
        plain, chunk = await _plain(bench), stream.pop(-2)
    finally:
        gc.unfreeze()
        bench.close()
    return Walked(stream, chunk, plain, objects)


async def _streamed(bench: Bench) -> tuple[list[Step], Counter[str]]:
    asked, first, chunk, before = request(stream=True), token(0), token(1), _ours()
    walker = Walker()
    conn = await walker.step("arrival to pick", lambda: bench.ask(asked))
    await walker.step("head", lambda: conn.data_received(HEAD))
    await walker.step("first token", lambda: conn.data_received(first))
    await walker.step("chunk", lambda: conn.data_received(chunk))
    known = {id(thing) for thing in before}
    objects = Counter(type(thing).__name__ for thing in _ours() if id(thing) not in known)
    await walker.step("end", lambda: conn.data_received(END))
    return walker.steps, objects


async def _plain(bench: Bench) -> list[Step]:
    asked = request(stream=False)
    walker = Walker()
    conn = await walker.step("arrival to pick", lambda: bench.ask(asked))
    await walker.step("reply", lambda: conn.data_received(WHOLE))
    return walker.steps


def _ours() -> list[object]:
    """All objects of our classes that there are."""
    gc.collect()
    return [thing for thing in gc.get_objects() if str(type(thing).__module__).startswith("cellgate.")]


def table(walked: Walked) -> str:
    """What was found, as it stands on the page."""
    lines = ["| step | calls | files | depth | where |", "|---|---|---|---|---|"]
    lines += [_row(step.title, [step], where=_where(step.files)) for step in walked.stream]
    lines.append(_row("**a streamed request**", walked.stream, where="all of these"))
    lines.append(_row("**a chunk of it**", [walked.chunk], where=_where(walked.chunk.files)))
    lines.append(_row("**a plain request**", walked.plain, where="the same, without what is for streams"))
    names = ", ".join(f"`{name}`" for name in sorted(walked.objects.elements()))
    return "\n".join([*lines, "", f"{walked.objects.total()} objects live with a streamed request: {names}."])


def _row(title: str, steps: Iterable[Step], where: str) -> str:
    steps = list(steps)
    files = set[Path]().union(*(step.files for step in steps))
    calls, depth = sum(step.calls.total() for step in steps), max(step.depth for step in steps)
    return f"| {title} | {calls} | {len(files)} | {depth} | {where} |"


def _where(files: Iterable[Path]) -> str:
    """Files by their folders."""
    folders: defaultdict[Path, list[str]] = defaultdict(list)
    for path in sorted(files):
        folders[path.parent].append(path.stem)
    return "; ".join(f"`{folder}/` {' '.join(stems)}" for folder, stems in folders.items())


def written() -> str:
    """What the page says. Raises ValueError when it has no place for it."""
    return _page()[1]


def write(new: str) -> None:
    """Put it on the page. Raises ValueError when it has no place for it."""
    before, _, after = _page()
    PAGE.write_text(f"{before}\n{new}\n{after}", encoding="utf-8")


def _page() -> tuple[str, str, str]:
    """The page: what is before the walk, the walk, and what is after it."""
    text = PAGE.read_text(encoding="utf-8")
    begin, stop = text.index(BEGIN) + len(BEGIN), text.index(STOP)
    return text[:begin], text[begin:stop].strip("\n"), text[stop:]


def stale(old: str, new: str) -> list[str]:
    """The rows of a page that are off by more than TOLERANCE, as they are now; the objects, if others."""
    said = {title: counts for title, *counts in _rows(old)}
    off = [
        f"{title}: {calls} calls in {files} files, {depth} deep"
        for title, calls, files, depth in _rows(new)
        if title not in said
        or any(
            abs(int(now) - int(then)) > TOLERANCE
            for now, then in zip((calls, files, depth), said[title], strict=True)
        )
    ]
    objects = new.splitlines()[-1]
    return off + ([] if objects in old else [objects])


def _rows(text: str) -> list[tuple[str, str, str, str]]:
    return re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)


def main() -> None:
    """Show it, and write it or compare it."""
    parser = argparse.ArgumentParser(prog="python -m tests.walk")
    parser.add_argument("--write", action="store_true", help="write it to docs/architecture.md")
    walked = walk()
    found, stack = table(walked), max(step.stack for step in walked.stream)
    print(found, f"\nThe goals: {GOALS}. At most {stack} of our functions are on the stack.")
    if parser.parse_args().write:
        write(found)
    elif off := stale(written(), found):
        sys.exit("\n".join(["docs/evidence/walk.md says otherwise; --write corrects it:", *off]))


if __name__ == "__main__":
    main()
