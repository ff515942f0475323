"""A query of death: what a simulated engine does when it gets one certain prompt."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from tests.sim.behaviour import Behaviour

if TYPE_CHECKING:
    from tests.sim.engine import Engine
    from tests.sim.sequence import Sequence

MARKER = "POISON"
BACK_S = 3.0
LATE_S = 1.5
WEDGED_S = 20.0


class Mode(Enum):
    """How it ends a unit."""

    CUT = "its connection is closed, and nothing else happens"
    CRASH = "the process exits as it comes"
    LATE = "the process exits after a while of work that shows nothing"
    MID = "the process exits after a token"
    FAR = "the process exits after a number of tokens"
    FATAL = "all requests get an error, and then the process exits"
    WEDGE = "the engine hangs, and with it all that it has"


_AFTER_TOKENS = {Mode.MID: 1, Mode.FAR: 20}


class Poison:
    """All the engines of a world; `kills` are (unit, request id, when) of each time that it struck."""

    def __init__(self, mode: Mode, marker: str = MARKER) -> None:
        self.mode = mode
        self.marker = marker
        self.kills: list[tuple[str, str, float]] = []

    def holds(self, sequence: Sequence) -> bool:
        """Whether nothing comes of it until it strikes."""
        return self.mode is Mode.LATE and self.marker in sequence.served.text

    def accepted(self, engine: Engine, sequence: Sequence) -> None:
        """An engine has taken a request."""
        if self.marker not in sequence.served.text or self.mode in _AFTER_TOKENS:
            return
        delay_s = LATE_S if self.mode is Mode.LATE else 0.0
        engine._loop.outside(delay_s, self._strike, engine, sequence)

    def advanced(self, engine: Engine, sequence: Sequence) -> None:
        """It has said one more word, and not the last."""
        if self.marker in sequence.served.text and sequence.served.tokens == _AFTER_TOKENS.get(self.mode):
            engine._loop.outside(0.0, self._strike, engine, sequence)

    def _strike(self, engine: Engine, sequence: Sequence) -> None:
        if sequence.served.outcome or engine.is_dead:
            return
        self.kills.append((engine.name, sequence.served.request_id, engine._loop.time()))
        match self.mode:
            case Mode.CUT:
                engine.cut(sequence)
            case Mode.WEDGE:
                engine.behaviour.wedged = True
                engine._loop.outside(WEDGED_S, self._back, engine)
            case Mode.FATAL:
                engine.break_down()
                engine._loop.outside(BACK_S, self._back, engine)
            case _:
                engine.die()
                engine._loop.outside(BACK_S, self._back, engine)

    def _back(self, engine: Engine) -> None:
        if engine.is_dead:
            engine.restart()
        elif self.mode is Mode.WEDGE:
            engine.behaviour = Behaviour()
