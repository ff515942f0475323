"""Traces as CSV with a head: when each request came, and how many tokens it and its answer had; no texts.

BurstGPT (https://github.com/HPMLL/BurstGPT): `Timestamp` in seconds, `Request tokens`, `Response tokens`
(0: it failed), and more columns. Azure's LLM inference traces
(https://github.com/Azure/AzurePublicDataset): `TIMESTAMP` as a date, `ContextTokens`, `GeneratedTokens`.
"""

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from loadtests.datasets.nouns import Request

_FRACTION = re.compile(r"(\.\d{6})\d+")
"""Azure tells ten millionths of a second, Python reads millionths."""


def _seconds(text: str) -> float:
    return float(text)


def _date(text: str) -> float:
    at = datetime.fromisoformat(_FRACTION.sub(r"\1", text.strip()))
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns a format has, and how its times are read."""

    at: str
    prompt: str
    answer: str
    time: Callable[[str], float]

    def parser(self, head: str) -> Callable[[str], Request | None]:
        """What reads the lines below this head; None: the request failed when the trace was made. Raises
        ValueError, as the parser does, with the reason.
        """
        names = _cells(head)
        places = [names.index(name) for name in (self.at, self.prompt, self.answer)]

        def parse(line: str) -> Request | None:
            cells = _cells(line)
            if len(cells) != len(names):
                raise ValueError(f"has {len(cells)} columns, the head has {len(names)}")
            at, prompt, answer = (cells[place] for place in places)
            prompt_tokens, answer_tokens = _count(self.prompt, prompt), _count(self.answer, answer)
            if not prompt_tokens or not answer_tokens:
                return None
            try:
                return Request(self.time(at), prompt_tokens, answer_tokens)
            except ValueError:
                raise ValueError(f"{self.at} has to be a time, found {at[:40]!r}") from None

        return parse


BURST_GPT = Columns("Timestamp", "Request tokens", "Response tokens", _seconds)
AZURE = Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", _date)
TABLES = (BURST_GPT, AZURE)


def columns_of(head: str) -> Columns | None:
    """The format with this head; None: none of them."""
    names = set(_cells(head))
    return next((each for each in TABLES if {each.at, each.prompt, each.answer} <= names), None)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([line]), [])]


def _count(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{name} has to be a whole number, found {text[:40]!r}")
    return int(text)
