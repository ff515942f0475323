"""The simulated world: clients, engines and one or more routers on one clock. A heap of events, no sleep.

What must stay true: each call ends exactly once, or is refused; events at one moment come in the order in
which they were made, so that a run depends on nothing but its seed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from heapq import heappop, heappush
from math import inf

from loadtests.gym.engine import Engine
from loadtests.gym.nouns import Call, Change, Fleet, Request, Rival, Run
from loadtests.gym.sequences import Sequence, Shown

LOOK_S = 0.05
"""How often it is looked whether a unit is idle beside a queue."""
END_S = 20_000.0
"""A run that takes longer has come to a standstill."""

Event = Callable[[float], None]


class StandstillError(Exception):
    """Calls are left over, and nothing happens any more."""


class World:
    """One run. Make it, give it its routers, let it `run`. The load begins at `begins_at`.

    `hurry`: who follows up does so at once.
    """

    def __init__(self, fleet: Fleet, begins_at: float = 100.0, *, hurry: bool = False) -> None:
        self.fleet = fleet
        self.hurry = hurry
        self.now = self.begins_at = begins_at
        self.engines = [Engine(place.model, fleet.gates) for place in fleet.places]
        self.up = [number not in fleet.joining for number in range(len(fleet.places))]
        self.calls: list[Call] = []
        self.per_unit = [0] * len(fleet.places)
        self.tokens_came: Callable[[int, int, Shown], None] | None = None
        """Told of each gate, unit and run of steps in which the gate's streams moved."""
        self._rivals: list[Rival] = []
        self._events: list[tuple[float, int, Event]] = []
        self._order = 0
        self._wakes = [inf] * len(fleet.places)
        self._left = 0
        self._idle_s = [0.0] * len(fleet.places)
        self._idle_most_s = 0.0
        self._gaps: dict[float, int] = {}
        self._links: dict[tuple[int, int], float] = {}
        """When the last transfer between two units ends: they go one after the other."""
        self._transfers = 0

    # -- for routers ---------------------------------------------------------------------------------------

    def at(self, when: float, event: Event) -> None:
        """Let something happen; events of one moment come in the order in which they were made."""
        self._order += 1
        heappush(self._events, (when, self._order, event))

    def send(self, call: Call, unit: int, prompt_from: int | None = None) -> None:
        """A router has chosen. `prompt_from` has computed the prompt, and its blocks come first."""
        request, engine, place = call.request, self.engines[unit], self.fleet.places[unit]
        call.unit = unit
        self.per_unit[unit] += 1
        gate = self._gate_of(request) if request.stream else -1
        made = call.made
        sequence = Sequence(
            request.prompt.tokens + made, request.answer_tokens - made, request.context.names, gate, call
        )
        call.sequence = sequence
        delay_s = place.model.front_end_s + place.network_s
        if prompt_from is not None:
            delay_s += self._move_s(sequence, prompt_from, unit)
            sequence.fetched = sequence.prompt_tokens - 1
        engine.expect(sequence)
        self.at(self.now + delay_s, lambda now: self._arrive(unit, sequence, now))

    def refuse(self, call: Call, why: str) -> None:
        """A router has no unit for it."""
        call.refused = why
        self._over(call)

    def canary(self, unit: int, tell: Event) -> None:
        """One token of an unlike prompt; `tell` is called when it has come, and never where the unit dies."""
        self._compute(unit, Sequence(12, 1, (), -1, tell))

    def prefill(self, call: Call, unit: int, tell: Event) -> None:
        """Compute the prompt of a call, and one token; `tell` is called when it has come."""
        request = call.request
        self._compute(unit, Sequence(request.prompt.tokens, 1, request.context.names, -1, tell))

    def _compute(self, unit: int, sequence: Sequence) -> None:
        engine = self.engines[unit]
        engine.expect(sequence)
        self.at(self.now + engine.model.front_end_s, lambda now: self._arrive(unit, sequence, now))

    def _move_s(self, sequence: Sequence, source: int, target: int) -> float:
        """Seconds until the blocks that the target lacks are there."""
        tokens = sequence.prompt_tokens - self.engines[target].cached(sequence.names, sequence.prompt_tokens)
        begins = max(self._links.get((source, target), 0.0), self.now)
        self._links[source, target] = ends = begins + tokens / self.fleet.transfer_tokens_s
        self._transfers += 1
        return ends - self.now

    def settle(self) -> None:
        """Bring all engines to the present moment."""
        for unit, engine in enumerate(self.engines):
            if engine.next_at is not None:
                self._tell(unit, engine.advance(self.now))
                self._set_wake(unit)

    # -- the run -------------------------------------------------------------------------------------------

    def run(self, requests: Collection[Request], rivals: list[Rival]) -> Run:
        """Let the requests come, and the routers serve them. Raises StandstillError."""
        self._rivals = rivals
        for request in requests:
            self._expect(request, self.begins_at + request.at)
        last_at = max(request.at for request in requests)
        for change in self.fleet.changes:
            self.at(self.begins_at + change.at * last_at, partial(self._change, change))
        self.at(self.begins_at, self._look)
        while self._left:
            if not self._events or self.now > self.begins_at + END_S:
                raise StandstillError(f"{self.fleet.name}: {self._left} calls left at {self.now:.1f} s")
            self.now, _, event = heappop(self._events)
            event(self.now)
        engines = self.engines
        asked = sum(engine.asked_tokens for engine in engines)
        return Run(
            sorted(self.calls, key=lambda call: call.request.number),
            tuple(self.per_unit),
            self._idle_most_s,
            sum(engine.preemptions for engine in engines),
            sum(engine.hit_tokens for engine in engines) / asked if asked else 0.0,
            tuple(engine.busy_s / (self.now - self.begins_at) for engine in engines),
            sorted(self._gaps.items()),
            self._transfers,
        )

    def _expect(self, request: Request, at: float) -> None:
        self._left += 1
        self.at(at, lambda now: self._come(request, now))

    def _come(self, request: Request, now: float) -> None:
        call = Call(request, now)
        self.calls.append(call)
        self._rivals[self._gate_of(request)].come(call, now)

    def _gate_of(self, request: Request) -> int:
        return int(request.chance * self.fleet.gates)

    def _arrive(self, unit: int, sequence: Sequence, now: float) -> None:
        owner = sequence.owner
        if isinstance(owner, Call) and owner.sequence is not sequence:
            # Its unit has died meanwhile.
            return
        if not self.up[unit]:
            if isinstance(owner, Call):
                self._broken(owner, now)
            return
        self._tell(unit, self.engines[unit].take(sequence, now))
        self._set_wake(unit)

    def _set_wake(self, unit: int) -> None:
        ends_at = self.engines[unit].next_at
        if ends_at is not None and ends_at < self._wakes[unit]:
            self._wakes[unit] = ends_at
            self.at(ends_at, lambda now: self._wake(unit, now))

    def _wake(self, unit: int, now: float) -> None:
        if now < self._wakes[unit]:
            return
        self._wakes[unit] = inf
        self._tell(unit, self.engines[unit].advance(now))
        self._set_wake(unit)

    def _tell(self, unit: int, shown: list[Shown]) -> None:
        """Hand on what came of steps, as of the present moment."""
        now, rivals = self.now, self._rivals
        for one in shown:
            if streams := sum(one.decoding):
                self._gaps[one.step_s] = self._gaps.get(one.step_s, 0) + one.steps * streams
            if self.tokens_came is not None:
                for gate, streams in enumerate(one.decoding):
                    if streams:
                        self.tokens_came(gate, unit, one)
            for sequence in one.first:
                call = sequence.owner
                if isinstance(call, Call) and call.request.stream:
                    self._first(call, now)
            for sequence in one.ended:
                call = sequence.owner
                if isinstance(call, Call):
                    if not call.request.stream:
                        self._first(call, now)
                    call.ended_at = now
                    rivals[self._gate_of(call.request)].ended(call, now)
                    self._over(call)
                elif callable(call):
                    call(now)

    def _first(self, call: Call, now: float) -> None:
        if call.first_at < 0.0:
            call.first_at = now
        self._rivals[self._gate_of(call.request)].first(call, now)

    def _over(self, call: Call) -> None:
        self._left -= 1
        call.unit = None
        following = call.request.then
        if following is not None:
            self._expect(following, self.now + (0.0 if self.hurry else following.at))

    # -- what changes --------------------------------------------------------------------------------------

    def _change(self, change: Change, now: float) -> None:
        unit = change.unit
        self.settle()
        if change.is_up:
            self.engines[unit].clear()
            self.up[unit] = True
            for rival in self._rivals:
                rival.changed(unit, now, is_up=True)
            return
        self.up[unit] = False
        lost = [call for call in self.calls if call.unit == unit]
        made = [self.engines[unit].made(call.sequence) for call in lost if call.sequence is not None]
        self.engines[unit].clear()
        self._wakes[unit] = inf
        for rival in self._rivals:
            rival.changed(unit, now, is_up=False)
        for call, tokens in zip(lost, made, strict=True):
            call.made += tokens
            self._broken(call, now)

    def _broken(self, call: Call, now: float) -> None:
        call.sequence = None
        self._rivals[self._gate_of(call.request)].broke(call, now)

    def _look(self, now: float) -> None:
        """For how long each unit has been idle beside a queue, by a look now and then."""
        queued = {model for rival in self._rivals for model in rival.waiting()}
        for engine in self.engines:
            # Whose turn comes next stands for all of one engine.
            owner = engine.waiting[0].owner if engine.waiting else None
            if isinstance(owner, Call):
                queued.add(owner.request.model)
        for unit, engine in enumerate(self.engines):
            place = self.fleet.places[unit]
            models = place.unit.models
            is_idle = queued and self.up[unit] and not engine.count
            is_idle = is_idle and (not models or not queued.isdisjoint(models))
            # To wait near is what an operator has asked for who says that a cell is far.
            is_idle = is_idle and not self.fleet.cell(place).spill_s
            self._idle_s[unit] = self._idle_s[unit] + LOOK_S if is_idle else 0.0
            self._idle_most_s = max(self._idle_most_s, self._idle_s[unit])
        self.at(now + LOOK_S, self._look)
