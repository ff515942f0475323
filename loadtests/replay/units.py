"""The process of the simulated units: each an engine of the gym behind a port of its own, all on one clock.

What must stay true: an engine is advanced to the present before anything is asked of it or given to it, so
that its results are those of the model; only when they are written depends on this process. How late that is,
it counts.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any

import orjson
import uvloop

from loadtests.gym.engine import Engine
from loadtests.gym.fleets import FLEETS
from loadtests.gym.sequences import Model, Shown
from loadtests.gym.sequences import Sequence as EngineSequence
from loadtests.replay import shapes
from loadtests.replay.texts import ANSWER_WORD, block_names
from loadtests.wire.messages import LAST_CHUNK, SSE_HEAD, chunk, whole
from loadtests.wire.scripted import Request, announce, listen, port_of

LATE_BINS_MS = (1, 2, 5, 10, 20, 50, 100, 1000)
"""Upper ends, in real milliseconds, of the histogram of how late results are written."""
EVENT_TOKENS = 8
"""The first token is shown alone, then an event comes for so many."""
_DEFAULT_ANSWER_TOKENS = 16
_TICK_S = 0.001
"""The event loop's timers go by whole milliseconds."""


class Unit:
    """One engine, the connections that wait for its sequences, and the timer that moves it."""

    def __init__(self, name: str, model: Model, speed_up: float) -> None:
        self.name = name
        self.engine = Engine(model)
        self.born = time.time()
        self.late = [0] * (len(LATE_BINS_MS) + 1)
        self._speed_up = speed_up
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        # Who is shown something in which of the next steps, so that not all are written to at once.
        self._phases: list[dict[EngineSequence, Answering]] = [{} for _ in range(EVENT_TOKENS)]
        self._steps_shown = 0

    def now(self) -> float:
        """Virtual seconds."""
        return time.monotonic() * self._speed_up

    def add(self, sequence: EngineSequence) -> None:
        """A request has come: to the front end first."""
        self._advance()
        self.engine.expect(sequence)
        delay_s = self.engine.model.front_end_s
        self._loop.call_later(delay_s / self._speed_up, self._arrive, sequence, self.now() + delay_s)

    def abort(self, sequence: EngineSequence) -> None:
        """Its client left."""
        sequence.owner = None
        self._advance()
        self.engine.drop(sequence)
        self._forget(sequence)
        self._wake_up()

    def metrics(self) -> bytes:
        """The page of /metrics, of this moment."""
        self._advance()
        self._wake_up()
        return shapes.metrics(self.engine, self.born)

    def tell(self) -> bytes:
        """What the replay asks for at the end: how late results were."""
        return whole(orjson.dumps({"late": self.late}))

    def answer(self, request: Request) -> None:
        """Its script."""
        if request.target in (b"/v1/completions", b"/v1/chat/completions"):
            Answering(self, request).begin()
        elif page := _PAGES.get(request.target):
            request.write(page(self))
        else:
            request.write(shapes.refusal(b"404 Not Found", "no such path"))

    def _arrive(self, sequence: EngineSequence, at: float) -> None:
        # The timer is late, the engine is not: it takes the sequence when that was due if it still can.
        self._show(self.engine.take(sequence, max(at, self.engine.at)))
        if sequence.owner is None:
            self.engine.drop(sequence)
        self._move()

    def _advance(self) -> None:
        self._show(self.engine.advance(self.now()))

    def _show(self, shown: Sequence[Shown]) -> None:
        for one in shown:
            for sequence in one.first:
                self._note_late(one.at)
                if isinstance(sequence.owner, Answering):
                    self._phases[self.engine.steps % EVENT_TOKENS][sequence] = sequence.owner
                    sequence.owner.show(1)
            for sequence in one.ended:
                self._note_late(one.at)
                self._forget(sequence)
                if isinstance(sequence.owner, Answering):
                    sequence.owner.finish(sequence)
        steps = self.engine.steps
        for step in range(max(self._steps_shown, steps - EVENT_TOKENS) + 1, steps + 1):
            for sequence, owner in self._phases[step % EVENT_TOKENS].items():
                owner.show(self.engine.made(sequence))
        self._steps_shown = steps

    def _note_late(self, at: float) -> None:
        late_ms = (self.now() - at) / self._speed_up * 1000
        self.late[sum(late_ms > end for end in LATE_BINS_MS)] += 1

    def _forget(self, sequence: EngineSequence) -> None:
        for phase in self._phases:
            phase.pop(sequence, None)

    def _wake_up(self) -> None:
        """Set the timer again: when something new came, the engine may have something to show earlier."""
        if self._timer is not None:
            self._timer.cancel()
        at = self.engine.step_at
        if at is None:
            self._timer = None
            return
        ticks = max(ceil((at - self.now()) / self._speed_up / _TICK_S), 1)
        self._timer = self._loop.call_later(ticks * _TICK_S, self._move)

    def _move(self) -> None:
        self._advance()
        self._wake_up()


