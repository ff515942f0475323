"""The stage: one gate before simulated engines. A scenario is played on it, then the invariants are checked.

stage = Stage(seed=1, units=2)
stage.play(scenario(stage))

What holds after every scenario (and not only in the tests of it): each lease is closed once and nothing is
left; every client got one unit's bytes, whole or honestly cut, or a row of the failure table; no pick of a
unit that is down, drained, full, tried or in doubt; a unit that is dead or stuck gets nothing once
`promise_s` is over; no process gets a request before it has answered a canary; buffers stay bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

from cellgate.probes.canary import BLIND_IDLE
from cellgate.probes.engine_metrics import EngineMetrics
from cellgate.probes.nodes import HttpProbe
from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.settings import Address, Settings
from cellgate.proxy.observe.events import EventLog
from cellgate.router.nouns import Cell, Fleet, Node, Role, Rules, ServingRole, Transfer, Unit, Verdict
from tests.scenarios.observed import ObservedGate, wrong_records
from tests.scenarios.visit import Visit, chat, encode
from tests.sim.client import ORDINARY, Client, Manner
from tests.sim.conversation import End
from tests.sim.engine import BYTES_PER_TOKEN, PORT, Engine
from tests.sim.network import GATE
from tests.sim.tcp import WINDOW
from tests.sim.timing import USUAL, Timing
from tests.sim.transport import HIGH_WATER
from tests.sim.world import World, run

GATE_PORT = 80
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
RULES = Rules()
LATENCY_S = 0.2
"""More than any packet takes here, hiccups included."""
USUAL_TIMES = 4.0
"""A canary may take so many times as long as it usually does."""
BACK_S = RULES.warm_up_timeout_s + RULES.passes * RULES.canary_timeout_s + 5.0
"""From a unit's recovery to UP: the canary on its way may have to run out of its time first."""
BUFFER_BYTES = LIMITS.unsent_bytes + HIGH_WATER + WINDOW + 4096
"""What the gate may hold for a client that does not read: one read above its limit, and its framing."""
SAMPLE_S = 0.1
ROLES: dict[str, ServingRole] = {"p": "prefill", "d": "decode", "b": "both"}


def promise_s(timing: Timing = USUAL, *, is_blind: bool = False) -> float:
    """From a unit's end to its last pick: it is missed once it has shown no life for a while (or once the
    canary is back that was on its way, which the life until then excuses); then two canaries fail. What an
    idle unit did before its end its metrics may tell afterwards.
    """
    usual_s = timing.prefill_s + 3.0 * timing.step_s + LATENCY_S / 4.0
    canary_s = max(RULES.canary_timeout_s, USUAL_TIMES * usual_s) * (2.0 if is_blind else 1.0)
    idle_s = RULES.canary_idle_s * (BLIND_IDLE if is_blind else 1.0)
    told_late_s = 0.0 if is_blind else EngineMetrics().idle_s
    return max(idle_s, canary_s) + told_late_s + 2.0 * canary_s + LATENCY_S


PROMISE_S = promise_s()


