"""The gate in the gym: the product's Board, Router and policy, called as proxy/ calls them.

What proxy/ does between its sockets and the router is repeated here call for call, without the sockets:
exchange.py and search.py (an attempt's life), gate.py (close, worked, room, the tick), vigil.py (silence),
probes/engine_metrics.py (reports), redis_sharing.py (what gates tell each other). Where one of them changes
what it tells the Board, this has to follow.
"""

from __future__ import annotations

import random
from functools import partial

from loadtests.gym.engine import Shown
from loadtests.gym.nouns import Call, Fleet
from loadtests.gym.world import World
from policies import POLICIES
from router.board import Board, Consequence
from router.books import Elsewhere, Usage
from router.desk import Desk
from router.fair import FairRules
from router.judge import nothing_to_learn
from router.lease import Lease
from router.nouns import Ask, Evidence, Load, Refusal, Rules, Sign, Strength, Verdict
from router.nouns import Fleet as Units
from router.pace import GAPS_MS
from router.router import Router
from router.silence import SOURCE, silence, still_s
from router.slowness import COMPARE_S
from router.waiting import Ticket, Waiting

POLICY = "prefix_affinity"
TICK_S = 0.25
REPORT_S, IDLE_REPORT_S = 1.0, 3.0
"""How often an engine's numbers are read, while it has requests and while it has none."""
HUSH_S = 0.25
SCRAPE_S = 0.004
"""From the moment an engine looks at its numbers to the moment the gate has them."""
WATCHED_S = 30.0
"""A gate has watched its units for so long when the load begins: nobody starts slowly any more."""
CANARY_S = 1.0
BYTES_PER_TOKEN = 4


