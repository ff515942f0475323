"""Texts as trees: what two prompts have in common is the same node, so no text need ever be made.

A text is known by the names of its full blocks: the engines' (of BLOCK_TOKENS tokens) and the gate's (of
BLOCK_BYTES bytes of the prompt, as proxy/request/prompt.py cuts them). Equal beginnings have equal names, and
a name stands for all that comes before it as well.
"""

from __future__ import annotations

from cellgate.router.cost_model import BLOCK_BYTES
from loadtests.gym.kv import BLOCK_TOKENS

_PLACES = 20
"""Bits of a name for where in a text the block ends; the others are the node's number."""


class Blocks(tuple[int, ...]):
    """The gate's blocks of a text; `text` is for who looks into the engines (events.py)."""

    text: Text


class Text:
    """A text of so many tokens and bytes. Extensions of it begin with it, and share nothing else."""

    __slots__ = ("_names", "base", "blocks", "names", "number", "size", "tokens")

    def __init__(self, numbers: list[int] | None = None) -> None:
        self._names = numbers if numbers is not None else [0]
        """How many nodes there are in the tree."""
        self.base: Text | None = None
        """The text that this one goes on from."""
        self.number = 0
        self.tokens = self.size = 0
        self.names: tuple[int, ...] = ()
        self.blocks = Blocks()

    def extend(self, tokens: int, bytes_per_token: float = 4.4) -> Text:
        """This text and `tokens` (at least 1) more, which nobody else has."""
        text = Text(self._names)
        self._names[0] += 1
        text.base, text.number = self, self._names[0]
        first = text.number << _PLACES
        text.tokens = self.tokens + tokens
        text.size = self.size + round(tokens * bytes_per_token)
        text.names = self.names + tuple(
            range(first + len(self.names) + 1, first + text.tokens // BLOCK_TOKENS + 1)
        )
        text.blocks = Blocks(
            (*self.blocks, *range(first + len(self.blocks) + 1, first + text.size // BLOCK_BYTES + 1))
        )
        text.blocks.text = text
        return text
