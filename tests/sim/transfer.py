"""KV blocks that simulated engines hold for each other, as with vLLM's NixlConnector, and their links.

What a decoder says follows from the blocks that it fetched, whatever prompt it was sent: so a gate that mixes
up the blocks of two requests is seen in its clients' answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sim.loop import SimLoop

HELD_S = 30.0  # Unfetched blocks are freed after this.


class LinkFault(Enum):
    """What may befall a link."""

    CUT = auto()  # The decoder notices at once, and fails the request.
    HANG = auto()  # It waits for ever.
    EMPTY = auto()  # It answers 200, and nothing.


@dataclass(slots=True)
class Held:
    """Blocks of one prompt at one engine."""

    text: str
    holder: str
    until: float


class Transfers:
    """All of one world. `tokens_s` is the speed of links, `faults` those of pairs, `slow` how many times a
    pair is slower; `fetched` counts transfers by pair, `expired` blocks that nobody fetched.
    """

    def __init__(self, loop: SimLoop, is_dead: Callable[[str], bool]) -> None:
        self._loop = loop
        self._is_dead = is_dead
        self._numbers = count()
        self._held: dict[str, Held] = {}
        self.tokens_s = 1_000_000.0
        self.faults: dict[tuple[str, str], LinkFault] = {}
        self.slow: dict[tuple[str, str], float] = {}
        self.fetched: dict[tuple[str, str], int] = {}
        self.expired = 0

    def held(self) -> int:
        """Prompts whose blocks are held at this moment."""
        self._expire()
        return len(self._held)

    def hold(self, holder: str, request_id: str, text: str) -> dict[str, Any]:
        """A prompt was computed: what its decoder needs to fetch it."""
        number = next(self._numbers)
        key = f"cmpl-{request_id}-{number:08x}"
        self._held[key] = Held(text, holder, self._loop.time() + HELD_S)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [number],
            "remote_engine_id": holder,
            "remote_request_id": key,
            "remote_host": holder,
            "remote_port": 5600,
        }

    def forget(self, holder: str) -> None:
        """The holder's process has ended."""
        self._held = {key: held for key, held in self._held.items() if held.holder != holder}

    def fetch(self, decoder: str, given: dict[str, Any]) -> tuple[str, float] | LinkFault:
        """The text that the blocks stand for, and how long they take."""
        self._expire()
        holder = given["remote_engine_id"]
        fault = self.faults.get((holder, decoder))
        if fault is not None:
            return fault
        if self._is_dead(holder):
            return LinkFault.CUT
        held = self._held.pop(given["remote_request_id"], None)
        # The engine does not notice: other blocks are there now.
        text = held.text if held is not None else "blocks of somebody else"
        self.fetched[holder, decoder] = self.fetched.get((holder, decoder), 0) + 1
        tokens = len(text) / 4
        return text, tokens / self.tokens_s * self.slow.get((holder, decoder), 1.0)

    def _expire(self) -> None:
        now = self._loop.time()
        late = [key for key, held in self._held.items() if held.until < now]
        self.expired += len(late)
        for key in late:
            del self._held[key]
