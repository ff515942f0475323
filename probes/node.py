"""What the probes of a node have in common: when they look, and how much what they find weighs.

1. The node's own bad word (a status, NOT_SERVING, a refusal, a rule that holds) is strong, and fatal when no
   good news came since the last one: one may be a slip, two are a node that cannot work.
2. A node that is late, out of reach or talks nonsense is suspicious and no more: busy is not sick.
3. Two probes of one node have different names, because only who said a fatal thing can take it back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import ClassVar, NamedTuple

from cellgate.probes.base import FetchError, Patient, Trouble
from cellgate.router.nouns import Evidence, Finding, Sign, Strength

_NAME_MAX = 120
_REASON_MAX = 400

_BAD_WORDS = "bad_words"
"""Note: how often the node said that it is not well, since it last said that it is."""


class Word(Enum):
    """What a look at a node came to."""

    GOOD = "good"
    BAD = "bad"
    """The node says so itself."""
    DOUBT = "doubt"
    """Late, out of reach, cut short, nonsense."""
    NOTHING = "nothing"
    """Nothing is learnt of the node."""


class Said(NamedTuple):
    """What was heard of a node, and how to tell a person."""

    word: Word
    reason: str


_SIGNS = {Word.GOOD: Sign.GOOD, Word.BAD: Sign.BAD, Word.DOUBT: Sign.BAD, Word.NOTHING: Sign.NEUTRAL}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProbe(ABC):
    """Looks at `patient.node` every `period_s`. A new one says what it is about, and asks."""

    kind: ClassVar[str]
    refusal: ClassVar[Word] = Word.BAD
    """What a refused connection says of the node."""

    period_s: float = 1.0
    timeout_s: float = 3.0

    @property
    @abstractmethod
    def about(self) -> str:
        """What this probe looks at, to tell it from others of its kind."""

    @abstractmethod
    async def ask(self, patient: Patient) -> Said:
        """One question, bounded in time and bytes. Raises FetchError when there is no answer."""

    @property
    def name(self) -> str:
        """The source of the evidence."""
        return _name(self.kind, self.about)

    def limit_s(self, _patient: Patient) -> float:
        """One question."""
        return self.timeout_s

    def due_at(self, _patient: Patient, last_at: float) -> float:
        """One period after the last look."""
        return last_at + self.period_s

    async def look(self, patient: Patient) -> AsyncGenerator[Finding, None]:
        """One piece of evidence."""
        try:
            said = await self.ask(patient)
        except FetchError as error:
            said = Said(self._word_of(error.trouble), str(error))
        node = patient.node.name if patient.node is not None else None
        yield Evidence(
            patient.unit.name,
            _SIGNS[said.word],
            _strength(patient, said.word),
            self.name,
            _on_one_line(said.reason, _REASON_MAX),
            patient.now(),
            node=node,
        )

    def _word_of(self, trouble: Trouble) -> Word:
        if trouble is Trouble.REFUSED:
            return self.refusal
        return Word.NOTHING if trouble is Trouble.OWN else Word.DOUBT


def _strength(patient: Patient, word: Word) -> Strength:
    """How much a word weighs. Only good news ends a row of bad words."""
    if word is Word.GOOD:
        patient.notes[_BAD_WORDS] = 0
    if word is not Word.BAD:
        return Strength.WEAK
    patient.notes[_BAD_WORDS] = bad_words(patient) + 1
    return Strength.STRONG if bad_words(patient) == 1 else Strength.FATAL


def bad_words(patient: Patient) -> int:
    """How often the node said that it is not well, since it last said that it is."""
    said: int = patient.notes.get(_BAD_WORDS, 0)
    return said


@lru_cache(16_384)
def _name(kind: str, about: str) -> str:
    return _on_one_line(f"{kind} {about}", _NAME_MAX)


def _on_one_line(text: str, longest: int) -> str:
    """Servers' own words may stand in `text`: nothing of them moves a terminal's cursor, or is endless."""
    text = text[:longest]
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
