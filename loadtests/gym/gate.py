"""The gate in the gym: the product's Board, Router and policy, called as proxy/ calls them.

What proxy/ does between its sockets and the router is repeated here call for call, without the sockets:
request/exchange.py (an attempt's life), control/dispatcher.py (room, the end), extras/redis/sharing.py (what
gates tell each other); what probes find is in watch.py. Where one of them changes what it tells the Board,
this has to follow.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from functools import partial

from cellgate.extras.redis.reports import UnitReport
from cellgate.extras.redis.roster import Roster
from cellgate.extras.redis.sharing import PrefixSharing
from cellgate.extras.scaling.demand import AnsweredRequest
from cellgate.policies import POLICIES
from cellgate.router.board import Board, Consequence
from cellgate.router.cost_model import RemoteLoad, Usage
from cellgate.router.judge import ignores_good_evidence
from cellgate.router.learning import GAPS_MS
from cellgate.router.nouns import Ask, Refusal, Rules, Sign, Strength, Verdict
from cellgate.router.pick import Router
from cellgate.router.queue import FairRules, Queue, Ticket
from cellgate.router.unit_state import Lease
from loadtests.gym.nouns import Call, Fleet
from loadtests.gym.sequences import Shown
from loadtests.gym.splitting import Leg
from loadtests.gym.watch import TICK_S, Watch
from loadtests.gym.world import World

POLICY = "prefix_affinity"
BYTES_PER_TOKEN = 4


class Gate:
    """One gate. `peers` are all gates of the fleet, this one included."""

    def __init__(
        self,
        world: World,
        rng: random.Random,
        number: int = 0,
        policy: str = POLICY,
        prepare: Callable[[World, Board], None] = lambda _world, _board: None,
    ) -> None:
        self.world = world
        self.number = number
        self.name = f"{number} {world.now:.3f}"
        """One that takes over another's place has its number, and another name."""
        self.board = Board(Rules())
        self.router = Router(self.board, POLICIES[policy](), rng, Queue(FairRules()))
        self.peers: list[Gate] = [self]
        self.said: dict[str, RemoteLoad] = {}
        """What this gate told the others last, by unit."""
        self.prefixes: PrefixSharing | None = None
        """What it tells of prefix caches, where there is another gate."""
        self._beats = 0
        self.document: bytes | None = None
        self.told_bytes: list[int] = []
        """By heartbeat: how large what it told of prefix caches was."""
        self.served: list[AnsweredRequest] = []
        """What it would predict waits from."""
        self.flips: list[str] = []
        self._fleet = world.fleet
        self.numbers = {place.unit.name: number for number, place in enumerate(world.fleet.places)}
        self._room_noted = False
        self._watch = Watch(world, self.board, rng, self._flipped)
        prepare(world, self.board)
        world.at(world.begins_at + TICK_S * rng.random(), self._tick)

    # -- for the world -------------------------------------------------------------------------------------

    def come(self, call: Call, now: float) -> None:
        """As Exchange._asked and _dispatch."""
        call.held = _Search(ask_of(call, now))
        self._dispatch(call, now)

    def first(self, call: Call, now: float) -> None:
        """As Attempt's commit and Exchange.committed."""
        lease = _lease(call)
        was_shown = lease.committed or call.made > 0
        lease.commit(now)
        if lease.ask.stream:
            lease.unit_state.progress_at = now
        if (leg := _search(call).leg) is not None:
            leg.arrived(now)
        self.board.prove(lease)
        if lease.ask.stream and not was_shown:
            self.room()

    def ended(self, call: Call, now: float) -> None:
        """As Exchange.done: the lease closes, then the unit is learnt from."""
        lease = _lease(call)
        _search(call).lease = None
        self.board.close(lease, now)
        self.room()
        self._worked(call, lease, now)

    def broke(self, call: Call, now: float) -> None:
        """As Exchange.failed: the unit ended the connection, or refuses a new one."""
        lease, search = _lease(call), _search(call)
        search.lease = None
        self.board.close(lease, now)
        self.room()
        lease.unit_state.costs.errors.failed(now)
        if self.board.units.get(lease.unit) is lease.unit_state:
            strength = Strength.STRONG if self._watch.is_there(lease.unit) else Strength.FATAL
            self._watch.observe(lease.unit_state, Sign.BAD, strength, "request", now)
        search.tried += (lease.unit,)
        search.is_moved = True
        if lease.committed:
            search.ask = search.ask._replace(deadline_at=float("inf"))
        self._dispatch(call, now)

    def changed(self, unit: int, now: float, *, is_up: bool) -> None:
        """A unit's process is gone, or there is another one."""
        self._watch.changed(unit, now, is_up=is_up)

    def waiting(self) -> Collection[str]:
        """The models of those in the gate's queue."""
        return {entry.item.ask.model for entry in self.router.queue.entries() if entry.item.ask.model}

    def tokens_came(self, unit: int, shown: Shown) -> None:
        """As Response.on_token, for all streams and steps at once."""
        state = self.board.units[self._fleet.places[unit].unit.name]
        gap_ms = int(shown.step_s * 1000)
        state.gaps_ms[gap_ms if gap_ms < GAPS_MS else -1] += shown.steps * shown.decoding[self.number]
        state.progress_at = max(state.progress_at, shown.at)

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
        if ticket is None and isinstance(answer, Refusal):
            answer = self._wait(call, answer, now)
        if isinstance(answer, Lease):
            search.lease = answer
            answer.on_evict = partial(self._evicted, call)
            if answer.split is None:
                self.world.send(call, self.numbers[answer.unit])
            else:
                search.leg = Leg(self, call, answer, answer.split)
                search.leg.begin(search.ask)
            return
        if search.ticket is None:
            self.world.refuse(call, answer.value)

    def _wait(self, call: Call, answer: Refusal, now: float) -> Lease | Refusal:
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
        if isinstance(place, Lease | Refusal):
            return place
        search.ticket = place
        self.room()
        return answer

    def _evicted(self, call: Call) -> None:
        """As Exchange._evicted; a stream goes on until its connection breaks."""
        search = _search(call)
        lease = search.lease
        if lease is None or lease.committed:
            return
        search.lease = None
        self.board.close(lease, self.world.now)
        self.room()
        search.tried += (lease.unit,)
        search.is_moved = True
        call.sequence = None
        self._dispatch(call, self.world.now)

    def _worked(self, call: Call, lease: Lease, now: float) -> None:
        """As Gate.worked."""
        request, state, sequence = call.request, lease.unit_state, call.sequence
        assert sequence is not None
        state.progress_at = max(state.progress_at, now)
        state.costs.errors.worked(now)
        if lease.ask.stream:
            state.costs.streamed(sequence.answer_tokens - 1, now - lease.first_at, lease.beside)
        usage = None
        if request.usage or lease.ask.stream:
            self.board.answer_lengths.learn(lease.ask.model, sequence.answer_tokens)
        if request.usage:
            usage = Usage(sequence.prompt_tokens, sequence.answer_tokens, max(sequence.cached_tokens, 0))
            state.costs.used(lease.ask, lease.job, usage)
            state.costs.computed(lease.ask, usage, lease.opened_at, lease.first_at)
        if not lease.ask.stream:
            state.costs.last_plain = lease, usage, now
        times = (lease.opened_at, lease.first_at, now)
        self.served.append(AnsweredRequest(*times, lease.job.uncached_tokens, lease.unit, call.waited_s))
        if not ignores_good_evidence(state.case):
            self._watch.observe(state, Sign.GOOD, Strength.STRONG, "request", now)

    def room(self) -> None:
        """As Gate.room: once this turn is over."""
        if len(self.router.queue) and not self._room_noted:
            self._room_noted = True
            self.world.at(self.world.now, self._serve_waiting)

    def _serve_waiting(self, now: float) -> None:
        self._room_noted = False
        self.router.serve_waiting(now)

    # -- time ----------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        """As a tick of the gate: stalls, what gates share, the queue."""
        self.world.settle()
        self._watch.tick(now)
        for state in self.board:
            if state.costs.known is not None:
                state.costs.known.tick(now)
        self._share()
        if len(self.router.queue):
            self.router.tick(now)
        self.world.at(now + TICK_S, self._tick)

    def _share(self) -> None:
        """As Sharing.views and tick: what the others told in their last heartbeat counts."""
        if len(self.peers) == 1:
            return
        self.said = {
            state.unit.name: RemoteLoad(
                state.in_flight, state.costs.backlog.queued, state.costs.backlog.queued_tokens
            )
            for state in self.board
        }
        self._share_prefixes()
        heard = [peer.said for peer in self.peers if peer is not self]
        others = {}
        for name in self.board.units:
            told = [said[name] for said in heard if name in said]
            if in_flight := sum(each.in_flight for each in told):
                others[name] = RemoteLoad(
                    in_flight,
                    sum(each.prefilling for each in told),
                    sum(each.uncached_tokens for each in told),
                )
        self.board.remote_load = others

    def _share_prefixes(self) -> None:
        """As RedisLink writes and reads what PrefixSharing tells."""
        if self.prefixes is None:
            self.prefixes = PrefixSharing(self.board, self.name, _Known(""), lambda: self.world.now)
        self._beats += 1
        self.prefixes.received_beats({peer.name: peer._beats for peer in self.peers if peer is not self})
        self.document, _ = self.prefixes.document()
        self.told_bytes.append(len(self.document or b""))
        for peer in self.peers:
            if peer is not self and peer.document is not None:
                self.prefixes.received(peer.name, peer.document)

    def _flipped(self, consequence: Consequence) -> None:
        """As Gate._flipped."""
        flip = consequence.flip
        assert flip is not None
        self.flips.append(f"{flip.at:.1f} {flip.unit} {flip.after.value}")
        for lease in consequence.evicted:
            self.world.at(self.world.now, partial(_evict, lease))
        self.room()


