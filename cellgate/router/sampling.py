"""Sampling: which units are considered for an ask, when there are too many to consider all.

1. The unit that last got the longest prefix of the prompt is included, if known, and the one that holds the
   longest by the reports of other gates.
2. The others are random: the best of SAMPLE is nearly as good as the best of all, and simultaneous picks
   do not all find the same one.
3. It only proposes units: the caller decides.
"""

from __future__ import annotations

import random
from collections.abc import Collection

from cellgate.router.board import Board
from cellgate.router.nouns import Ask

LOOK_AT_ALL = 24
"""With up to this many units all are considered."""
SAMPLE = 12
RENEWED_S = 0.25
"""How old the list may be that is drawn from."""
HOLDERS_MAX = 200_000


class Sampler:
    """Proposes units of a board."""

    def __init__(self, board: Board, rng: random.Random) -> None:
        self._board = board
        self._rng = rng
        self._usable: dict[str | None, tuple[float, list[str]]] = {}
        """By model: when it was listed, and who serves it."""
        self._holders: dict[int, str] = {}
        """By the hash of the last block of a prompt: who got it last. The oldest comes first."""

    def of(self, ask: Ask, now: float) -> Collection[str] | None:
        """The units to consider; None: all of them."""
        if len(self._board.units) <= LOOK_AT_ALL:
            return None
        if ask.unit is not None:
            return (ask.unit,)
        names = self._list(ask, now)
        if len(names) <= LOOK_AT_ALL:
            return names
        chosen = dict.fromkeys(self._rng.sample(names, SAMPLE))
        if (holder := self._holder(ask)) is not None:
            chosen[holder] = None
        if self._board.remote and (held := self._board.remote.match(ask.blocks)):
            chosen[max(held, key=held.__getitem__)] = None
        return chosen

    def record(self, ask: Ask, unit: str) -> None:
        """`ask` goes to `unit`, which will hold its prompt."""
        if ask.blocks:
            self._holders.pop(ask.blocks[-1], None)
            self._holders[ask.blocks[-1]] = unit
            if len(self._holders) > HOLDERS_MAX:
                del self._holders[next(iter(self._holders))]

    def _holder(self, ask: Ask) -> str | None:
        """Who got the longest prompt that this one goes on from."""
        holders = self._holders
        for block in reversed(ask.blocks):
            if block in holders:
                return holders[block]
        return None

    def _list(self, ask: Ask, now: float) -> list[str]:
        at, names = self._usable.get(ask.model, (-RENEWED_S, []))
        if now - at >= RENEWED_S:
            if len(self._usable) > len(self._board.units):
                # Whoever asks may name any model.
                self._usable.clear()
            names = [
                name for name, state in self._board.units.items() if state.is_usable() and state.serves(ask)
            ]
            self._usable[ask.model] = now, names
        return names
