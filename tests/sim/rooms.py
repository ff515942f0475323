"""Rooms in which simulated engines of SGLang meet: a prefiller that has computed a prompt, and a decoder.

As with the real ones nobody checks who comes: what a decoder says follows from the prompt that was computed
in its room. A decoder whose prefiller never comes waits for WAIT_S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.sim.transfer import LinkFault

if TYPE_CHECKING:
    from tests.sim.engine import Engine
    from tests.sim.sequence import Sequence
    from tests.sim.world import World

WAIT_S = 300.0
BOOTSTRAP_PORT = 8998


@dataclass(slots=True)
class Side:
    """One of the two in a room."""

    engine: Engine
    sequence: Sequence

    def is_there(self) -> bool:
        """Whether neither its engine nor its client has gone."""
        return not (self.engine.is_dead or self.sequence.exchange.is_gone)

    def take_over(self) -> None:
        """The blocks of its prompt are here."""
        self.sequence.remote = {}
        if self.is_there():
            self.engine.accept(self.sequence)

    def hand_over(self) -> None:
        """The blocks of its prompt are at the decoder: it ends with its only token."""
        if self.is_there():
            self.sequence.end_here()
            self.engine.forget(self.sequence, "finished")

    def fail(self, message: str) -> None:
        """The blocks could not be moved."""
        if self.is_there():
            self.engine.forget(self.sequence, "failed")
            self.sequence.fail(message)


class Rooms:
    """All rooms of one world. `entered` counts how often each was entered, by (room, is it a decoder)."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sides: dict[int, dict[bool, Side]] = {}
        self.entered: dict[tuple[int, bool], int] = {}

    def waiting(self) -> int:
        """Rooms in which somebody waits."""
        return len(self._sides)

    def wait(self, engine: Engine, sequence: Sequence) -> None:
        """A decoder waits for a prompt."""
        if sequence.stream:
            sequence.begin(engine.behaviour, self._world.rng)
        self._enter(engine, sequence, decodes=True)

    def offer(self, engine: Engine, sequence: Sequence) -> None:
        """A prefiller has computed a prompt. It is found only at its own place."""
        if sequence.meets_at == (engine.name, BOOTSTRAP_PORT):
            self._enter(engine, sequence, decodes=False)

    def _enter(self, engine: Engine, sequence: Sequence, *, decodes: bool) -> None:
        sequence.exchange.on_gone = lambda: self.leave(sequence)
        room = sequence.room
        self.entered[room, decodes] = self.entered.get((room, decodes), 0) + 1
        sides = self._sides.setdefault(room, {})
        sides[decodes] = Side(engine, sequence)
        if len(sides) < 2:
            self._world.loop.outside(WAIT_S, self._abort, room, sequence)
            return
        del self._sides[room]
        self._move(sides[False], sides[True])

    def leave(self, sequence: Sequence) -> None:
        """Its client has left, or its engine has died."""
        sides = self._sides.get(sequence.room, {})
        for decodes in [decodes for decodes, side in sides.items() if side.sequence is sequence]:
            del sides[decodes]
        if not sides:
            self._sides.pop(sequence.room, None)

    def forget(self, engine: Engine) -> None:
        """Its process has ended."""
        sides = [side for sides in self._sides.values() for side in sides.values() if side.engine is engine]
        for side in sides:
            self.leave(side.sequence)

    def _abort(self, room: int, sequence: Sequence) -> None:
        if any(side.sequence is sequence for side in self._sides.get(room, {}).values()):
            self.leave(sequence)
            sequence.fail("KVTransferError: timed out")

    def _move(self, prefill: Side, decode: Side) -> None:
        """The blocks go over the link."""
        transfers, pair = self._world.transfers, (prefill.engine.name, decode.engine.name)
        fault, step_s = transfers.faults.get(pair), decode.engine.timing.step_s
        if fault is LinkFault.HANG:
            return
        if fault is LinkFault.CUT:
            for side in (prefill, decode):
                self._world.loop.outside(step_s, side.fail, "KVTransferError")
            return
        text = prefill.sequence.served.text
        seconds = len(text) / 4 / transfers.tokens_s * transfers.slow.get(pair, 1.0)
        self._world.loop.outside(seconds, prefill.hand_over)
        if fault is LinkFault.EMPTY:
            self._world.loop.outside(seconds + step_s, decode.sequence.say_nothing)
            return
        transfers.fetched[pair] = transfers.fetched.get(pair, 0) + 1
        decode.sequence.computed(text)
        self._world.loop.outside(seconds, decode.take_over)
