"""What users ask: the kinds of requests, drawn from a seed, and the one right answer to each.

What must stay true: a simulated unit's text is a function of the prompt alone, whichever unit generates it
and wherever a stream was continued, so each answer is compared with it to the last byte.
"""

import random
from dataclasses import dataclass

import orjson

from loadtests.datasets import nouns as datasets
from loadtests.simunit.replies import embeddings
from loadtests.simunit.text import WORDS, Context, Message, render_chat

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
DIMENSIONS = 16
DOCUMENTS = 16
"""Documents that RAG users share, so that prefixes repeat as they do in life."""


@dataclass(frozen=True, slots=True)
class Mix:
    """A kind of request. Token counts are drawn between bounds; `document_tokens` precede the prompt."""

    path: str
    prompt_tokens: tuple[int, int]
    max_tokens: tuple[int, int] = (0, 0)
    stream: bool = True
    document_tokens: int = 0


MIXES = {
    "short-chat": Mix(CHAT, (20, 200), (8, 40)),
    "rag": Mix(CHAT, (50, 200), (16, 64), document_tokens=3000),
    "long-generation": Mix(CHAT, (50, 200), (120, 240)),
    "stream-48": Mix(CHAT, (10, 60), (48, 48)),
    "batch": Mix(COMPLETIONS, (100, 400), (16, 48), stream=False),
    "embeddings": Mix(EMBEDDINGS, (50, 400), stream=False),
    "long-prompt": Mix(CHAT, (100_000, 100_000), (4, 4)),
    "prefill-heavy": Mix(CHAT, (1500, 6000), (8, 32)),
    "decode-heavy": Mix(CHAT, (20, 200), (200, 400)),
    "chat": Mix(CHAT, (20, 1500), (16, 160)),
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `known`: its answer can be computed, which needs a simulated unit."""

    mix: str
    prompt: str
    prompt_tokens: int
    max_tokens: int
    known: bool = True

    @classmethod
    def draw(cls, mix: str, rng: random.Random, *, known: bool = True) -> "Request":
        """A prompt that nobody asked before, behind a document that others ask about too."""
        kind = MIXES[mix]
        tokens, max_tokens = rng.randint(*kind.prompt_tokens), rng.randint(*kind.max_tokens)
        prompt = "".join(rng.choices(WORDS, k=tokens))
        if kind.document_tokens:
            document = random.Random(f"document {rng.randrange(DOCUMENTS)}")
            prompt = "".join(document.choices(WORDS, k=kind.document_tokens)) + prompt
        return cls(mix, prompt, tokens + kind.document_tokens, max_tokens, known)

    @classmethod
    def of(cls, found: datasets.Request, rng: random.Random, *, known: bool = True) -> "Request":
        """A chat of that size, with its text, if it has one."""
        prompt = found.text or "".join(rng.choices(WORDS, k=found.prompt_tokens))
        return cls("chat", prompt, found.prompt_tokens, found.answer_tokens, known)

    @property
    def kind(self) -> Mix:
        """What its mix says of it."""
        return MIXES[self.mix]

    def body(self, model: str) -> bytes:
        """The JSON of the request. A real unit is asked to go on to `max_tokens`, as a simulated one does."""
        kind, body = self.kind, dict[str, object](model=model)
        if kind.path == EMBEDDINGS:
            return orjson.dumps(body | {"input": self.prompt, "dimensions": DIMENSIONS})
        body |= {"max_tokens": self.max_tokens, "stream": kind.stream}
        if kind.stream:
            body["stream_options"] = {"include_usage": True}
        if not self.known:
            body |= {"ignore_eos": True, "temperature": 0}
        if kind.path == COMPLETIONS:
            return orjson.dumps(body | {"prompt": self.prompt})
        return orjson.dumps(body | {"messages": [{"role": "user", "content": self.prompt}]})

    def expected(self) -> str | None:
        """The right text, or the vector as JSON; None: nobody knows it."""
        if not self.known:
            return None
        if self.kind.path == EMBEDDINGS:
            answer = embeddings("", [self.prompt], DIMENSIONS, 0, as_base64=False)
            return orjson.dumps(orjson.loads(answer)["data"][0]["embedding"]).decode()
        prompt = self.prompt
        if self.kind.path == CHAT:
            turn = Message("user", prompt)
            prompt = render_chat([turn], add_generation_prompt=True, continue_final=False)
        context = Context(prompt)
        return "".join(context.extend() for _ in range(self.max_tokens))
