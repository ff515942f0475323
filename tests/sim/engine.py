"""A simulated unit: OpenAI's API, generation in batched steps, faults on demand, a record of all.

Like real leaders it answers 200 before prefill, says `/health` 200 whatever its followers do, and forgets a
request whose client has left.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import orjson

from loadtests.simunit.nonsense import EVENTS, EVERY_S, answer_of
from tests.sim import openai_shapes as shapes
from tests.sim.behaviour import Behaviour, Break
from tests.sim.http_server import Connection, Exchange
from tests.sim.loop import Event
from tests.sim.node import Node
from tests.sim.sequence import BLOCK_PATHS, Sequence, Served, UnknownModelError
from tests.sim.speech import detokenize, render, tokenize
from tests.sim.timing import USUAL, Timing
from tests.sim.transfer import LinkFault

if TYPE_CHECKING:
    from tests.sim.odd import Odd
    from tests.sim.poison import Poison
    from tests.sim.world import World

PORT = 8000
EXIT_S = 0.05  # From a lost follower's error to the leader's exit.
LOOK_AGAIN_S = 0.1
CANARY = "cellgate-canary-"
KNOWN = f"{CANARY}known-"
BYTES_PER_TOKEN = 4  # Of a prompt, as gates estimate it.
OTHERS_WAITING = 8  # Requests of other people's at a unit that says it is busy.


class Engine:
    """One engine at `url`. `served` holds every generation by request id, canaries and known answers apart;
    `odd_served` is what was answered oddly, canaries and all; `counted` is what /tokenize and /detokenize
    were asked.

    `nodes` are its machines: the leader's, which has the engine's own address, and those of its followers.
    `is_blind`: it has no /metrics. When `max_waiting` requests wait it refuses more with 503. `unproven` are
    the generations that a process took before it had answered a canary, and how long after its start.
    `version`: what it says of itself; with one it gives token ids.
    `half`: as an engine of SGLang it only does this part of a pair, `prefill` or `decode`.
    `can_pause`: it has `/is_paused`; `paused` is the mode in which it was paused, empty: it is not.
    """

    def __init__(
        self,
        world: World,
        name: str,
        timing: Timing = USUAL,
        *,
        model: str = "tiny",
        followers: int = 0,
        is_blind: bool = False,
        can_pause: bool = False,
        version: str = "",
        half: str = "",
    ) -> None:
        self.name = name
        self.half = half
        self.version = version
        self.can_pause = can_pause
        self.model = model
        self.timing = timing
        self.is_blind = is_blind
        self.max_waiting = sys.maxsize
        self.behaviour = Behaviour()
        self.poison: Poison | None = None
        self.served: dict[str, list[Served]] = {}
        self.canaries: list[Served] = []
        self.known: list[Served] = []
        self.odd_served: list[Served] = []
        self.refused = 0
        self.counted: list[dict[str, Any]] = []
        self.unproven: list[tuple[Served, float]] = []
        self._world = world
        self._loop = world.loop
        names = [name, *(f"{name}-{rank}" for rank in range(1, followers + 1))]
        self.nodes = [Node(world, each) for each in names]
        self.host = self.nodes[0].host
        self.start()

    @property
    def address(self) -> str:
        return f"{self.name}:{PORT}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def is_dead(self) -> bool:
        return (self.host, PORT) not in self._world.net.listeners

    # Life and death

    def start(self) -> None:
        """A fresh process: nothing counted, nothing running, not warm."""
        self._world.dead.discard(self.name)
        self.started_s = self._loop.time()
        self.steps = self.tokens = self.prompt_tokens = 0
        self.running: dict[Sequence, None] = {}
        self.waiting: dict[Sequence, None] = {}
        self.odd: dict[Exchange, Served] = {}
        self.paused = ""
        self._is_proven = False
        self._warm_at: float | None = None
        self._step: Event | None = None
        self._exit: Event | None = None
        self._frozen_metrics = b""
        self._connections = list[Connection]()
        self._world.net.listen(self._connect, self.host, PORT, is_outside=True)

    def _connect(self) -> Connection:
        self._connections = [each for each in self._connections if not each.is_closed]
        self._connections.append(made := Connection(self._loop, self._handle))
        return made

    def die(self) -> None:
        """The leader is gone: connections are reset, the port refuses."""
        self._world.trace.note("die", self.name)
        self._world.dead.add(self.name)
        self._world.transfers.forget(self.name)
        self._world.rooms.forget(self)
        for handle in (self._step, self._exit):
            if handle is not None:
                handle.cancel()
        self.nodes[0].die()
        for sequence in [*self.running, *self.waiting]:
            self.forget(sequence, "died")
        self._world.net.kill(self.address)

    def close_listener(self) -> None:
        """It shuts down in good order: nothing new comes in, what it has goes on, and connections without a
        request are closed.
        """
        del self._world.net.listeners[self.host, PORT]
        for connection in self._connections:
            connection.end_idle()

    def restart(self) -> None:
        """New, healthy processes in the place of all there were."""
        self.die()
        self.behaviour = Behaviour()
        for node in self.nodes:
            node.start()
        self.start()

    # Pauses, as vLLM has them

    def pause(self, mode: str) -> None:
        """`abort` ends what it has, `wait` finishes what runs, `keep` lets it stand; what comes waits."""
        self._world.trace.note("pause", self.name, mode)
        self.paused = mode
        if mode == "abort":
            for sequence in [*self.running, *self.waiting]:
                self.forget(sequence, "aborted")
                sequence.abort()

    def resume(self) -> None:
        """Go on."""
        self._world.trace.note("resume", self.name)
        self.paused = ""

    def _say_paused(self, exchange: Exchange) -> None:
        """The engine itself is asked, unless its front end knows."""
        says = self.behaviour.says_paused
        if says is None and self.behaviour.is_stuck:
            self._loop.outside(LOOK_AGAIN_S, self._answer, exchange)
            return
        exchange.reply(200, orjson.dumps({"is_paused": bool(self.paused) if says is None else says}))

    # Requests

    def _handle(self, exchange: Exchange) -> None:
        if exchange.is_gone:
            return
        if self.behaviour.silent:
            self._loop.outside(LOOK_AGAIN_S, self._handle, exchange)
            return
        self._schedule_step()
        if exchange.request.path in ("/tokenize", "/detokenize"):
            self._count(exchange)
        elif exchange.request.method == "POST":
            self._generate(exchange)
        elif self.behaviour.late_s:
            self._loop.outside(self.behaviour.late_s, self._answer, exchange)
        else:
            self._answer(exchange)

    def _count(self, exchange: Exchange) -> None:
        """What the front end answers by itself, whatever became of the engine."""
        body = orjson.loads(exchange.request.body)
        self.counted.append(body)
        if exchange.request.path == "/detokenize":
            exchange.reply(200, orjson.dumps({"prompt": detokenize(body["tokens"])}))
            return
        text = self.behaviour.template(render(body))
        tokens = tokenize(text)
        exchange.reply(200, orjson.dumps({"count": len(tokens), "max_model_len": 32768, "tokens": tokens}))

    def _answer(self, exchange: Exchange) -> None:
        """What probes ask for."""
        if exchange.is_gone:
            return
        match exchange.request.path:
            case "/health":
                exchange.reply(200, b"")
            case "/v1/models":
                exchange.reply(200, shapes.models(self.model, "sglang" if self.half else "vllm"))
            case "/ready" | "/ping" if self.half:
                exchange.reply(200, b"")
            case "/metrics" if not self.is_blind:
                exchange.reply(200, self._metrics(), "text/plain; version=0.0.4; charset=utf-8")
            case "/version" if self.version:
                exchange.reply(200, orjson.dumps({"version": self.version}))
            case "/is_paused" if self.can_pause:
                self._say_paused(exchange)
            case _:
                exchange.reply(404, b'{"detail":"Not Found"}')

    def _generate(self, exchange: Exchange) -> None:
        behaviour = self.behaviour
        if behaviour.answers and self._answers_nonsense(exchange):
            return
        if behaviour.oddly is not None and (odd := behaviour.oddly(exchange.request)) is not None:
            self._begin_odd(exchange, odd)
            return
        if exchange.request.path not in ("/v1/chat/completions", "/v1/completions", *BLOCK_PATHS):
            exchange.reply(404, b'{"detail":"Not Found"}')
            return
        if behaviour.garbage:
            exchange.cut(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            return
        status = behaviour.busy_status
        if status is None and self._world.rng.random() < behaviour.error_rate:
            status = behaviour.error_status
        if status is None and len(self.waiting) >= self.max_waiting:
            status = 503
        if status is not None:
            exchange.reply(status, shapes.error(status, behaviour.error_words), extra="retry-after: 1\r\n")
            return
        try:
            sequence = Sequence.parse(exchange, self._loop.time(), self.model, behaviour)
        except UnknownModelError as error:
            exchange.reply(404, shapes.error(404, str(error)))
            return
        except (ValueError, KeyError, TypeError) as error:
            exchange.reply(400, shapes.error(400, f"no request: {error}"))
            return
        body = exchange.request.body
        if behaviour.lacks and behaviour.lacks in body:
            self.refused += 1
            status = behaviour.lacks_status
            exchange.reply(status, shapes.error(status, f"{behaviour.lacks.decode()} is not supported"))
        elif 0 < behaviour.max_prompt < len(body):
            self.refused += 1
            exchange.reply(400, shapes.error(400, "the prompt is longer than the maximum context length"))
        elif self.half and not sequence.has_room:
            exchange.reply(400, shapes.error(400, "Disaggregated request received without bootstrap room id"))
        elif self.half == "decode" and sequence.room:
            self._world.rooms.wait(self, sequence)
        elif sequence.remote is not None:
            self._fetch(sequence, sequence.remote)
        else:
            self.accept(sequence)

    def _answers_nonsense(self, exchange: Exchange) -> bool:
        """Whether this one is answered with nonsense; then it was."""
        behaviour, request = self.behaviour, exchange.request
        is_canary = request.headers.get("x-request-id", "").startswith(CANARY)
        if (is_canary and behaviour.spares_canaries) or behaviour.answers_share <= self._world.rng.random():
            return False
        answer = answer_of(behaviour.answers, stream=b'"stream":true' in request.body)
        if not answer.repeated:
            exchange.reply(answer.status, answer.body, answer.content_type)
            return True
        exchange.begin(answer.content_type)
        if answer.body:
            exchange.send(answer.body)
        self._loop.outside(EVERY_S, self._repeat, exchange, answer.repeated)
        return True

    def _repeat(self, exchange: Exchange, data: bytes) -> None:
        """The same again, until the client leaves or the fault is over."""
        if exchange.is_gone:
            return
        if not self.behaviour.answers:
            exchange.cut()
            return
        exchange.send(data)
        self._loop.outside(EVERY_S, self._repeat, exchange, data)

    def _begin_odd(self, exchange: Exchange, odd: Odd) -> None:
        """Play an odd answer, from its head on."""
        served = Served(exchange.request.headers.get("x-request-id", ""), "", self._loop.time())
        self.odd[exchange] = served
        self.odd_served.append(served)
        exchange.on_gone = lambda: self._end_odd(exchange)
        self._loop.outside(odd.head_s, self._go_on_odd, exchange, odd, 0)

    def _end_odd(self, exchange: Exchange) -> None:
        self.odd.pop(exchange, None)

    def _go_on_odd(self, exchange: Exchange, odd: Odd, at: int) -> None:
        served, is_stream = self.odd.get(exchange), odd.content_type == EVENTS
        if exchange.is_gone or served is None or not odd.status:
            self.odd.pop(exchange, None)
            if not (exchange.is_gone or odd.status):
                exchange.cut()
            return
        if at == 0 and is_stream:
            exchange.begin(odd.content_type)
        if at:
            _, data, tokens = odd.pieces[at - 1]
            served.tokens += tokens
            # Nothing is computed for what is refused.
            self.tokens, self.steps = self.tokens + tokens, self.steps + (odd.status == 200)
            if is_stream:
                exchange.send(data)
        if at < len(odd.pieces):
            self._loop.outside(odd.pieces[at][0], self._go_on_odd, exchange, odd, at + 1)
            return
        del self.odd[exchange]
        exchange.on_gone = None
        self._is_proven = self._is_proven or served.request_id.startswith(CANARY)
        if is_stream:
            exchange.end()
        else:
            exchange.reply(odd.status, b"".join(data for _, data, _ in odd.pieces), odd.content_type)

    def _fetch(self, sequence: Sequence, remote: dict[str, Any]) -> None:
        """The prompt was computed elsewhere: get its blocks."""
        found = self._world.transfers.fetch(self.name, remote)
        if isinstance(found, LinkFault):
            if sequence.stream:
                sequence.begin(self.behaviour, self._world.rng)
            if found is LinkFault.CUT:
                self._loop.outside(self.timing.step_s, sequence.fail, "KV load failed")
            elif found is LinkFault.EMPTY:
                self._loop.outside(self.timing.step_s, sequence.say_nothing)
            return
        text, seconds = found
        sequence.computed(text)
        self._loop.outside(seconds, self.accept, sequence)

    def accept(self, sequence: Sequence) -> None:
        """It is to be generated."""
        if sequence.exchange.is_gone:
            return
        served = sequence.served
        if served.request_id.startswith(KNOWN):
            self.known.append(served)
        elif served.request_id.startswith(CANARY):
            self.canaries.append(served)
        else:
            self.served.setdefault(served.request_id, []).append(served)
            if not self._is_proven:
                self.unproven.append((served, served.arrived_s - self.started_s))
        sequence.exchange.on_gone = lambda: self.forget(sequence, "aborted")
        if sequence.stream:
            sequence.begin(self.behaviour, self._world.rng)
            if self.behaviour.keepalive_s is not None:
                self._loop.outside(
                    self.behaviour.keepalive_s, self._comment, sequence, self.behaviour.keepalive_s
                )
        self.waiting[sequence] = None
        self._schedule_step()
        if self.poison is not None:
            self.poison.accepted(self, sequence)

    def _comment(self, sequence: Sequence, every_s: float) -> None:
        if not sequence.served.outcome:
            if not self.behaviour.silent:
                sequence.send(shapes.COMMENT)
            self._loop.outside(every_s, self._comment, sequence, every_s)

    # Steps

    def _schedule_step(self, prefill_s: float = 0.0) -> None:
        if self._step is None and (self.running or self.waiting or self.behaviour.busy_status):
            delay_s = (self.timing.step_s + prefill_s) * self.behaviour.slow
            self._step = self._loop.outside(delay_s, self._run_step)

    def _run_step(self) -> None:
        self._step = None
        prefilled = 0
        if self.behaviour.follower_lost:
            self._break_down()
        elif not (self.behaviour.is_stuck or self.paused in ("abort", "keep")):
            if not self.paused:
                self._admit()
            if self.running or not self.paused:
                # A paused engine that has finished what it had computes no steps.
                self.steps += 1
            now_s = self._loop.time()
            for sequence in list(self.running):
                if sequence.first_token_s <= now_s and not sequence.prompt_left:
                    self._advance(sequence)
            prefilled = self.timing.prefill(self.running)
            self.prompt_tokens += prefilled
        self._schedule_step(prefilled / self.timing.prefill_tokens_per_s)

    def _admit(self) -> None:
        for sequence in list(self.waiting)[: self.timing.max_running - len(self.running)]:
            del self.waiting[sequence]
            self.running[sequence] = None
            now_s = self._loop.time()
            if self._warm_at is None:
                self._warm_at = now_s + self.timing.warm_up_s
            # Nobody overtakes the first one.
            prefill_s = self.timing.prefill_s + max(self._warm_at - now_s, 0.0)
            sequence.first_token_s = now_s + (prefill_s - self.timing.step_s) * self.behaviour.slow
            if math.isfinite(self.timing.prefill_tokens_per_s) and sequence.remote is None:
                sequence.prompt_left = len(sequence.served.text) // BYTES_PER_TOKEN

    def _advance(self, sequence: Sequence) -> None:
        """One token for one sequence, or its end."""
        behaviour = self.behaviour
        is_due = sequence.stream and sequence.served.tokens >= behaviour.breaks_after_events
        if behaviour.breaks is not None and is_due:
            self._break_stream(sequence, behaviour.breaks)
            return
        if self.poison is not None and self.poison.holds(sequence):
            return
        self.tokens += 1
        if self.half == "prefill" and sequence.room:
            del self.running[sequence]
            self._world.rooms.offer(self, sequence)
            return
        if sequence.is_prompt_only:
            held = self._world.transfers.hold(self.name, sequence.served.request_id, sequence.served.text)
            sequence.hand_over(held)
        if sequence.advance():
            self._is_proven = self._is_proven or sequence.served.request_id.startswith(CANARY)
            self.forget(sequence, "finished")
        elif self.poison is not None:
            self.poison.advanced(self, sequence)

    def _break_stream(self, sequence: Sequence, breaks: Break) -> None:
        if breaks is Break.STALL:
            return
        if breaks is Break.IDLE:
            sequence.send(shapes.IDLE)
            return
        if breaks is Break.LOSE:
            self.running.pop(sequence)
            return
        self.forget(sequence, breaks.name.lower())
        if breaks is Break.ERROR:
            sequence.fail("simulated failure in the stream")
        else:
            sequence.exchange.cut()

    def cut(self, sequence: Sequence) -> None:
        """Close the connection of one request."""
        self.forget(sequence, "cut")
        sequence.exchange.cut()

    def break_down(self) -> None:
        """What real leaders do when their engine has died of something: see `_break_down`."""
        self._break_down()

    def _break_down(self) -> None:
        """What real leaders do when a follower has died: fail everything, then exit."""
        for sequence in [*self.running, *self.waiting]:
            self.forget(sequence, "failed")
            sequence.fail("EngineCore encountered an issue")
        if self._exit is None:
            self._exit = self._loop.outside(EXIT_S, self.die)

    def forget(self, sequence: Sequence, outcome: str) -> None:
        """It is over."""
        sequence.exchange.on_gone = None
        sequence.served.outcome = outcome
        self.running.pop(sequence, None)
        self.waiting.pop(sequence, None)

    def _metrics(self) -> bytes:
        if not (self.behaviour.spinning and self._frozen_metrics):
            self._frozen_metrics = shapes.metrics(
                {
                    "vllm:num_requests_running": len(self.running) + len(self.odd),
                    "vllm:num_requests_waiting": len(self.waiting)
                    + OTHERS_WAITING * (self.behaviour.busy_status is not None),
                    "vllm:iteration_tokens_total_count": self.steps,
                    "vllm:generation_tokens_total": self.tokens,
                    "vllm:prompt_tokens_total": self.prompt_tokens,
                    "process_start_time_seconds": self.started_s,
                },
                self.model,
            )
        return self._frozen_metrics