class Stage:
    """`units` engines a, b, c… behind one gate. `visits` are all requests that clients have made.

    `roles` has a letter for each unit (p: prefill, d: decode, b: both), if they pass KV blocks to each other,
    by `transfer`.
    `settings` are fields of the gate's `Settings`, such as `policy`, `rules` or `limits`.
    """

    def __init__(
        self,
        seed: int = 1,
        units: int = 2,
        *,
        timing: Timing = USUAL,
        followers: int = 0,
        agents: bool = False,
        pages: bool = False,
        is_blind: bool = False,
        can_pause: bool = False,
        version: str = "",
        roles: str = "",
        transfer: Transfer = "nixl",
        max_in_flight: int = 256,
        limit_s: float = 7200.0,
        **settings: Any,
    ) -> None:
        self.world = World(seed, limit_s)
        self.rng = Random(seed + 2)
        self.timing = timing
        self.promise_s = promise_s(timing, is_blind=is_blind)
        self.followers = followers
        self.agents = agents
        self.pages = pages
        self.is_blind = is_blind
        self.can_pause = can_pause
        self.version = version
        self.roles = {name: ROLES[letter] for name, letter in zip("abcdefgh", roles, strict=False)}
        self.transfer: Transfer = transfer if roles else "none"
        self.max_in_flight = max_in_flight
        self.engines: dict[str, Engine] = {}
        for name in "abcdefgh"[:units]:
            self.add_engine(name)
        settings.update(listen=Address("gate", GATE_PORT), access_log="off")
        self.gate = self._make_gate(
            # Simulated clients have names, so that none is trusted.
            Settings(self.fleet(*self.engines), **{"internal_headers": "all", **settings}),
            seed + 3,
        )
        self.gates = [self.gate]
        """All there have been."""
        self.client = Client(self.world, f"gate:{GATE_PORT}")
        self.visits: list[Visit] = []
        self.liars: set[str] = set()
        """Units whose answers may be nonsense: who got one is not asked whether it was honest."""
        self._numbers = count()
        self._lost_since: dict[str, float] = {}
        self._picks_seen: Counter[ObservedGate] = Counter()
        self._is_over = False

    def _make_gate(self, settings: Settings, seed: int) -> ObservedGate:
        events = EventLog(time.time, settings.rules.passes, log=lambda level, line: None)
        return ObservedGate(settings, self.world.loop, Random(seed), events)

    # -- playing -------------------------------------------------------------------------------------------

    def play(self, scenario: Coroutine[Any, Any, None], *, until_up: bool = True) -> None:
        """Start the gate, wait until all units are UP, play, stop the gate; then check what must hold."""
        run(self.world, self._life(scenario, until_up))

    async def _life(self, scenario: Coroutine[Any, Any, None], until_up: bool) -> None:
        await self._begin()
        self._sample()
        if until_up:
            await self.until(self.all_up, BACK_S)
        await scenario
        self._is_over = True
        await asyncio.sleep(LATENCY_S)
        await self._end()
        self._check()

    async def _begin(self) -> None:
        await self.gate.start()

    async def _end(self) -> None:
        await self.gate.stop(delay_s=0.0, drain_s=1.0)

    def _check(self) -> None:
        wrong = [each for gate in self.gates for each in gate.violations + gate.leftovers()]
        for visit in self.visits:
            if (sentence := visit.dishonesty()) is not None and not self._is_lied_to(visit):
                wrong.append(f"{visit.request_id} {visit.unit} {visit.reply.status}: {sentence}")
        wrong += wrong_records([record for gate in self.gates for record in gate.records], self.visits)
        wrong += self._unproven()
        assert not wrong, f"{len(wrong)} violations:\n" + "\n".join(wrong[:20])

    def _is_lied_to(self, visit: Visit) -> bool:
        return bool(self.liars) and (visit.unit in self.liars or visit.reply.end is End.TIMEOUT)

    def _unproven(self) -> list[str]:
        """What a process got before it had answered a canary, but for what was on its way as it started, and
        what the gate itself asks of a unit that refuses what others serve: it has no id of a client.
        """
        return [
            f"{served.request_id} came to {engine.name} {after_s:.3f} s after its start, before any canary"
            for engine in self.engines.values()
            for served, after_s in engine.unproven
            if after_s > LATENCY_S and served.request_id
        ]

    # -- time ----------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.world.loop.time()

    async def until(self, is_so: Callable[[], bool], limit_s: float) -> None:
        """Wait until something is so. Raises AssertionError when it has not come true in time."""
        deadline = self.now + limit_s
        while not is_so():
            assert self.now < deadline, f"not so within {limit_s} s: {self.verdicts()}"
            await asyncio.sleep(0.01)

    def _sample(self) -> None:
        """Look at what must hold at every moment."""
        if self._is_over:
            return
        for engine in self.engines.values():
            # In panic a gate holds on to units on purpose.
            if self.is_lost(engine) and all(gate.board.panic_at is None for gate in self.gates):
                self._lost_since.setdefault(engine.url, self.now)
            else:
                self._lost_since.pop(engine.url, None)
        for gate in self.gates:
            picks = gate.router.picks
            for pick in picks[self._picks_seen[gate] :]:
                since = self._lost_since.get(pick.url, pick.at)
                if pick.at - since > self.promise_s:
                    gate.violations.append(f"{pick} came {pick.at - since:.1f} s after the unit was lost")
            self._picks_seen[gate] = len(picks)
        for transport in self.world.net.transports:
            size = transport.get_write_buffer_size()
            if size > BUFFER_BYTES and transport.sock.local[1] == GATE_PORT:
                self.gate.violations.append(f"{self.now:.3f}: {size} bytes are buffered by {transport}")
        self.world.loop.outside(SAMPLE_S, self._sample)

    def cured(self, engine: Engine) -> None:
        """An engine is well again. If it is lost again before the next sample, it is lost since then."""
        self._lost_since.pop(engine.url, None)

    def stand_still(self, seconds: float) -> None:
        """Keep the gate from running, as work that hogs its loop does. Promises count from then on."""
        self.world.loop.block(seconds)
        self._lost_since = dict.fromkeys(self._lost_since, self.now)

    # -- units ---------------------------------------------------------------------------------------------

    def add_engine(self, name: str) -> Engine:
        """One more engine; no unit of the gate yet."""
        engine = self.engines[name] = Engine(
            self.world,
            name,
            self.timing,
            followers=self.followers,
            is_blind=self.is_blind,
            can_pause=self.can_pause,
            version=self.version,
            half=self._half(name),
        )
        return engine

    def _half(self, name: str) -> str:
        """The part of a pair that an engine does, if it does no more."""
        role = self.roles.get(name, "both")
        return role if self.transfer == "sglang" and role != "both" else ""

    def reload(self, fleet: Fleet) -> None:
        """As SIGHUP does."""
        self.gate.reload(replace(self.gate.settings, fleet=fleet), "SIGHUP")

    def fleet(self, *names: str, **changed: Any) -> Fleet:
        """Units with these names; `changed` are fields of all of them."""
        units = (
            Unit(
                name,
                "cell",
                self.engines[name].url,
                max_in_flight=self.max_in_flight,
                nodes=self._nodes(self.engines[name]),
                role=self.roles.get(name, "both"),
            )
            for name in names
        )
        return Fleet(
            (Cell("cell", transfer=self.transfer),), tuple(replace(unit, **changed) for unit in units)
        )

    def _nodes(self, engine: Engine) -> tuple[Node, ...]:
        """The nodes of a unit as configured: with their agents and pages, as far as the stage has them."""
        if not self.agents and not self.pages:
            return ()
        return tuple(
            Node(
                node.name,
                Role.FOLLOWER if rank else Role.LEADER,
                node.agent if self.agents else "",
                (HttpProbe(url=node.page),) if self.pages else (),
            )
            for rank, node in enumerate(engine.nodes)
        )

    def is_lost(self, engine: Engine) -> bool:
        """Whether nothing can come from this engine: it is dead, stuck or cut off."""
        is_cut = self.world.net.is_cut((GATE, 0), (engine.host, PORT))
        return engine.is_dead or engine.behaviour.is_stuck or is_cut

    def verdict(self, name: str) -> Verdict:
        return self.gate.board.units[name].case.verdict

    def verdicts(self) -> dict[str, str]:
        return {state.unit.name: repr(state.case) for state in self.gate.board}

    def all_up(self) -> bool:
        return all(state.case.verdict is Verdict.UP for state in self.gate.board)

    def told(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [event for event in self.gate.events.last() if event["kind"] == kind]

    def flips(self, name: str) -> list[str]:
        """The verdicts that a unit has come to, in order."""
        return [event["after"] for event in self.told("flip") if event["unit"] == name]

    def shots(self) -> list[str]:
        """The verdicts that were not UP."""
        return [
            f"{event['unit']}: {event['before']} -> {event['after']}, {event['reason']}"
            for event in self.told("flip")
            if event["after"] != "up"
        ]

    def picks(self, name: str, since: float = 0.0) -> list[float]:
        """When the unit was picked."""
        return [pick.at for pick in self.gate.router.picks if pick.unit == name and pick.at >= since]

    def continuations(self) -> Counter[str]:
        """What became of the streams that were broken, at all gates there have been."""
        counts: Counter[str] = Counter()
        for gate in self.gates:
            for (_, result), number in gate.metrics.continuations.items():
                counts[result.value] += number
        return +counts

    # -- clients -------------------------------------------------------------------------------------------

    async def ask(
        self,
        *,
        manner: Manner = ORDINARY,
        path: str = CHAT,
        prompt_tokens: int = 0,
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> Visit:
        """One generation, on a connection of its own; `fields` go into the body."""
        prompt = f"prompt {len(self.visits)} ".ljust(BYTES_PER_TOKEN * prompt_tokens, "x")
        body = chat(prompt, **fields)
        if path == COMPLETIONS:
            del body["messages"]
            body["prompt"] = prompt
        if path == RESPONSES:
            body["input"], body["max_output_tokens"] = body.pop("messages"), body.pop("max_tokens")
        visit = self._visit(path, body)
        headers = {"x-request-id": visit.request_id} | (headers or {})
        visit.reply = await self.client.request("POST", path, encode(body), headers, manner)
        return visit

    async def send(self, method: str, path: str, body: bytes = b"", manner: Manner = ORDINARY) -> Visit:
        """Any other request."""
        visit = self._visit(path, None)
        headers = {"x-request-id": visit.request_id}
        visit.reply = await self.client.request(method, path, body, headers, manner)
        return visit

    async def pipeline(
        self,
        bodies: list[dict[str, Any]],
        manner: Manner = ORDINARY,
        rewrite: Callable[[bytes], bytes] = bytes,
    ) -> list[Visit]:
        """Generations sent back to back on one connection; `rewrite` may change the bytes of each."""
        visits = [self._visit(CHAT, body) for body in bodies]
        raw = [
            rewrite(self.client.encode("POST", CHAT, encode(body), {"x-request-id": v.request_id}))
            for v, body in zip(visits, bodies, strict=True)
        ]
        replies = await self.client.exchange(raw, manner, ["POST"] * len(raw))
        for visit, reply in zip(visits, replies, strict=True):
            visit.reply = reply
        return visits

    def crowd(self, size: int, **fields: Any) -> asyncio.Future[list[Visit]]:
        """So many generations at once; to be awaited."""
        return asyncio.gather(*(self.ask(**fields) for _ in range(size)))

    def _visit(self, path: str, body: dict[str, Any] | None) -> Visit:
        visit = Visit(f"visit-{next(self._numbers)}", path, body)
        visit.reply.end = End.LEFT
        self.visits.append(visit)
        return visit
