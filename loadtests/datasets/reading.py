"""Reads a file of requests, whichever of the formats it has: its first line tells."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from loadtests.datasets import conversations, mooncake
from loadtests.datasets.nouns import DatasetError, Request
from loadtests.datasets.tables import columns_of

KNOWN = "Mooncake (JSON lines), BurstGPT and Azure (CSV with a head), ShareGPT (a JSON list)"
Parser = Callable[[str], Request | None]


def read(path: Path, *, requests: int, max_tokens: int) -> list[Request]:
    """The first `requests` requests whose prompt has at most `max_tokens` tokens; the file is read no
    further. Raises DatasetError.
    """
    try:
        with path.open(encoding="utf-8-sig") as lines:
            fitting = (each for each in _parsed(path, lines) if each.prompt_tokens <= max_tokens)
            found = list(islice(fitting, requests))
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from error
    if not found:
        raise DatasetError(f"{path}: holds no request of at most {max_tokens} tokens")
    first_s = found[0].at_s
    return [replace(each, at_s=each.at_s - first_s) for each in found]


def read_timed(path: Path, *, requests: int, max_tokens: int) -> list[Request]:
    """The same of a trace: a file that says when each request came. Raises DatasetError."""
    found = read(path, requests=requests, max_tokens=max_tokens)
    if found[0].text:
        raise DatasetError(
            f"{path}: conversations have no times to replay; ask them with make load DATASET={path}"
        )
    return found


def _parsed(path: Path, lines: Iterator[str]) -> Iterator[Request]:
    first = next((line for line in lines if line.strip()), "")
    if first.startswith("["):
        try:
            yield from conversations.parse("".join(chain([first], lines)))
        except ValueError as error:
            raise DatasetError(f"{path}: {error}") from error
    elif first.startswith("{"):
        yield from _of_lines(path, mooncake.parse, chain([first], lines), 1)
    elif columns := columns_of(first):
        yield from _of_lines(path, columns.parser(first), lines, 2)
    else:
        raise DatasetError(f"{path}: begins with {first.strip()[:40]!r}, and is none of: {KNOWN}")


def _of_lines(path: Path, parse: Parser, lines: Iterator[str], start: int) -> Iterator[Request]:
    at_s = 0.0
    for number, line in enumerate(lines, start):
        if not line.strip():
            continue
        try:
            request = parse(line)
            if request is None:
                continue
            if request.at_s < at_s:
                raise ValueError(f"its time is {at_s - request.at_s:g} s before the line before")
        except ValueError as error:
            raise DatasetError(f"{path}:{number}: {error}") from error
        at_s = request.at_s
        yield request
