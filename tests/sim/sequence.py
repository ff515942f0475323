"""One generation in a simulated engine: what was asked, what was said, and how the client is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

from loadtests.simunit.blocks import BlockSpeaker, MessagesSpeaker, ResponsesSpeaker
from tests.sim import openai_shapes as shapes
from tests.sim.agent import Agent
from tests.sim.agent_speech import is_for_agents
from tests.sim.behaviour import Behaviour
from tests.sim.http_server import Exchange
from tests.sim.speech import count_tokens, render, render_blocks, words

DEFAULT_MAX_TOKENS = 16


BLOCK_PATHS = ("/v1/messages", "/v1/responses")


class UnknownModelError(LookupError):
    """The request is for a model that this engine does not serve."""


@dataclass(slots=True)
class Served:
    """What became of one request at one engine. `outcome` is empty while it runs."""

    request_id: str
    text: str
    arrived_s: float
    tokens: int = 0
    outcome: str = ""


class Sequence:
    """`first_token_s` is when its first token may come, `prompt_left` so many tokens of its prompt are yet to
    be computed; the engine sets both. `remote` says where its prompt was computed, if not here;
    `is_prompt_only`: another engine will go on with it. `room` is where the two meet (0: nowhere), `meets_at`
    at which host and port; `has_room`: the request says so.
    """

    def __init__(
        self, exchange: Exchange, body: dict[str, Any], served: Served, behaviour: Behaviour
    ) -> None:
        self.exchange = exchange
        self.served = served
        self.stream = bool(body.get("stream"))
        self.first_token_s = 0.0
        self.prompt_left = 0
        self._chat = "messages" in body
        self._model: str = body["model"]
        limits = ("max_completion_tokens", "max_tokens", "max_output_tokens")
        self._left: int = next((body[name] for name in limits if body.get(name)), DEFAULT_MAX_TOKENS)
        self._blocks = _speaker(exchange.request.path, body, served)
        self._with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self._agent = Agent(served.text, body) if is_for_agents(served.text) else None
        self._words: Iterator[str] = self._agent or words(behaviour.weights + served.text)
        given = body.get("kv_transfer_params") or {}
        self.remote: dict[str, Any] | None = given if given.get("do_remote_prefill") else None
        self.is_prompt_only = bool(given.get("do_remote_decode"))
        self.room: int = body.get("bootstrap_room") or 0
        self.meets_at = body.get("bootstrap_host"), body.get("bootstrap_port")
        self.has_room = body.get("bootstrap_room") is not None
        self._handed: dict[str, Any] | None = None
        self._weights = behaviour.weights
        self._shows_logprobs = bool(body.get("logprobs")) and not self.stream
        self._fingerprint = behaviour.fingerprint
        self._said: list[str] = []
        self._around_word: tuple[bytes, ...] = ()
        self._torn: Random | None = None
        self._is_begun = False

    @classmethod
    def parse(cls, exchange: Exchange, now_s: float, model: str, behaviour: Behaviour) -> Sequence:
        """Raises ValueError, KeyError or TypeError for what is no request, UnknownModelError."""
        body = orjson.loads(exchange.request.body)
        text = render_blocks(body) if exchange.request.path in BLOCK_PATHS else render(body)
        body.setdefault("model", model)
        if body["model"] != model:
            raise UnknownModelError(f"The model `{body['model']}` does not exist.")
        served = Served(exchange.request.headers.get("x-request-id", ""), text, now_s)
        return cls(exchange, body, served, behaviour)

    def computed(self, text: str) -> None:
        """Its blocks were fetched: what it says follows from them."""
        self.served.text = text
        self._words = words(self._weights + text)

    def hand_over(self, held: dict[str, Any]) -> None:
        """Its answer says where its blocks are."""
        self._handed = held

    def begin(self, behaviour: Behaviour, rng: Random) -> None:
        """Send the head of the stream, long before anything is computed; once."""
        if self._is_begun:
            return
        self._is_begun = True
        self._torn = rng if behaviour.torn else None
        self.exchange.begin("text/event-stream; charset=utf-8", chunked=not behaviour.close_delimited)
        for event in self._blocks.accept() if self._blocks else ():
            self.send(event)

    def send(self, event: bytes) -> None:
        """Send an event: as one chunk, or torn into two."""
        if self._torn is None:
            self.exchange.send(event)
            return
        cut = self._torn.randrange(1, len(event))
        self.exchange.send(event[:cut])
        self.exchange.send(event[cut:])

    def advance(self) -> bool:
        """Say one more word; whether it was the last."""
        word = next(self._words)
        self._said.append(word)
        self.served.tokens += 1
        self._left -= 1
        is_last = self._left <= 0 or (self._agent is not None and not self._agent.has_more)
        if self.stream and self._agent is not None:
            self._tell_agent(self._agent, word, is_last=is_last)
        elif self.stream:
            self._tell(word, is_last=is_last)
        elif is_last:
            self.exchange.reply(200, self._whole())
        return is_last

    def fail(self, message: str) -> None:
        """End with an error of the engine: an event in a stream, a 500 otherwise."""
        if not self.stream:
            self.exchange.reply(500, shapes.error(500, message))
            return
        error = shapes.event(shapes.error_body(500, message))
        if self._blocks is None:
            self.send(error)
            self.send(shapes.DONE)
        else:
            self.send(b"event: error\n" + error)
        self.exchange.end()

    def end_here(self) -> None:
        """Say one word, as the last one."""
        self._left = 1
        self.advance()

    def say_nothing(self) -> None:
        """End as if all were well, without a token."""
        if not self.stream:
            self.exchange.reply(200, self._whole("stop"))
            return
        if self._chat:
            self.send(self._event(role="assistant"))
        self.send(self._event(finish="stop"))
        self._finish()

    def abort(self) -> None:
        """End although not all is said, and report it as a finish reason."""
        if not self.stream:
            self.exchange.reply(200, self._whole("abort"))
            return
        if self._blocks is None:
            self.send(self._event(finish="abort"))
            self.send(shapes.DONE)
        else:
            for event in self._blocks.end("abort", len(self._said)):
                self.send(event)
        self.exchange.end()

    def _tell_blocks(self, blocks: BlockSpeaker, word: str, *, is_last: bool) -> None:
        for event in (*(blocks.begin() if len(self._said) == 1 else ()), *blocks.word(word)):
            self.send(event)
        if is_last:
            for event in blocks.end("length", len(self._said)):
                self.send(event)
            self.exchange.end()

    def _tell(self, word: str, *, is_last: bool) -> None:
        if self._blocks is not None:
            self._tell_blocks(self._blocks, word, is_last=is_last)
            return
        if self._chat and len(self._said) == 1:
            self.send(self._event(role="assistant"))
        if not self._around_word:
            before, _, after = self._event("WORD").rpartition(b"WORD")
            self._around_word = before, after
        self.send(word.encode().join(self._around_word))
        if is_last:
            self.send(self._event(finish="length"))
            self._finish()

    def _finish(self) -> None:
        if self._with_usage:
            self.send(shapes.event(self._frame(choices=[]) | {"usage": self._usage()}))
        self.send(shapes.DONE)
        self.exchange.end()

    def _tell_agent(self, agent: Agent, word: str, *, is_last: bool) -> None:
        frame = self._frame(choices=[], chunk=".chunk")
        if self._chat and len(self._said) == 1:
            self.send(shapes.event(frame | agent.role()))
        limit = "length" if self._left <= 0 and agent.has_more else "stop"
        for choice in agent.choices(word, limit if is_last else None):
            self.send(shapes.event(frame | {"choices": [choice]}))
        if is_last:
            self._finish()

    def _event(self, text: str = "", *, role: str | None = None, finish: str | None = None) -> bytes:
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            choice["delta"] = {"role": role, "content": text} if role else {"content": text} if text else {}
        else:
            choice["text"] = text
        # Behind the text, where engines write it: only such chunks pass the gate unread.
        choice["finish_reason"] = finish
        return shapes.event(self._frame(choices=[choice], chunk=".chunk"))

    def _whole(self, finish: str = "length") -> bytes:
        text = "".join(self._said)
        if self._blocks is not None:
            return self._blocks.whole(text, finish, len(self._said))
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        if self._shows_logprobs:
            choice["logprobs"] = shapes.logprobs(self._said)
        whole = self._frame(choices=[choice]) | {"usage": self._usage()}
        if self._handed is not None:
            whole["kv_transfer_params"] = self._handed
        return orjson.dumps(whole | {"system_fingerprint": self._fingerprint or None})

    def _frame(self, choices: list[Any], chunk: str = "") -> dict[str, Any]:
        kind, prefix = ("chat.completion" + chunk, "chatcmpl") if self._chat else ("text_completion", "cmpl")
        name = f"{prefix}-{self.served.request_id}"
        return {"id": name, "object": kind, "created": 0, "model": self._model, "choices": choices}

    def _usage(self) -> dict[str, int]:
        prompt, said = count_tokens(self.served.text), len(self._said)
        return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def _speaker(path: str, body: dict[str, Any], served: Served) -> BlockSpeaker | None:
    """Who writes the answer of an API that streams blocks."""
    if path not in BLOCK_PATHS:
        return None
    prompt = count_tokens(served.text)
    if path == "/v1/messages":
        return MessagesSpeaker(served.request_id, body["model"], prompt)
    return ResponsesSpeaker(served.request_id, body["model"], prompt, body.get("max_output_tokens"))
