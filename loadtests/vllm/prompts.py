"""Prompts of words that the small models know."""

from random import Random

_TEXT = "the gate knows what each unit holds sends a request where it was"


def some_words(rng: Random, count: int) -> str:
    """So many of them, drawn at random."""
    words = _TEXT.split()
    return " ".join(rng.choice(words) for _ in range(count))
