"""The runner: runs one probe of one unit repeatedly, as long as the unit is probed.

1. Runs never overlap. A nudge starts the next run now, or right after the current one.
2. No exception of a probe, or of who gets its findings, ends the runner: one in a run is logged and is
   neutral evidence. One in `due_at` is logged once, and the probe then runs every second.
3. Time is the loop's, randomness is injected. No run is later than its probe's `due_at`.
4. A run is no task, because thousands of them begin each second: a page is asked for and read by callbacks,
   and a probe that talks is resumed by the runner itself when what it waits for is done. So it must not use
   what needs a task (`asyncio.timeout`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from heapq import heapify, heappop, heappush
from math import inf
from operator import attrgetter
from typing import Any, Protocol, TypeVar, cast

from cellgate.probes.base import (
    REST_MAX_S,
    AsyncProbe,
    FetchError,
    HttpPageProbe,
    PageWait,
    Probe,
    ProbeContext,
    Reply,
    Trouble,
)
from cellgate.router.nouns import Evidence, Finding, Sign, Strength

JITTER = 0.1
"""Each pause is shortened by up to this share, so that probes of many units drift apart."""
JITTER_MAX_S = 0.25
"""And by no more than this: gates that take turns rely on it (`YIELD_S` in canary.py)."""
REST_JITTER, RESTED_JITTER = 0.25, 0.04
"""The same of long pauses in a large fleet while its unit begins to rest: many do at about the same time; and
later, when they have drifted apart and pauses are at their longest."""
BEGINS_TO_REST = 4.0
"""Until its pauses may be so many times as long as usual."""
TOGETHER_S, FEW_TOGETHER_S = 0.01, 0.1
"""Runs that are due so soon after one that is due now begin with it; the second: in a large fleet, while they
are few. What has just been used is still in the caches: each takes a quarter less time so."""
RARE_S = 30.0
"""A longer pause needs no jitter."""
GAP_S = 0.05
"""The least time between the starts of nudged runs: a unit that answers at once must not be flooded."""
BLIND_PAUSE_S = 1.0
"""The period of a probe whose `due_at` fails."""
RUN_LATE_S = 0.05
"""A run that begins so late is one of a gate that is behind."""
GRACE_S = 1.0
"""Every fetch has a timeout; a run that takes this much longer than its limit is ended here."""

_log = logging.getLogger("cellgate.probes")


class Runner:
    """One probe of one unit or node. `take` is called with each finding, in order."""

    def __init__(
        self,
        probe: Probe,
        context: ProbeContext,
        take: Callable[[Finding], None],
        rng: random.Random,
        timers: Timers,
        running: dict[Runner, None] | None = None,
    ) -> None:
        self._running = {} if running is None else running
        """Those that look, among which it is while it does."""
        self._probe = probe
        self._page_probe = probe if isinstance(probe, HttpPageProbe) else None
        is_of_unit = context.node is None
        self._may_be_postponed = is_of_unit or self._page_probe is None
        """Progress of the unit postpones it; not a node's page."""
        self._may_be_put_off = is_of_unit and self._page_probe is None
        self.context = context
        self._now = context.now
        self._take = take
        self._rng = rng
        self._timers = timers
        self._due: Timer | None = None
        """Its timer, if it has one."""
        self._awaited_at = -math.inf
        """When it was due at the latest, when it began to wait."""
        self._is_put_off = False
        """It was due, and waits for looks that were as late as itself."""
        self._nudged = False
        self._run: Coroutine[Any, Any, None] | None = None
        """The present run of a probe that talks."""
        self._waits_for: asyncio.Future[Any] | None = None
        """What that waits for."""
        self._late: Timer | None = None
        """When that is late."""
        self._pending: PageWait | None = None
        """The page that the present run waits for."""
        self.looks_since = math.inf
        """Since when the present run takes; inf: there is none."""
        self._is_stepping = self._is_stopped = False
        self._overdue = False
        self._was_late = False
        self._last_at = -math.inf
        self._is_blind = False

    @property
    def probe_name(self) -> str:
        """The name of its probe."""
        return self._probe.name

    def start(self) -> None:
        """Run the probe until it is stopped."""
        self._wait()

    def stop(self) -> None:
        """End the present run, and begin no other one."""
        self._is_stopped = True
        self._forget_due()
        if self._is_stepping:
            # Who stops it was called by its probe, or took a finding.
            asyncio.get_running_loop().call_soon(self._end_run)
        else:
            self._end_run()

    def nudge(self) -> None:
        """Look now."""
        if not self._nudged and not self._is_stopped:
            self._nudged = True
            if self.looks_since == math.inf:
                self._wait()

    def hurry(self) -> None:
        """Its pauses are shorter now: look when it is due by that."""
        if self.looks_since == math.inf and not (self._nudged or self._is_stopped):
            self._wait()

    def hasten(self, at: float) -> None:
        """Whatever the present run waits for is late at `at`; there may be no run."""
        if self._run is not None and not self._is_stepping:
            if self._late is not None:
                self._timers.cancel(self._late)
            self._late = self._timers.not_before(at, self._abort)

    def due_at(self) -> float:
        """When it runs again at the latest; inf: not before a nudge.

        While it looks, that is when it began to.
        """
        return self._last_at if self.looks_since < inf else self._next_at()

    def _next_at(self) -> float:
        """The same when it does not look."""
        if self._nudged:
            return self._last_at + GAP_S
        try:
            return self._probe.due_at(self.context, self._last_at)
        except Exception as error:
            if not self._is_blind:
                self._is_blind = True
                self._log("its schedule failed", error, f"it runs every {BLIND_PAUSE_S:g} s")
            return self._last_at + BLIND_PAUSE_S

    def sweep(self, now: float) -> None:
        """End a run that takes too long; must be called now and then, because a timer for each
        is too expensive.

        Only one that was late at the previous call too: after a blocked loop the probe's own timeouts are due
        in the same turn, and must come first.
        """
        if now < self.looks_since + self._probe.limit_s(self.context) + GRACE_S:
            self._was_late = False
        elif not self._was_late:
            self._was_late = True
        elif not self._overdue:
            self._overdue = True
            self._end_run()

    # -- from one run to the next --------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait until it is due."""
        self._forget_due()
        self._wait_until(self._next_at())

    def _wait_until(self, due_at: float) -> None:
        self._awaited_at = due_at
        now = self._now()
        pause_s = due_at - now
        if 0.0 < pause_s <= RARE_S:
            if not self._nudged:
                context = self.context
                if context.is_calm or (pause_s >= REST_MAX_S and context.is_of_many):
                    is_young = pause_s < 0.9 * REST_MAX_S or context.rest(self._last_at) < BEGINS_TO_REST
                    most_s = (REST_JITTER if is_young else RESTED_JITTER) * pause_s
                elif (most_s := JITTER * pause_s) > JITTER_MAX_S:
                    most_s = JITTER_MAX_S
                due_at -= most_s * self._rng.random()
        elif pause_s < 0.0:
            due_at = now
        elif pause_s == math.inf:
            return
        self._due = self._timers.at(due_at, self._wake)

    def _forget_due(self) -> None:
        if self._due is not None:
            self._timers.cancel(self._due)
            self._due = None

    def _wake(self) -> None:
        due, self._due = self._due, None
        assert due is not None
        if self._may_be_postponed:
            due_at = self._next_at()
            if due_at > self._awaited_at:
                # The unit has made progress meanwhile.
                self._is_put_off = False
                self._wait_until(due_at)
                return
        if self._may_be_put_off and self._waits_for_others(self._now() - due.when):
            return
        self._nudged = self._overdue = self._was_late = False
        self._last_at = self.looks_since = now = self._now()
        self.context.asks(now)
        self._running[self] = None
        if (page_probe := self._page_probe) is not None:
            self._ask(page_probe)
        else:
            self._talk(cast("AsyncProbe", self._probe).look(self.context))

    def _waits_for_others(self, late_s: float) -> bool:
        """Where the gate is behind with its looks, whether this run waits once more, twice as long as it is
        late: looks that may show progress begin as late, and are read as late. Else a gate without CPU would
        ask all busy units at once.
        """
        self._is_put_off = late_s > RUN_LATE_S and not (self._is_put_off or self._nudged)
        if self._is_put_off:
            due_at = self._awaited_at
            self._wait_until(self._now() + 2.0 * late_s)
            # Progress postpones it, as before.
            self._awaited_at = due_at
        return self._is_put_off

    def _end(self) -> None:
        self._run = self._waits_for = None
        if self._late is not None:
            self._timers.cancel(self._late)
            self._late = None
        self._end_page()

    def _end_page(self) -> None:
        """The end of a run that has talked to nobody."""
        self.looks_since, self._pending = inf, None
        self._running.pop(self, None)
        if not self._is_stopped:
            # It has no timer while it looks.
            self._wait_until(self._next_at())

    def _end_run(self) -> None:
        """End a run that is not wanted any more."""
        if self._run is not None:
            self._step(asyncio.CancelledError())
        elif self._pending is not None:
            self._pending.abandon()
            if self._overdue:
                self._failed(TimeoutError())
            self._end_page()

    # -- a run that reads a page ---------------------------------------------------------------------------

    def _ask(self, probe: HttpPageProbe) -> None:
        try:
            fetch, target, timeout_s, max_bytes = probe.page(self.context)
            self._pending = fetch.get(target, self._answered, timeout_s=timeout_s, max_bytes=max_bytes)
        except Exception as error:
            self._failed(error)
            self._end_page()

    def _answered(self, answer: Reply | FetchError) -> None:
        assert self._page_probe is not None
        try:
            findings = self._page_probe.read(self.context, answer)
            # What most looks find is a tuple, and a class that is abstract is dear to ask for.
            if type(findings) is not tuple and isinstance(findings, AsyncGenerator):
                self._talk(findings)
                return
            for finding in findings:
                self._take(finding)
        except Exception as error:
            self._failed(error)
        self._end_page()

    # -- a run that talks ----------------------------------------------------------------------------------

    def _talk(self, findings: AsyncGenerator[Finding, None]) -> None:
        self._run = self._look(findings)
        self._step()

    def _abort(self) -> None:
        self._late = None
        self._step(FetchError(Trouble.TIMEOUT, "no answer in time"))

    def _step(self, error: asyncio.CancelledError | FetchError | None = None) -> None:
        """Run until it has to wait for something."""
        run = self._run
        assert run is not None
        self._is_stepping = True
        try:
            waits_for = run.send(None) if error is None else run.throw(error)
        except (StopIteration, asyncio.CancelledError):
            self._is_stepping = False
            self._end()
            return
        self._is_stepping = False
        self._waits_for = waits_for
        if waits_for is not None:
            waits_for.add_done_callback(self._resume)
        else:
            asyncio.get_running_loop().call_soon(self._resume, None)

    def _resume(self, done: asyncio.Future[Any] | None) -> None:
        if self._run is not None and done is self._waits_for:
            self._step()

    async def _look(self, findings: AsyncGenerator[Finding, None]) -> None:
        try:
            await self._collect(findings)
        except Exception as error:
            self._failed(error)

    async def _collect(self, findings: AsyncGenerator[Finding, None]) -> None:
        """Take the findings of one run. Raises TimeoutError when it takes too long, and what the probe
        raises.
        """
        try:
            async for finding in findings:
                self._take(finding)
        except asyncio.CancelledError:
            if not self._overdue or self._is_stopped:
                raise
            raise TimeoutError from None
        except Exception:
            # Who gets it may have failed while the probe is still running.
            await findings.aclose()
            raise

    # -- what goes wrong -----------------------------------------------------------------------------------

    def _failed(self, error: Exception) -> None:
        """A run has failed."""
        self._log("the probe failed", error, "this run is not counted")
        reason = f"the probe failed: {error!r}"
        try:
            unit, name, now = self.context.unit.name, self._probe.name, self.context.now()
            self._take(Evidence(unit, Sign.NEUTRAL, Strength.WEAK, name, reason, now))
        except Exception as another:
            self._log("its result could not be recorded", another, "the next run is on schedule")

    def _log(self, what: str, error: Exception, then: str) -> None:
        unit, name = self.context.unit.name, self._probe.name
        _log.error("probe %s of unit %s: %s: %r; %s", name, unit, what, error, then)