class Gate:
    """One gate. `peers` are all gates of the fleet, this one included."""

    def __init__(self, world: World, rng: random.Random, number: int = 0, policy: str = POLICY) -> None:
        self.world = world
        self.number = number
        self.board = Board(Rules())
        self.router = Router(self.board, POLICIES[policy](), rng, Waiting(FairRules()))
        self.peers: list[Gate] = [self]
        self.said: dict[str, Elsewhere] = {}
        """What this gate told the others last, by unit."""
        self.flips: list[str] = []
        self._rng = rng
        self._fleet = world.fleet
        self._numbers = {place.unit.name: number for number, place in enumerate(world.fleet.places)}
        self._present = list(world.up)
        self._reported_at: dict[str, float] = {}
        self._room_noted = False
        self._compare_at = 0.0
        self._configure(world.begins_at - WATCHED_S)
        for desk in self.board:
            self._observe(desk, Sign.GOOD, Strength.STRONG, "canary", world.begins_at - WATCHED_S)
            self._report(desk, world.begins_at - self._rng.random())
        world.at(world.begins_at + TICK_S * self._rng.random(), self._tick)

    # -- for the world -------------------------------------------------------------------------------------

    def come(self, call: Call, now: float) -> None:
        """As Exchange._asked and _dispatch."""
        call.held = _Search(ask_of(call, now))
        self._dispatch(call, now)

    def first(self, call: Call, now: float) -> None:
        """As Relay._commit and Exchange.committed."""
        lease = _lease(call)
        was_shown = lease.committed or call.made > 0
        lease.commit(now)
        if lease.ask.stream:
            lease.desk.life_at = now
        self.board.prove(lease)
        if lease.ask.stream and not was_shown:
            self._room()

    def ended(self, call: Call, now: float) -> None:
        """As Exchange.done: the lease closes, then the unit is learnt from."""
        lease = _lease(call)
        _search(call).lease = None
        self.board.close(lease, now)
        self._room()
        self._worked(call, lease, now)

    def broke(self, call: Call, now: float) -> None:
        """As Exchange.failed: the unit ended the connection, or refuses a new one."""
        lease, search = _lease(call), _search(call)
        search.lease = None
        self.board.close(lease, now)
        self._room()
        lease.desk.books.errors.failed(now)
        if self.board.desks.get(lease.unit) is lease.desk:
            strength = Strength.STRONG if self.world.up[self._numbers[lease.unit]] else Strength.FATAL
            self._observe(lease.desk, Sign.BAD, strength, "request", now)
        search.tried += (lease.unit,)
        search.is_moved = True
        if lease.committed:
            search.ask = search.ask._replace(deadline_at=float("inf"))
        self._dispatch(call, now)

    def changed(self, unit: int, now: float, *, is_up: bool) -> None:
        """A process is gone: its requests show it, or the next probe. Or it is back, and passes canaries."""
        self._present[unit] = is_up
        name = self._fleet.places[unit].unit.name
        if name not in self.board.desks:
            self._configure(now)
        desk = self.board.desks[name]
        if is_up:
            desk.counters_at = 0.0
            self._epoch(desk, now)
            self.world.at(now + CANARY_S, lambda _: self._fly(desk))
        else:
            self.world.at(now + self._rng.random(), lambda at: self._missed(desk, at))

    def waiting(self) -> int:
        """Requests in the gate's queue."""
        return len(self.router.waiting)

    def tokens_came(self, unit: int, shown: Shown) -> None:
        """As Relay.on_token, for all streams and steps at once."""
        desk = self.board.desks[self._fleet.places[unit].unit.name]
        gap_ms = int(shown.step_s * 1000)
        desk.gaps_ms[gap_ms if gap_ms < GAPS_MS else -1] += shown.steps * shown.decoding[self.number]
        desk.life_at = max(desk.life_at, shown.at)

    # -- an attempt ----------------------------------------------------------------------------------------

    def _dispatch(self, call: Call, now: float) -> None:
        search = _search(call)
        answer = self.router.pick(search.ask, now, search.tried, evicted=search.is_moved)
        self._settle(call, answer)

    def _settle(self, call: Call, answer: Lease | Refusal) -> None:
        """As Search.heed: a lease is spent; FULL may wait, if it has not; anything else is the end."""
        search, now = _search(call), self.world.now
        ticket, search.ticket = search.ticket, None
        if ticket is not None:
            call.waited_s += now - ticket.entered_at
        if isinstance(answer, Lease):
            search.lease = answer
            answer.on_evict = partial(self._evicted, call)
            self.world.send(call, self._numbers[answer.unit])
            return
        if ticket is None:
            answer = self._wait(call, answer, now)
        if search.ticket is None:
            self.world.refuse(call, answer.value)

    def _wait(self, call: Call, answer: Refusal, now: float) -> Refusal:
        search = _search(call)
        tried = frozenset(search.tried)
        is_moved = search.is_moved or answer is Refusal.UNSURE
        if not (answer is Refusal.FULL or (is_moved and self.board.could_serve(search.ask, tried))):
            return answer
        place = self.router.wait(
            search.ask,
            now,
            tried,
            partial(self._settle, call),
            size=call.request.prompt.size + 200,
            moved=is_moved,
        )
        if isinstance(place, Refusal):
            return place
        search.ticket = place
        self._room()
        return answer

    def _evicted(self, call: Call) -> None:
        """As Exchange._evicted; a stream goes on until its connection breaks."""
        search = _search(call)
        lease = search.lease
        if lease is None or lease.committed:
            return
        search.lease = None
        self.board.close(lease, self.world.now)
        self._room()
        search.tried += (lease.unit,)
        search.is_moved = True
        call.sequence = None
        self._dispatch(call, self.world.now)

    def _worked(self, call: Call, lease: Lease, now: float) -> None:
        """As Gate.worked."""
        request, desk, sequence = call.request, lease.desk, call.sequence
        assert sequence is not None
        desk.life_at = max(desk.life_at, now)
        desk.books.errors.worked(now)
        if lease.ask.stream:
            desk.books.streamed(sequence.answer_tokens - 1, now - lease.first_at)
        else:
            desk.pace.answered(now - lease.opened_at)
        if request.usage:
            usage = Usage(sequence.prompt_tokens, sequence.answer_tokens, max(sequence.cached_tokens, 0))
            desk.books.used(lease.ask, lease.bet, usage)
        if not nothing_to_learn(desk.case):
            self._observe(desk, Sign.GOOD, Strength.STRONG, "request", now)

    def _room(self) -> None:
        """As Gate.room: once this turn is over."""
        if len(self.router.waiting) and not self._room_noted:
            self._room_noted = True
            self.world.at(self.world.now, self._serve_waiting)

    def _serve_waiting(self, now: float) -> None:
        self._room_noted = False
        self.router.serve_waiting(now)

    # -- time ----------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        """As Gate._tick: the vigil, what gates share, the queue."""
        self.world.settle()
        for desk in self.board:
            if self._present[self._numbers[desk.unit.name]]:
                desk.heard_at = now
        self.board.tick(now)
        for desk in self.board:
            is_silent = bool(desk.leases) and now - desk.quiet_since >= HUSH_S
            if is_silent:
                self._look_into_silence(desk, now)
            period_s = REPORT_S if desk.leases or desk.foreign else IDLE_REPORT_S
            if is_silent or now - self._reported_at.get(desk.unit.name, 0.0) >= period_s - TICK_S / 2:
                self._report(desk, now)
        if now >= self._compare_at:
            self._compare_at = now + COMPARE_S
            self.board.compare_speeds()
        self._share()
        if len(self.router.waiting):
            self.router.tick(now)
        self.world.at(now + TICK_S, self._tick)

    def _look_into_silence(self, desk: Desk, now: float) -> None:
        """As Vigil._look_into_silence."""
        desk.stands_still(still_s(desk, now))
        found = silence(desk, now, self.board.rules)
        if found is not None and now - desk.told_at >= found.limit_s:
            desk.told_at = now
            self._observe(desk, Sign.BAD, Strength.STRONG, SOURCE, now)

    def _report(self, desk: Desk, now: float) -> None:
        """As EngineMetrics.look and Board.report; the numbers are those of the last step that has ended."""
        name = desk.unit.name
        number = self._numbers[name]
        self._reported_at[name] = now
        if not self._present[number]:
            return
        engine, own_in_flight = self.world.engines[number], desk.in_flight
        load = Load(
            name,
            now + SCRAPE_S,
            running=len(engine.running),
            waiting=len(engine.waiting),
            kv_use=engine.kv_use,
            own_in_flight=own_in_flight,
            progress=float(engine.steps + engine.prefilled + engine.answered),
            sighted=True,
            kv_tokens=engine.model.kv_tokens,
        )
        self.world.at(max(now + SCRAPE_S, self.world.now), lambda _: self.board.report(load))

    def _share(self) -> None:
        """As Sharing.views and tick: what the others told in their last heartbeat counts."""
        if len(self.peers) == 1:
            return
        self.said = {
            desk.unit.name: Elsewhere(desk.in_flight, desk.books.work.queued_tokens) for desk in self.board
        }
        heard = [peer.said for peer in self.peers if peer is not self]
        others = {}
        for name in self.board.desks:
            in_flight = sum(said[name].in_flight for said in heard if name in said)
            if in_flight:
                tokens = sum(said[name].uncached_tokens for said in heard if name in said)
                others[name] = Elsewhere(in_flight, tokens)
        self.board.others = others

    # -- health --------------------------------------------------------------------------------------------

    def _configure(self, now: float) -> None:
        places, present = self._fleet.places, self._present
        units = [
            place.unit
            for number, place in enumerate(places)
            if present[number] or place.unit.name in self.board.desks
        ]
        self.board.configure(Units(self._fleet.cells, tuple(units)), now)

    def _observe(
        self, desk: Desk, sign: Sign, strength: Strength, source: str, at: float, epoch: str | None = None
    ) -> Consequence:
        """As Watch.observe and Gate._flipped."""
        evidence = Evidence(desk.unit.name, sign, strength, source, "", at, epoch)
        consequence = self.board.observe(evidence)
        if consequence.wants_canary:
            self._fly(desk)
        if consequence.flip is not None:
            self.flips.append(f"{at:.1f} {desk.unit.name} {consequence.flip.after.value}")
            for lease in consequence.evicted:
                if lease.on_evict is not None:
                    self.world.at(self.world.now, partial(_evict, lease))
            self._room()
        return consequence

    def _fly(self, desk: Desk) -> None:
        """A canary; of a process that is gone the next one is tried a period later."""
        number = self._numbers[desk.unit.name]
        if self._present[number]:
            self.world.canary(number, lambda at: self._landed(desk, at))

    def _landed(self, desk: Desk, now: float) -> None:
        self._observe(desk, Sign.GOOD, Strength.STRONG, "canary", now)
        if desk.case.verdict is not Verdict.UP:
            self.world.at(now + CANARY_S, lambda _: self._fly(desk))

    def _missed(self, desk: Desk, now: float) -> None:
        if not self._present[self._numbers[desk.unit.name]]:
            self._observe(desk, Sign.BAD, Strength.FATAL, "canary", now)

    def _epoch(self, desk: Desk, now: float) -> None:
        if not dict(desk.case.epochs):
            self._observe(desk, Sign.NEUTRAL, Strength.WEAK, "engine_metrics", now, "0")
        self._observe(desk, Sign.NEUTRAL, Strength.WEAK, "engine_metrics", now, f"{now:.3f}")


