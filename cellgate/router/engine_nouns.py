"""Nouns of what engines say: which build they are, and the answer to the known prompt; both for an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

CHANGES_MAX = 1
"""A fingerprint may change so often in an epoch: a fast restart of an engine is not always seen."""


class Build(NamedTuple):
    """What a unit's engine says that it is; empty: unknown.

    `fingerprint` is `system_fingerprint` of OpenAI's API. vLLM's has its version, its parallelism and a hash
    of its configuration, llama.cpp's is its build. `version` is what the engine shows on a page of its own.
    `changes`: how many times the fingerprint was another one than before. Engines, and proxies before them,
    that make up a new one for each answer say nothing by it: then it stays empty.
    """

    fingerprint: str = ""
    version: str = ""
    changes: int = 0

    @property
    def key(self) -> str:
        """What builds are compared by: the fingerprint, or the version of an engine without one."""
        return self.fingerprint or self.version

    def differs(self, other: Build) -> bool:
        """Whether both tell the same thing of themselves, and tell it differently. A unit that has only just
        started has told its version, and no fingerprint yet.
        """
        if self.fingerprint and other.fingerprint:
            return self.fingerprint != other.fingerprint
        return bool(self.version and other.version) and self.version != other.version

    def updated(self, news: Build) -> Build:
        """This build with what `news` tells; what that leaves empty stays."""
        changes = self.changes + (news.fingerprint not in ("", self.fingerprint) and self.fingerprint != "")
        fingerprint = "" if changes > CHANGES_MAX else news.fingerprint or self.fingerprint
        return Build(fingerprint, news.version or self.version, changes)


@dataclass(frozen=True, slots=True)
class Built:
    """The build that a unit reports; what is empty was not reported."""

    unit: str
    build: Build
    at: float


class AnswerToken(NamedTuple):
    """One token of an answer: its text, its log probability, and the next likely tokens with theirs.

    None: the engine does not say. NaN: it cannot say, because it computes no numbers.
    """

    token: str
    logprob: float | None = None
    others: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to the known prompt. Only answers to the same `question` (API and model) are compared.

    No `tokens`: the unit answered, but gave no answer.
    """

    unit: str
    question: str
    tokens: tuple[AnswerToken, ...]
    at: float


class Urgency(IntEnum):
    """How soon the known prompt is to be sent to a unit."""

    ROUTINE = 0
    SOON = 1
    """As soon as it is idle."""
    NOW = 2
    """Even if it has requests."""


UNKNOWN_BUILD = Build()