# Timers: calls that are due at their times, with one timer of the loop for all of them.
#
# A timer of the loop for each look would cost as much as the look. Calls that are due at about the same time
# are made together: that wakes the process less often, and code and data that were just used are still in the
# caches. Calls are kept by slots of time and not in one order: most deadlines are cancelled long before their
# time, and need no order.


A = TypeVar("A")

RESOLUTION_S = 0.001
"""Timers of the loop may fire so much too early."""
PER_TURN = 32
"""Calls made in one turn of the loop; the next ones wait for another, so that others have their turn."""
SLOTS_PER_S = 100
EXPIRE_EVERY_S = 0.01
"""So late may what is expected expire when something has just expired."""
SPARE = 64
"""Slots without calls that are kept until their time, beside two for each call."""

_when = attrgetter("when")


class Awaited(Protocol):
    """What comes soon, mostly."""

    def expire(self) -> None:
        """It has not come in time."""


class Timer:
    """A call that is to be made at a time; `call` is None once it was made or cancelled."""

    __slots__ = ("call", "when")

    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when = when
        self.call: Callable[[], None] | None = call


class Timers:
    """Calls, each made once unless it is cancelled: at its time, or up to `early_s` earlier, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, early_s: float = RESOLUTION_S) -> None:
        self._loop = loop
        self._early_s = early_s
        self.few_early_s = 0.0
        """The same, while fewer than `PER_TURN` are due."""
        self.late_s = 0.0
        """How late the first of the last calls was."""
        self._slots: dict[int, dict[Timer, None]] = {}
        """Calls by the slot of their time, in the order in which they were added."""
        self._order: list[int] = []
        """A heap of the numbers of these slots."""
        self._next: deque[Timer] = deque()
        """Calls whose time has come."""
        self._count = 0
        """Calls that are neither made nor cancelled."""
        self._answers: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = inf
        self.awaited: dict[Awaited, float] = {}
        """What is expected, and by when. Nearly all of it comes, so that one timer is enough."""
        self._expects: Timer | None = None

    def expect(self, what: Awaited, until: float) -> None:
        """Have it expire then, unless it is forgotten."""
        self.awaited[what] = until
        timer = self._expects
        if timer is None or until < timer.when:
            if timer is not None:
                self.cancel(timer)
            self._expects = self.at(until, self._expire)

    def forget(self, what: Awaited) -> None:
        """It has come."""
        self.awaited.pop(what, None)

    def close(self) -> None:
        """Nothing is expected any more."""
        self.awaited.clear()
        if self._expects is not None:
            self.cancel(self._expects)

    def _expire(self) -> None:
        self._expects, until = None, self._loop.time() + self._early_s
        for what in [what for what, due_at in self.awaited.items() if due_at <= until]:
            if self.awaited.pop(what, None) is not None:
                what.expire()
        if self.awaited and self._expects is None:
            # Where all units hang, many expire one after the other, and all are looked at each time.
            next_at = max(min(self.awaited.values()), until + EXPIRE_EVERY_S)
            self._expects = self.at(next_at, self._expire)

    def at(self, when: float, call: Callable[[], None]) -> Timer:
        """Make this call then; what is returned is for `cancel`."""
        due, number, slots = Timer(when, call), int(when * SLOTS_PER_S), self._slots
        if (slot := slots.get(number)) is not None:
            slot[due] = None
        else:
            slots[number] = {due: None}
            heappush(self._order, number)
            if len(slots) > 2 * self._count + SPARE:
                self._forget_empty()
        self._count += 1
        if when < self._wakes_at:
            self._wake_at(when)
        return due

    def not_before(self, when: float, call: Callable[[], None]) -> Timer:
        """Make this call then, or a little later: who is given up before its time was not waited for."""
        return self.at(when + max(self._early_s, self.few_early_s), call)

    def cancel(self, due: Timer) -> None:
        """Do not make that call, if it was not made yet."""
        if due.call is None:
            return
        due.call = None
        slot = self._slots.get(int(due.when * SLOTS_PER_S))
        if slot is not None:
            slot.pop(due, None)
        self._count -= 1
        if not self._count:
            self._slots.clear()
            self._order.clear()
            self._next.clear()
            self.late_s = 0.0
            self._wake_at(inf)

    def _forget_empty(self) -> None:
        self._slots = {number: slot for number, slot in self._slots.items() if slot}
        self._order[:] = self._slots
        heapify(self._order)

    def soon(self, tell: Callable[[A], None], answer: A) -> None:
        """Make this call in a later turn of the loop, together with others."""
        if not self._answers:
            self._loop.call_soon(self._answer)
        self._answers.append((tell, answer))

    def _answer(self) -> None:
        answers, left = self._answers, PER_TURN
        try:
            while answers and left:
                left -= 1
                tell, answer = answers.popleft()
                tell(answer)
        finally:
            if answers:
                self._loop.call_soon(self._answer)

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = when
        self._timer = self._loop.call_at(when, self._wake) if when < inf else None

    def _wake(self) -> None:
        # What is added by these calls needs no timer yet.
        self._wakes_at, self._timer = -inf, None
        following, left = self._next, PER_TURN
        try:
            now, are_few = self._loop.time(), len(following) < PER_TURN
            self._collect(now + ((are_few and self.few_early_s) or self._early_s))
            if following:
                self.late_s = max(0.0, now - following[0].when)
            while following and left:
                due = following.popleft()
                call, due.call = due.call, None
                if call is not None:
                    self._count -= 1
                    left -= 1
                    call()
        finally:
            self._wake_at(self._next_at())

    def _collect(self, until: float) -> None:
        """Find the calls whose time has come."""
        order, slots, last = self._order, self._slots, int(until * SLOTS_PER_S)
        found: list[Timer] = []
        while order and order[0] < last:
            found += slots.pop(heappop(order))
        if order and order[0] == last:
            slot = slots[last]
            due_now = [due for due in slot if due.when <= until]
            for due in due_now:
                del slot[due]
            found += due_now
        found.sort(key=_when)
        self._next += found

    def _next_at(self) -> float:
        """When the next call is due."""
        if self._next:
            return self._next[0].when
        order, slots = self._order, self._slots
        while order:
            if slot := slots[order[0]]:
                return min(slot, key=_when).when
            del slots[heappop(order)]
        return inf
