"""A streaming user of the API: asks one question and checks every byte of the answer.

What must stay true: the client takes the gate's word for nothing. A cut body is told from a whole one, and
the text must be the one that the simulated unit computes from the prompt.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

import orjson

from loadtests.simunit.text import WORDS, Context, Message, render_chat
from loadtests.wire.client import Connections
from loadtests.wire.messages import post
from loadtests.wire.reply import Lines, Reply

HANG_S = 10.5
"""A client that gets no byte for so long counts as hung: the gate says something after 10 s of prefill
(`head_hold_s`) and at most 0.25 s, which is how often it looks at its clocks.
"""


@dataclass(frozen=True, slots=True)
class Question:
    """One streamed chat request."""

    prompt: str
    max_tokens: int

    @classmethod
    def draw(cls, rng: random.Random, *, prompt_tokens: int, max_tokens: int) -> Self:
        """A prompt that was never asked before: no prefix cache shortens its prefill."""
        return cls("".join(rng.choices(WORDS, k=prompt_tokens)), max_tokens)

    @classmethod
    def between(
        cls, prompt_tokens: tuple[int, int], max_tokens: tuple[int, int]
    ) -> Callable[[random.Random], "Question"]:
        """Draws questions whose sizes lie between these bounds."""

        def draw(rng: random.Random) -> "Question":
            tokens, most = rng.randint(*prompt_tokens), rng.randint(*max_tokens)
            return cls.draw(rng, prompt_tokens=tokens, max_tokens=most)

        return draw

    def body(self) -> bytes:
        """The JSON of the request."""
        message = {"role": "user", "content": self.prompt}
        return orjson.dumps({"messages": [message], "stream": True, "max_tokens": self.max_tokens})

    def expected(self) -> str:
        """The text that every simulated unit generates for it."""
        turn = Message("user", self.prompt)
        context = Context(render_chat([turn], add_generation_prompt=True, continue_final=False))
        return "".join(context.extend() for _ in range(self.max_tokens))

    def begins_with(self, text: str) -> bool:
        """Whether a right answer may begin so."""
        return self.expected().startswith(text)

    def is_answered_by(self, text: str) -> bool:
        """Whether this is the right answer, and the whole of it."""
        return self.expected() == text


class End(Enum):
    """How a request ended for its client."""

    WHOLE = "answered whole"
    BROKEN = "broken after a token, with an error event"
    CUT_SILENTLY = "broken without a word"
    UNANSWERED = "without a token and not answered"
    HUNG = "hung"
    WRONG = "with a wrong text"


@dataclass(slots=True)
class Answer:
    """What has come of one question so far. Times are of `time.monotonic`; `cut`: how HTTP itself broke.

    `gap_s` is the longest time between two tokens, `before_gap` how many had come by then.
    """

    question: Question
    sent_at: float = field(default_factory=time.monotonic)
    status: int = 0
    text: str = ""
    first_at: float | None = None
    last_at: float = 0.0
    gap_s: float = 0.0
    before_gap: int = 0
    tokens: int = 0
    ended_at: float = 0.0
    error: str = ""
    done: bool = False
    cut: str = ""
    hung: bool = False

    def take(self, line: bytes) -> None:
        """Read one line of the stream; comments and blank ones say nothing."""
        if not line.startswith(b"data: "):
            return
        data = line[6:].strip()
        if data == b"[DONE]":
            self.done = True
            return
        event = orjson.loads(data)
        if "error" in event:
            self.error = event["error"]["message"]
            return
        token = event["choices"][0]["delta"].get("content", "")
        if token:
            self._note_token(time.monotonic())
        self.text += token

    def _note_token(self, now: float) -> None:
        if self.first_at is None:
            self.first_at = now
        elif now - self.last_at > self.gap_s:
            self.gap_s, self.before_gap = now - self.last_at, self.tokens
        self.last_at = now
        self.tokens += 1

    def end(self) -> End:
        """Judge it. A broken stream may end with an error event, if behind it comes the cut of the
        connection or, where the unit itself has reported the error, its `[DONE]`.
        """
        if self.hung:
            return End.HUNG
        if not self.question.begins_with(self.text):
            return End.WRONG
        if self.done and self.question.is_answered_by(self.text) and not self.error and not self.cut:
            return End.WHOLE
        if self.first_at is None:
            return End.UNANSWERED
        return End.BROKEN if self.error and (self.cut or self.done) else End.CUT_SILENTLY

    def why(self) -> str:
        """One line about an answer that is not whole."""
        shown = f"status {self.status}, {len(self.text.split())} of {self.question.max_tokens} tokens"
        after = f"{self.ended_at - self.sent_at:.2f} s after it was sent"
        return f"{self.end().value}: {shown}, {after}; error: {self.error!r}; cut: {self.cut!r}"


async def ask(gate: Connections, answer: Answer, *, silence_s: float = HANG_S) -> None:
    """Send the question of `answer`, read on to whatever end it comes. Nothing that goes wrong is raised.

    It hangs when it gets no byte for `silence_s`.
    """
    reply = Reply(Lines(answer.take))
    try:
        await gate.exchange(post(answer.question.body()), reply, silence_s=silence_s)
    except TimeoutError:
        answer.hung = True
    except OSError as error:
        answer.cut = repr(error)
    answer.status = reply.status
    answer.error = answer.error or reply.body.decode(errors="replace")[:200]
    answer.ended_at = time.monotonic()