class Answering:
    """One generation on its way to whoever asked for it."""

    def __init__(self, unit: Unit, request: Request) -> None:
        self._unit = unit
        self._request = request
        self._chat = request.target == b"/v1/chat/completions"
        self._streams = self._tells_usage = False
        self._shown = 0

    def begin(self) -> None:
        """Hand it to the engine, or say why not."""
        try:
            ask = orjson.loads(self._request.body)
            sequence = _sequence(ask, self)
        except (ValueError, TypeError, KeyError) as error:
            self._refuse(f"the request makes no sense: {error!r}")
            return
        if sequence.prompt_tokens + sequence.answer_tokens > self._unit.engine.model.kv_tokens:
            self._refuse("the prompt does not fit the KV cache")
            return
        self._streams = bool(ask.get("stream"))
        self._tells_usage = bool((ask.get("stream_options") or {}).get("include_usage"))
        if self._streams:
            # As vLLM does: the head says nothing about the prefill.
            self._request.write(SSE_HEAD)
        self._request.on_gone = partial(self._unit.abort, sequence)
        self._unit.add(sequence)

    def show(self, tokens: int) -> None:
        """So many tokens of the answer are there, and more will come."""
        if self._streams and tokens > self._shown:
            event = shapes.event(self._unit.name, self._chat, tokens - self._shown, last=False)
            self._request.write(event)
            self._shown = tokens

    def finish(self, sequence: EngineSequence) -> None:
        """The answer is whole."""
        self._request.on_gone = None
        name, chat = self._unit.name, self._chat
        if not self._streams:
            self._request.write(shapes.whole_answer(name, chat, sequence))
            return
        rest = shapes.event(name, chat, sequence.answer_tokens - self._shown, last=True)
        usage = shapes.usage_event(name, chat, sequence) if self._tells_usage else b""
        self._request.write(rest + usage + chunk(shapes.DONE) + LAST_CHUNK)

    def _refuse(self, why: str) -> None:
        self._request.write(shapes.refusal(b"400 Bad Request", why))


_PAGES: dict[bytes, Callable[[Unit], bytes]] = {
    b"/health": lambda _: whole(b"", kind=b"text/plain"),
    b"/v1/models": lambda _: whole(shapes.MODELS),
    b"/metrics": Unit.metrics,
    b"/replay": Unit.tell,
}


def _sequence(ask: dict[str, Any], owner: Answering) -> EngineSequence:
    """A word of the prompt is a token; what is answered can be found in the cache as well."""
    if "messages" in ask:
        text = "".join(f"{each['role']}\n{each['content']}\n" for each in ask["messages"])
    else:
        text = ask["prompt"]
    if not isinstance(text, str) or not (words := text.encode().split()):
        raise ValueError("the prompt is no text")
    answer_tokens = int(ask.get("max_tokens") or ask.get("max_completion_tokens") or _DEFAULT_ANSWER_TOKENS)
    names = block_names(words + [ANSWER_WORD.strip()] * answer_tokens)
    return EngineSequence(len(words), max(answer_tokens, 1), names, owner=owner)


async def serve(fleet: str, speed_up: float) -> None:
    """Listen on a free port for each unit, and say which they are."""
    places = enumerate(FLEETS[fleet].places)
    units = [Unit(f"unit-{index}", place.model, speed_up) for index, place in places]
    servers = [await listen(unit.answer) for unit in units]
    await announce([port_of(server) for server in servers])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", required=True)
    parser.add_argument("--speed-up", type=float, required=True)
    args = parser.parse_args()
    uvloop.run(serve(args.fleet, args.speed_up))
