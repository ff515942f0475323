"""A split request in the gym, as proxy/request/prefill_decode.py and splitting.py do it.

Nothing breaks here: no prefiller is lost in the middle of a leg, and all blocks arrive.
"""

from __future__ import annotations

from typing import Protocol

from cellgate.router.board import Board
from cellgate.router.nouns import TRANSFERRED, Ask, SplitPlan, SplitStep
from cellgate.router.pick import Router
from cellgate.router.unit_state import Lease
from loadtests.gym.nouns import Call
from loadtests.gym.world import World


class LegGate(Protocol):
    """The gate that a leg belongs to. `numbers` are those of units in the world."""

    board: Board
    router: Router
    world: World
    numbers: dict[str, int]

    def room(self) -> None:
        """A lease was closed."""


class Leg:
    """Leg 1 of one call. `decoder` is the lease that waits for it."""

    __slots__ = ("_call", "_decoder", "_gate", "_lease", "_sent_at", "_split")

    def __init__(self, gate: LegGate, call: Call, decoder: Lease, split: SplitPlan) -> None:
        self._gate = gate
        self._call = call
        self._decoder = decoder
        self._split = split
        self._lease: Lease | None = None
        self._sent_at = 0.0

    def begin(self, ask: Ask) -> None:
        """Send the prompt to the prefiller; to the decoder, with the answer, where that has no room."""
        gate, prefiller = self._gate, self._split.prefiller
        ask = ask._replace(max_tokens=1, splits=False, unit=prefiller, continuable=0)
        found = gate.router.pick(ask, gate.world.now)
        if not isinstance(found, Lease):
            self._decoder.split = None
            gate.world.send(self._call, gate.numbers[self._decoder.unit])
            return
        self._decoder.paused = True
        self._lease = found
        gate.world.prefill(self._call, gate.numbers[prefiller], self._computed)

    def arrived(self, now: float) -> None:
        """The decoder shows a token: it has the blocks."""
        if self._lease is not None:
            split, seconds = self._split, now - self._sent_at
            step = SplitStep(TRANSFERRED, split.prefiller, self._decoder.unit, split.tokens, seconds)
            self._gate.board.pairs.apply(step, now)

    def _computed(self, now: float) -> None:
        gate, lease, decoder = self._gate, self._lease, self._decoder
        assert lease is not None
        lease.commit(now)
        lease.unit_state.progress_at = now
        gate.board.prove(lease)
        gate.board.close(lease, now)
        gate.room()
        if decoder.closed:
            return
        decoder.paused = False
        decoder.unit_state.work_at = self._sent_at = now
        numbers = gate.numbers
        gate.world.send(self._call, numbers[decoder.unit], prompt_from=numbers[lease.unit])
