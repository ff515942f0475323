"""Nouns of what engines say: which build they are, and the answer to the known prompt; both for an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Build(NamedTuple):
    """What a unit's engine says that it is; empty: unknown.

    `fingerprint` is `system_fingerprint` of OpenAI's API. vLLM's has its version, its parallelism and a hash
    of its configuration, llama.cpp's is its build. `version` is what the engine shows on a page of its own.
    """

    fingerprint: str = ""
    version: str = ""

    @property
    def key(self) -> str:
        """What builds are compared by: the fingerprint, or the version of an engine without one."""
        return self.fingerprint or self.version

    def updated(self, news: Build) -> Build:
        """This build with what `news` tells; what that leaves empty stays."""
        return Build(news.fingerprint or self.fingerprint, news.version or self.version)


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
