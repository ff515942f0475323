"""The runner: runs one probe of one unit repeatedly, as long as the unit is probed.

1. Runs never overlap. A nudge starts the next run now, or right after the current one.
2. No exception of a probe, or of the taker of its findings, ends the task: one in a run is logged and is
   neutral evidence. One in `due_at` is logged once, and the probe then runs every second.
3. Time is the loop's, randomness is injected. No run is later than its probe's `due_at`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable

from cellgate.probes.base import Probe, ProbeContext
from cellgate.router.nouns import Evidence, Finding, Sign, Strength

JITTER = 0.1
"""Each pause is shortened by up to this share, so that probes of many units drift apart."""
RARE_S = 30.0
"""A longer pause needs no jitter."""
GAP_S = 0.05
"""The least time between the starts of nudged runs: a unit that answers at once must not be flooded."""
BLIND_PAUSE_S = 1.0
"""The period of a probe whose `due_at` fails."""
GRACE_S = 1.0
"""Every fetch has a timeout; a run that takes this much longer than its limit is ended here."""

_log = logging.getLogger("cellgate.probes")


class Runner:
    """One probe of one unit or node. `take` is called with each finding, in order."""

    def __init__(
        self, probe: Probe, context: ProbeContext, take: Callable[[Finding], None], rng: random.Random
    ) -> None:
        self._probe = probe
        self._patient = context
        self._take = take
        self._rng = rng
        self._nudged = False
        self._asleep: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._overdue = False
        self._was_late = False
        self._limit_at = math.inf
        self._last_at = -math.inf
        self._is_looking = False
        self._is_blind = False

    def nudge(self) -> None:
        """Look now."""
        if not self._nudged:
            self._nudged = True
            _wake(self._asleep)

    def looking_s(self, now: float) -> float:
        """For how long the present run has taken; 0: there is none."""
        return now - self._last_at if self._is_looking else 0.0

    def due_at(self) -> float:
        """When it runs again at the latest; inf: not before a nudge.

        While it looks, that is when it began to.
        """
        if self._is_looking:
            return self._last_at
        if self._nudged:
            return self._last_at + GAP_S
        try:
            return self._probe.due_at(self._patient, self._last_at)
        except Exception as error:
            if not self._is_blind:
                self._is_blind = True
                self._log("its schedule failed", error, f"it runs every {BLIND_PAUSE_S:g} s")
            return self._last_at + BLIND_PAUSE_S

    async def run(self) -> None:
        """Look until cancelled."""
        self._task = asyncio.current_task()
        while True:
            await self._until_due()
            self._nudged = False
            self._last_at = self._patient.now()
            self._is_looking = True
            await self._look()
            self._is_looking = False

    async def _until_due(self) -> None:
        due = self.due_at()
        while (pause_s := due - self._patient.now()) > 0.0:
            was_nudged = self._nudged
            is_exact = was_nudged or pause_s > RARE_S
            await self._sleep(pause_s if is_exact else pause_s * (1.0 - JITTER * self._rng.random()))
            # `due_at` is called again: the unit may have made progress meanwhile, which postpones the run.
            before, due = due, self.due_at()
            if due <= before and self._nudged is was_nudged:
                return

    async def _sleep(self, pause_s: float) -> None:
        """Sleep for `pause_s`, or until a nudge."""
        loop = asyncio.get_running_loop()
        self._asleep = asleep = loop.create_future()
        timer = loop.call_later(pause_s, _wake, asleep) if pause_s < math.inf else None
        try:
            await asleep
        finally:
            self._asleep = None
            if timer is not None:
                timer.cancel()

    async def _look(self) -> None:
        try:
            await self._collect()
        except Exception as error:
            self._log("the probe failed", error, "this run is not counted")
            reason = f"the probe failed: {error!r}"
            try:
                unit, name, now = self._patient.unit.name, self._probe.name, self._patient.now()
                self._take(Evidence(unit, Sign.NEUTRAL, Strength.WEAK, name, reason, now))
            except Exception as another:
                self._log("its result could not be recorded", another, "the next run is on schedule")

    def _log(self, what: str, error: Exception, then: str) -> None:
        unit, name = self._patient.unit.name, self._probe.name
        _log.error("probe %s of unit %s: %s: %r; %s", name, unit, what, error, then)

    async def _collect(self) -> None:
        """Take the findings of one run. Raises TimeoutError when it takes too long, and what the probe
        raises.

        Does what `asyncio.timeout` and `aclosing` do, which would be too expensive for thousands of runs a
        second.
        """
        self._overdue = False
        self._limit_at = self._last_at + self._probe.limit_s(self._patient) + GRACE_S
        findings = self._probe.look(self._patient)
        try:
            async for finding in findings:
                self._take(finding)
        except asyncio.CancelledError:
            if not self._overdue or (self._task is not None and self._task.uncancel() > 0):
                raise
            raise TimeoutError from None
        except Exception:
            # The taker may have failed while the probe is still running.
            await findings.aclose()
            raise

    def sweep(self, now: float) -> None:
        """End a run that takes too long; must be called now and then, because a timer for each is too
        expensive.

        Only one that was late at the previous call too: after a blocked loop the probe's own timeouts are due
        in the same turn, and must come first.
        """
        if not self._is_looking or now < self._limit_at:
            self._was_late = False
        elif not self._was_late:
            self._was_late = True
        elif self._task is not None and not self._overdue:
            self._overdue = True
            self._task.cancel()


def _wake(asleep: asyncio.Future[None] | None) -> None:
    if asleep is not None and not asleep.done():
        asleep.set_result(None)
