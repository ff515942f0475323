"""A simulated leader: OpenAI's API, generation in batched steps, faults on demand, a record of all.

Like real engines it answers 200 before prefill, says `/health` 200 whatever its followers do, and forgets a
request whose client has left.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.sim import openai_shapes as shapes
from tests.sim.behaviour import Behaviour, Break
from tests.sim.http_server import Connection, Exchange
from tests.sim.sequence import Sequence, Served, UnknownModelError

if TYPE_CHECKING:
    from tests.sim.world import World

PORT = 8000
EXIT_S = 0.05  # From a lost follower's error to the leader's exit.
LOOK_AGAIN_S = 0.1
CANARY = "cellgate-canary-"


@dataclass(frozen=True, slots=True)
class Timing:
    """First token after `prefill_s`, then one each `step_s`; at most `max_running` at once, the rest waits.

    `warm_up_s` is added to the first prefill of every process.
    """

    prefill_s: float = 0.05
    step_s: float = 0.02
    max_running: int = 256
    warm_up_s: float = 0.0


USUAL = Timing()


class Engine:
    """One engine at `url`. `served` holds every generation by request id, canaries apart."""

    def __init__(self, world: World, name: str, timing: Timing = USUAL, model: str = "tiny") -> None:
        self.name = name
        self.model = model
        self.timing = timing
        self.behaviour = Behaviour()
        self.served: dict[str, list[Served]] = {}
        self.canaries: list[Served] = []
        self._world = world
        self._loop = world.loop
        self.host = world.net.add_host(name)
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
        self.started_s = self._loop.time()
        self.steps = self.tokens = 0
        self.running: dict[Sequence, None] = {}
        self.waiting: dict[Sequence, None] = {}
        self._is_warm = False
        self._step: asyncio.Handle | None = None
        self._frozen_metrics = b""
        self._world.net.listen(lambda: Connection(self._loop, self._handle), self.host, PORT, is_outside=True)

    def die(self) -> None:
        """The process is gone: connections are reset, the port refuses."""
        self._world.trace.note("die", self.name)
        if self._step is not None:
            self._step.cancel()
        for sequence in [*self.running, *self.waiting]:
            self._forget(sequence, "died")
        self._world.net.kill(self.address)

    def restart(self) -> None:
        """A new, healthy process in the place of this one."""
        self.die()
        self.behaviour = Behaviour()
        self.start()

    # Requests

    def _handle(self, exchange: Exchange) -> None:
        if exchange.is_gone:
            return
        if self.behaviour.silent:
            self._loop.outside(LOOK_AGAIN_S, self._handle, exchange)
            return
        request = exchange.request
        match request.method, request.path:
            case "GET" | "HEAD", "/health":
                exchange.reply(200, b"")
            case "GET", "/v1/models":
                exchange.reply(200, shapes.models(self.model))
            case "GET", "/metrics":
                exchange.reply(200, self._metrics(), "text/plain; version=0.0.4; charset=utf-8")
            case "POST", "/v1/chat/completions" | "/v1/completions":
                self._generate(exchange)
            case _:
                exchange.reply(404, b'{"detail":"Not Found"}')

    def _generate(self, exchange: Exchange) -> None:
        behaviour = self.behaviour
        if behaviour.garbage:
            exchange.cut(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            return
        status = behaviour.busy_status
        if status is None and self._world.rng.random() < behaviour.error_rate:
            status = behaviour.error_status
        if status is not None:
            exchange.reply(status, shapes.error(status, "simulated"), extra="retry-after: 1\r\n")
            return
        try:
            sequence = Sequence.parse(exchange, self._loop.time(), self.model)
        except UnknownModelError as error:
            exchange.reply(404, shapes.error(404, str(error)))
            return
        except (ValueError, KeyError, TypeError) as error:
            exchange.reply(400, shapes.error(400, f"no request: {error}"))
            return
        self._accept(sequence)

    def _accept(self, sequence: Sequence) -> None:
        served = sequence.served
        if served.request_id.startswith(CANARY):
            self.canaries.append(served)
        else:
            self.served.setdefault(served.request_id, []).append(served)
        sequence.exchange.on_gone = lambda: self._forget(sequence, "aborted")
        if sequence.stream:
            sequence.begin(self.behaviour, self._world.rng)
            if self.behaviour.keepalive_s is not None:
                self._loop.outside(
                    self.behaviour.keepalive_s, self._comment, sequence, self.behaviour.keepalive_s
                )
        self.waiting[sequence] = None
        self._schedule_step()

    def _comment(self, sequence: Sequence, every_s: float) -> None:
        if not sequence.served.outcome:
            if not self.behaviour.silent:
                sequence.send(shapes.COMMENT)
            self._loop.outside(every_s, self._comment, sequence, every_s)

    # Steps

    def _schedule_step(self) -> None:
        if self._step is None and (self.running or self.waiting):
            self._step = self._loop.outside(self.timing.step_s * self.behaviour.slow, self._run_step)

    def _run_step(self) -> None:
        self._step = None
        if self.behaviour.follower_lost:
            self._break_down()
        elif not self.behaviour.is_stuck:
            self.steps += 1
            self._admit()
            now_s = self._loop.time()
            for sequence in list(self.running):
                if sequence.first_token_s <= now_s:
                    self._advance(sequence)
        self._schedule_step()

    def _admit(self) -> None:
        for sequence in list(self.waiting)[: self.timing.max_running - len(self.running)]:
            del self.waiting[sequence]
            self.running[sequence] = None
            prefill_s = self.timing.prefill_s + (0.0 if self._is_warm else self.timing.warm_up_s)
            sequence.first_token_s = (
                self._loop.time() + (prefill_s - self.timing.step_s) * self.behaviour.slow
            )
            self._is_warm = True

    def _advance(self, sequence: Sequence) -> None:
        """One token for one sequence, or its end."""
        behaviour = self.behaviour
        is_due = sequence.stream and sequence.served.tokens >= behaviour.breaks_after_events
        if behaviour.breaks is not None and is_due:
            self._break_stream(sequence, behaviour.breaks)
            return
        self.tokens += 1
        if sequence.advance():
            self._forget(sequence, "finished")

    def _break_stream(self, sequence: Sequence, breaks: Break) -> None:
        if breaks is Break.STALL:
            return
        self._forget(sequence, breaks.name.lower())
        if breaks is Break.ERROR:
            sequence.fail("simulated failure in the stream")
        else:
            sequence.exchange.cut()

    def _break_down(self) -> None:
        """What real leaders do when a follower has died: fail everything, then exit."""
        for sequence in [*self.running, *self.waiting]:
            self._forget(sequence, "failed")
            sequence.fail("EngineCore encountered an issue")
        self._loop.outside(EXIT_S, self.die)

    def _forget(self, sequence: Sequence, outcome: str) -> None:
        sequence.exchange.on_gone = None
        sequence.served.outcome = outcome
        self.running.pop(sequence, None)
        self.waiting.pop(sequence, None)

    def _metrics(self) -> bytes:
        if not (self.behaviour.spinning and self._frozen_metrics):
            self._frozen_metrics = shapes.metrics(
                {
                    "vllm:num_requests_running": len(self.running),
                    "vllm:num_requests_waiting": len(self.waiting)
                    + 8 * (self.behaviour.busy_status is not None),
                    "vllm:iteration_tokens_total_count": self.steps,
                    "vllm:generation_tokens_total": self.tokens,
                    "process_start_time_seconds": self.started_s,
                },
                self.model,
            )
        return self._frozen_metrics