class _Known(Roster):
    """Every gate tells of every unit, of whatever incarnation."""

    def said(self, unit: str, gate: str) -> UnitReport | None:
        return UnitReport(unit, "", gate, Verdict.UP)


class _Search:
    """One request's, as in proxy/request/exchange.py."""

    __slots__ = ("ask", "is_moved", "lease", "leg", "ticket", "tried")

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.is_moved = False
        self.lease: Lease | None = None
        self.leg: Leg | None = None
        self.ticket: Ticket | None = None
        self.tried: tuple[str, ...] = ()


def ask_of(call: Call, now: float) -> Ask:
    """What proxy/request/body.py and proxy/request/routes.py make of the request."""
    request = call.request
    prompt = request.prompt
    return Ask(
        model=request.model,
        stream=request.stream,
        prompt_tokens=prompt.size // BYTES_PER_TOKEN,
        prompt_bytes=prompt.size,
        blocks=prompt.blocks,
        session=request.root or request.session,
        tenant=request.tenant,
        priority=request.priority,
        deadline_at=now + request.deadline_s,
        continuable=int(request.stream),
        splits=True,
    )


def make_gates(
    world: World,
    seed: int,
    policy: str = POLICY,
    prepare: Callable[[World, Board], None] = lambda _world, _board: None,
) -> list[Gate]:
    """The gates of a fleet, which tell each other what they have where."""
    fleet: Fleet = world.fleet
    gates = [Gate(world, random.Random(f"{seed} gate {n}"), n, policy, prepare) for n in range(fleet.gates)]
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
