"""Every request as a line of JSON: what the load's process leaves for whoever judges the run.

What must stay true: the last line says how many requests were begun, so that none can be forgotten.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import orjson

from loadtests.drill.answers import Answer, End


class UnfinishedError(Exception):
    """The records are not all there."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Times are of the wall clock; `first_at` None: it showed no token."""

    mix: str
    end: End
    why: str
    sent_at: float
    first_at: float | None
    ended_at: float
    prompt_tokens: int
    tokens: int
    gaps_s: list[float]

    @classmethod
    def of(cls, answer: Answer) -> Self:
        """The record of an answer that has ended."""
        end, why = answer.end()
        return cls(
            mix=answer.request.mix,
            end=end,
            why=why,
            sent_at=answer.sent_at,
            first_at=answer.first_at,
            ended_at=answer.ended_at,
            prompt_tokens=answer.request.prompt_tokens,
            tokens=answer.completion_tokens or answer.tokens,
            gaps_s=[round(gap, 4) for gap in answer.gaps_s],
        )

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; of an answer in one piece, to all of it."""
        return None if self.first_at is None else self.first_at - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: None for less than two."""
        return sum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else None

    @property
    def e2e_s(self) -> float:
        """From the request to the end of its answer."""
        return self.ended_at - self.sent_at


class Writer:
    """Appends records to a file, and says at the end how many there must be."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._begun = 0

    def begin(self) -> None:
        """A request is about to be sent."""
        self._begun += 1

    def write(self, record: Record) -> None:
        """It has ended."""
        self._file.write(orjson.dumps(asdict(record)) + b"\n")

    def close(self) -> None:
        """No more will come."""
        self._file.write(orjson.dumps({"begun": self._begun}) + b"\n")
        self._file.close()


def read(path: Path) -> list[Record]:
    """All records, in the order in which they ended. Raises UnfinishedError when one is missing."""
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    if not lines or "begun" not in lines[-1]:
        raise UnfinishedError(f"{path}: the load ended before its time; its log is beside it")
    *entries, last = lines
    if len(entries) != last["begun"]:
        raise UnfinishedError(f"{path}: {last['begun']} requests were begun, {len(entries)} have ended")
    return [Record(**(entry | {"end": End(entry["end"])})) for entry in entries]
