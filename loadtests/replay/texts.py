"""Real bytes for the gym's texts, and how a unit reads them: a token is a word with the space behind it."""

import hashlib
from collections.abc import Callable, Collection, Sequence

import xxhash

from loadtests.gym.kv import BLOCK_TOKENS
from loadtests.gym.prompts import Text

ANSWER_WORD = b"word "
"""Every token of every answer."""

Words = Callable[[int, int, int], bytes]
"""What a node of the tree of texts has of its own, by its number: so many words, in about so many bytes."""


def own_words(number: int, tokens: int, size: int) -> bytes:
    """So many words in so many bytes, that nothing else begins with and that JSON need not escape."""
    letters = bytearray(hashlib.shake_256(b"%d" % number).hexdigest(size // 2 + 1).encode()[:size])
    length, longer = divmod(size, tokens)
    if length < 2:
        raise ValueError(f"{tokens} words do not go into {size} bytes")
    middle = longer * (length + 1)
    letters[length : middle : length + 1] = b" " * longer
    letters[middle + length - 1 :: length] = b" " * (tokens - longer)
    return bytes(letters)


def written(text: Text, answers: Collection[Text], words: Words = own_words) -> bytes:
    """A text from its beginning. Of `answers`, texts that end in one, that end is what a unit answers."""
    parts: list[bytes] = []
    node = text
    while node.base is not None:
        tokens, size = node.tokens - node.base.tokens, node.size - node.base.size
        parts.append(ANSWER_WORD * tokens if node in answers else words(node.number, tokens, size))
        node = node.base
    return b"".join(reversed(parts))


def block_names(words: Sequence[bytes]) -> tuple[int, ...]:
    """The name of each full block of a text: it stands for the block's words and all before them."""
    name = 0
    names = []
    for at in range(0, len(words) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        name = xxhash.xxh3_64_intdigest(b" ".join(words[at : at + BLOCK_TOKENS]), name)
        names.append(name)
    return tuple(names)
