"""The unit's language: a reversible tokenizer, a chat template, text that is a function of what precedes it.

1. A generated token is chosen by the hash of all text before it. So whoever sends prompt + text so far, by
   the completions API or as the final assistant message of a chat, gets exactly what would have come next.
2. Each generated token is one token again when it comes back in a prompt, so counts agree between units.
3. The same running hash names the KV blocks of the prefix cache.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

BLOCK_TOKENS = 16
"""Tokens in one KV block, vLLM's default."""

_PIECE = re.compile(rb" ?[A-Za-z0-9]{1,5}+|[\x80-\xff]{1,6}+|[^\sA-Za-z0-9\x80-\xff]{1,6}+|\s")
LONGEST_PIECE_BYTES = 6
_BLOCK = re.compile(rb"(?:(?>%b)){%d}" % (_PIECE.pattern, BLOCK_TOKENS))
"""The pieces of a full block, found at once: a unit stands still while it reads a prompt."""
_SYLLABLES = tuple(consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou")
WORDS = tuple(f" {first}{second}" for first in _SYLLABLES for second in _SYLLABLES)
"""Everything the unit can say, one token each."""

_WORD_BYTES = tuple(word.encode() for word in WORDS)


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, its content already flattened to text."""

    role: str
    content: str


def render_chat(messages: Sequence[Message], *, add_generation_prompt: bool, continue_final: bool) -> str:
    """Apply the chat template. With `continue_final` the last message stays open, for the unit to go on."""
    turns = [f"<|{message.role}|>\n{message.content}<|end|>\n" for message in messages]
    if continue_final:
        turns[-1] = turns[-1].removesuffix("<|end|>\n")
    if add_generation_prompt:
        turns.append("<|assistant|>\n")
    return "".join(turns)


def tokenize(text: str) -> list[int]:
    """Token ids: the bytes of each piece behind a leading 1, as one integer below 2^49."""
    return [int.from_bytes(b"\x01" + piece, "big") for piece in _pieces(text)]


def detokenize(ids: Iterable[int]) -> str:
    """The text of `ids`. Raises ValueError for a number that is no token."""
    return b"".join(map(_piece_of, ids)).decode(errors="replace")


def pieces_of(text: str) -> list[str]:
    """The text of each token, of text in ASCII."""
    return [piece.decode() for piece in _pieces(text)]


def _pieces(text: str) -> list[bytes]:
    return _PIECE.findall(text.encode())


def _piece_of(token_id: int) -> bytes:
    encoded = token_id.to_bytes(8, "big").lstrip(b"\0") if 0 < token_id < 1 << 63 else b""
    if not encoded.startswith(b"\x01") or not 1 < len(encoded) <= LONGEST_PIECE_BYTES + 1:
        raise ValueError(f"{token_id} is not a token of this unit")
    return encoded[1:]


class Context:
    """One sequence's text so far: its token count, names of full blocks, the hash that picks what follows."""

    __slots__ = ("_hash", "block_hashes", "tokens")

    def __init__(self, prompt: str) -> None:
        text = prompt.encode()
        self._hash = xxhash.xxh3_64()
        self.block_hashes: list[int] = []
        size = 0
        for block in _BLOCK.findall(text):
            self._hash.update(block)
            self.block_hashes.append(self._hash.intdigest())
            size += len(block)
        rest = text[size:]
        self._hash.update(rest)
        self.tokens = len(self.block_hashes) * BLOCK_TOKENS + len(_PIECE.findall(rest))

    def extend(self) -> str:
        """Generate the next token, append it and return it."""
        index = self._hash.intdigest() % len(WORDS)
        self._append(_WORD_BYTES[index])
        return WORDS[index]

    def say(self, token: str) -> str:
        """Append this token."""
        self._append(token.encode())
        return token

    def _append(self, token: bytes) -> None:
        self._hash.update(token)
        self.tokens += 1
        if self.tokens % BLOCK_TOKENS == 0:
            self.block_hashes.append(self._hash.intdigest())

    def ends_here(self, mean_tokens: int) -> bool:
        """Whether the text so far is a complete answer; true after one token in `mean_tokens`."""
        return (self._hash.intdigest() >> 32) % mean_tokens == 0


class StopScanner:
    """Finds stop strings in text that arrives in pieces, holding back what may still become one."""

    __slots__ = ("_held", "_hold_chars", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._hold_chars = max(map(len, stops)) - 1
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """Return the text that is now safe to show, and whether a stop string (itself not shown) ended it."""
        text = self._held + piece
        found = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        if found:
            return text[: min(found)], True
        cut = max(0, len(text) - self._hold_chars)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """The text held back, once nothing more can follow."""
        return self._held
