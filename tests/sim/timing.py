"""How long a simulated engine takes, and how much it does at once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tests.sim.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Timing:
    """First token after `prefill_s`, then one each `step_s`; at most `max_running` at once, the rest waits.

    `warm_up_s` is added to the first prefill of every process, for which all others wait. With a finite
    `prefill_tokens_per_s` a prompt also costs the time of its tokens, for all alike: a step takes so much
    longer. `chunk_tokens` of them are done in one step; 0: a whole prompt is, and nothing moves meanwhile.
    """

    prefill_s: float = 0.05
    step_s: float = 0.02
    max_running: int = 256
    warm_up_s: float = 0.0
    prefill_tokens_per_s: float = math.inf
    chunk_tokens: int = 2048

    def prefill(self, running: Iterable[Sequence]) -> int:
        """Do one step's share of the prefill of these, oldest first; how many tokens that were."""
        if math.isinf(self.prefill_tokens_per_s):
            return 0
        done = 0
        for sequence in running:
            if sequence.prompt_left:
                part = sequence.prompt_left
                if self.chunk_tokens:
                    part = min(part, self.chunk_tokens - done)
                sequence.prompt_left -= part
                done += part
                if done >= self.chunk_tokens:
                    break
        return done


USUAL = Timing()
