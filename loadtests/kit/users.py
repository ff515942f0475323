"""Streaming users in a closed loop: each asks, reads the answer, and asks again.

What must stay true: every request is kept as an `Answer` from before it is sent, so that none is forgotten.
"""

import asyncio
import random
from collections.abc import Callable
from types import TracebackType
from typing import Self

from loadtests.kit import progress
from loadtests.kit.questions import HANG_S, Answer, End, Question, ask
from loadtests.wire.client import Connections

RAMP_S = 1.0
RETRY_S = 0.5
"""Who was not answered asks again after this, as clients do; a refusal must not become a busy loop."""


class Users:
    """An async context manager: inside, `count` users ask what `draw` gives them; leaving it waits for all
    that they have asked. `seed` makes each user's questions the same every time; they begin
    within `ramp_s`, and keep their connections or not. One who gets no byte for `silence_s` counts as hung.
    """

    def __init__(
        self,
        url: str,
        count: int,
        draw: Callable[[random.Random], Question],
        *,
        seed: int = 0,
        ramp_s: float = RAMP_S,
        keep_connections: bool = True,
        silence_s: float = HANG_S,
    ) -> None:
        self.answers: list[Answer] = []
        self._gate = Connections(url, keep=keep_connections)
        self._count = count
        self._draw = draw
        self._seed = seed
        self._ramp_s = ramp_s
        self._silence_s = silence_s
        self._over = asyncio.Event()

    async def __aenter__(self) -> Self:
        rngs = (random.Random(f"{self._seed} {number}") for number in range(self._count))
        self._tasks = [asyncio.create_task(self._use(rng)) for rng in rngs]
        progress.figures(self._reported)
        return self

    def _reported(self) -> str:
        ended = sum(answer.ended_at > 0.0 for answer in self.answers)
        return f"{ended} answers, {len(self.answers) - ended} in flight"

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._over.set()
        if error is not None:
            for task in self._tasks:
                task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=error is not None)
        finally:
            self._gate.close()

    async def _use(self, rng: random.Random) -> None:
        await asyncio.sleep(rng.uniform(0, self._ramp_s))
        while not self._over.is_set():
            self.answers.append(answer := Answer(self._draw(rng)))
            await ask(self._gate, answer, silence_s=self._silence_s)
            if answer.end() is not End.WHOLE:
                await asyncio.sleep(RETRY_S)