class _Search:
    """One request's, as in proxy/search.py."""

    __slots__ = ("ask", "is_moved", "lease", "ticket", "tried")

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.is_moved = False
        self.lease: Lease | None = None
        self.ticket: Ticket | None = None
        self.tried: tuple[str, ...] = ()


def ask_of(call: Call, now: float) -> Ask:
    """What proxy/ask.py and proxy/wishes.py make of the request."""
    request = call.request
    prompt = request.prompt
    return Ask(
        model=request.model,
        stream=request.stream,
        prompt_tokens=prompt.size // BYTES_PER_TOKEN,
        prompt_bytes=prompt.size,
        blocks=prompt.blocks,
        session=request.session,
        tenant=request.tenant,
        priority=request.priority,
        deadline_at=now + request.deadline_s,
        continuable=request.stream,
    )


def make_gates(world: World, seed: int, policy: str = POLICY) -> list[Gate]:
    """The gates of a fleet, which tell each other what they have where."""
    fleet: Fleet = world.fleet
    gates = [Gate(world, random.Random(f"{seed} gate {n}"), n, policy) for n in range(fleet.gates)]
    for gate in gates:
        gate.peers = gates
    world.tokens_came = lambda gate, unit, shown: gates[gate].tokens_came(unit, shown)
    return gates


def _search(call: Call) -> _Search:
    assert isinstance(call.held, _Search)
    return call.held


def _lease(call: Call) -> Lease:
    lease = _search(call).lease
    assert lease is not None
    return lease


def _evict(lease: Lease, _now: float) -> None:
    if lease.on_evict is not None:
        lease.on_evict()
