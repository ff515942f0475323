"""The leader's engine loop: plan a step, take it together with the followers, hand out what it brought.

What must stay true: a step really waits for the followers, and nothing else does; submitting, aborting and
every answer of the front end go on while the loop hangs.
"""

import asyncio
from dataclasses import replace

from loadtests.simunit.collective import Collective, CollectiveBrokenError
from loadtests.simunit.engine import Engine
from loadtests.simunit.faults import Faults
from loadtests.simunit.metrics import Metrics
from loadtests.simunit.poison import Poison
from loadtests.simunit.sequence import Batch, Output, Sequence, Timing

JOURNAL_LINES = 64
PAUSES = ("abort", "wait", "keep")
"""What becomes of the requests of a unit that is paused: they end, they are finished, they stand still."""


class Unit:
    """One unit as its leader sees it: engine, followers, faults."""

    def __init__(self, name: str, model: str, timing: Timing, collective: Collective, faults: Faults) -> None:
        self.name = name
        self.model = model
        self.engine = Engine(timing)
        self.collective = collective
        self.faults = faults
        self.metrics = Metrics(self.engine, model)
        self.poison = Poison("")
        self.shows_logprobs = self.is_blind = False
        self.death: str | None = None
        self.paused = ""
        self.journal: list[str] = []
        self._step_due_s = 0.0
        self._wake = asyncio.Event()
        self._is_drained = asyncio.Event()

    async def run(self) -> None:
        """Take steps until the collective breaks; then fail every sequence and return."""
        try:
            while True:
                await self._step()
        except CollectiveBrokenError as error:
            self.death = f"engine dead: {error}"
        for sequence in self.engine.clear():
            sequence.listener.fail(self.death)

    def note(self, what: str, request_id: str) -> None:
        """Remember what befell the first generations: the order in which they reached this process."""
        if len(self.journal) < JOURNAL_LINES:
            self.journal.append(f"{what} {request_id}")

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; it fails at once when the engine is known to be dead."""
        if self.death:
            sequence.ended = True
            sequence.listener.fail(self.death)
            return
        self.engine.add(sequence)
        self._wake.set()

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence whose client left; harmless when it has ended."""
        if self.engine.abort(sequence):
            self._wake.set()

    def set_faults(self, faults: Faults) -> None:
        """Be hurt, or healed. Raises ValueError when a fault names a follower that does not exist."""
        ranks = {follower.rank for follower in self.collective.followers}
        for rank in (faults.spinning_rank, faults.slow_rank):
            if rank is not None and rank not in ranks:
                raise ValueError(f"rank {rank} is no follower of this unit; it has {sorted(ranks)}")
        self.faults = faults
        self.collective.spin(faults.spinning_rank)
        self.collective.drop_messages(faults.link_dropped)
        self._wake.set()

    async def pause(self, mode: str) -> None:
        """Stand still, in one of `PAUSES`; or go on (empty). Returns when that is so."""
        self.paused = mode
        self._is_drained.clear()
        if mode == "abort":
            for sequence in self.engine.clear():
                sequence.listener.token("", "abort")
        self._wake.set()
        # Only a step ends sequences.
        if mode == "wait" and self.engine.running:
            await self._is_drained.wait()

    async def _step(self) -> None:
        stands = self.faults.engine_frozen or self.paused in ("abort", "keep")
        batch = None if stands else self.engine.plan(self.faults.stall_after_tokens, admits=not self.paused)
        if batch is None:
            self._is_drained.set()
            self._wake.clear()
            await self._wake.wait()
            self._step_due_s = 0.0
            return
        await self.collective.step(self._seconds_left(batch), self._slow_ranks())
        self._deliver(batch, self.engine.apply(batch))

    def _seconds_left(self, batch: Batch) -> float:
        """Seconds until this step should end. Lateness between two steps is made up for, idle time is not."""
        now_s = asyncio.get_running_loop().time()
        planned_s = batch.duration_s * self.faults.slow_factor + self.faults.warm_up_s
        if self.faults.warm_up_s:
            self.faults = replace(self.faults, warm_up_s=0.0)
        if now_s - self._step_due_s > planned_s:
            self._step_due_s = now_s
        seconds = self._step_due_s + planned_s - now_s
        self._step_due_s += planned_s * max((1.0, *self._slow_ranks().values()))
        return seconds

    def _slow_ranks(self) -> dict[int, float]:
        rank = self.faults.slow_rank
        return {} if rank is None else {rank: self.faults.slow_rank_factor}

    def _deliver(self, batch: Batch, outputs: list[Output]) -> None:
        now_s = asyncio.get_running_loop().time()
        self.metrics.step_tokens.observe(batch.tokens)
        break_after = self.faults.in_stream_error_after_tokens
        for output in outputs:
            sequence = output.sequence
            if sequence.generated == 1:
                self.metrics.ttft_s.observe(now_s - sequence.arrived_s)
            if break_after is not None and sequence.generated > break_after:
                self.engine.abort(sequence)
                sequence.listener.fail(f"generation failed after {break_after} tokens, as a fault commands")
                continue
            sequence.listener.token(output.text, output.finish)
            if sequence.is_poison:
                self.poison.strike()
            if output.finish:
                self.metrics.e2e_s.observe(now_s - sequence.arrived_s)
