"""What tools print: what did not hold, tables, the machine that figures were taken on."""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from loadtests.kit import progress


def verdict(problems: Sequence[str]) -> str:
    """In one word."""
    return "FAILED" if problems else "passed"


def print_problems(problems: Sequence[str], most: int | None = None) -> None:
    """A line for each, or for the first of them."""
    print(*(f"  ! {problem}\n" for problem in problems[:most]), sep="", end="", flush=True)


def run_parts(parts: Mapping[str, Callable[[], Sequence[str]]]) -> int:
    """Run parts that say what did not hold, and print that. The exit code: 0 when all of it did."""
    failed = False
    for name, part in parts.items():
        progress.phase(name)
        problems = part()
        print(f"{name}: {verdict(problems)}")
        print_problems(problems)
        failed |= bool(problems)
    return int(failed)


def columns(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """A table whose columns are as wide as they must be; `numbers`: all but the first stand at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if numbers and at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def machine() -> str:
    """One line on the machine, and how busy it is."""
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    cpu = models[0].partition(":")[2].strip() if models else platform.machine()
    return (
        f"{os.cpu_count()} x {cpu}, Linux {platform.release()}, Python {platform.python_version()}, "
        f"load average {os.getloadavg()[0]:.1f}"
    )
