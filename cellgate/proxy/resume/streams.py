"""How the stream that a request asks for may be resumed, by the route of the request. Pure.

In this order: `ResumeMethod`, `BlockResumption`, `StreamApi`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import orjson

from cellgate.proxy.http.request import Request
from cellgate.proxy.http.unit import Pool
from cellgate.proxy.observe.counters import ResumeKind
from cellgate.proxy.resume import messages, responses
from cellgate.proxy.resume.blocks import BlockJoiner, BlockTranscript, Dialect, last_of
from cellgate.proxy.resume.chat import MakeHead, NextPart, Proved, Questions, Resumption
from cellgate.proxy.resume.eligible import AGAIN, OPEN, FieldRules, ways_of
from cellgate.proxy.resume.messages import Chat, given, prove_prompt
from cellgate.proxy.resume.proof import ProofRequest, UnprovenError
from cellgate.proxy.resume.replay import MakeTranscript, ReplayBuffer
from cellgate.proxy.resume.transcript import Transcript

WAYS: dict[str, Callable[[dict[str, Any]], int]] = {
    "chat": partial(ways_of, chat=True),
    "completions": partial(ways_of, chat=False),
    "messages": messages.MESSAGES_FIELDS.ways_of,
    "responses": responses.RESPONSES_FIELDS.ways_of,
}
"""The ways (eligible.py) that the body of a request leaves open. Streams of other routes have none."""
OF_TOKENS = ("vllm", "")
"""Engines that take the tokens of a prompt; the proof finds out about one that is not known yet."""


class ResumeMethod(Protocol):
    """How one broken stream, of which `replay` has been shown, is resumed."""

    replay: ReplayBuffer

    @property
    def is_proving(self) -> bool:
        """Whether a unit is being asked."""

    def why_not(self) -> str:
        """Why it cannot be continued as it stands; empty when it can, or is complete."""

    def last_events(self) -> bytes | None:
        """The events that a complete text still lacks, if no unit is needed for them."""

    def begin(
        self, tell: Callable[[Proved], None], pool: Pool, engine: str, head: MakeHead, *, fresh: bool = False
    ) -> None:
        """Ask a unit that runs `engine` to resume the stream; `tell` gets the result, once, unless that is
        abandoned.
        """

    def abandon(self) -> None:
        """Stop asking."""


# Resuming a broken stream of blocks: `/v1/messages` or `/v1/responses`.
#
# Two ways: where the answer is deterministic, a unit gets the same request again, and must repeat what was
# shown (blocks.py). Otherwise it gets the tokens of the prompt and of the text shown
# (proof.py).


@dataclass(frozen=True)
class BlockApi:
    """An API that streams blocks: its events, its requests, and the chat that engines make of one."""

    dialect: Dialect
    fields: FieldRules
    chat_of: Callable[[dict[str, Any]], Chat]


class BlockResumption:
    """One broken stream, of which `replay` has been shown."""

    def __init__(self, request: Request, replay: ReplayBuffer, api: BlockApi) -> None:
        self._api = api
        self._request = request
        self.replay = replay
        self._body: dict[str, Any] = orjson.loads(request.body)
        self._questions: Questions | None = None

    @property
    def is_proving(self) -> bool:
        return self._questions is not None and self._questions.is_open

    def why_not(self) -> str:
        """Why it cannot be continued as it stands; empty when it can, or is complete."""
        if not self._api.fields.ways_of(self._body):
            return self._api.fields.why_none(self._body)
        shown = self._shown()
        if not shown.closed:
            return "it broke inside an event"
        return shown.why_not or ("" if self.replay.ways else "only its end is in the replay buffer")

    def last_events(self) -> bytes | None:
        """The events that a complete text still lacks, if no unit is needed for them."""
        shown = self._shown()
        if shown.is_done:
            return b""
        return last_of(self._api.dialect, shown, None) if shown.finish else None

    def begin(
        self, tell: Callable[[Proved], None], pool: Pool, engine: str, head: MakeHead, *, fresh: bool = False
    ) -> None:
        """Ask a unit that runs `engine` to resume the stream; `tell` gets the result."""
        request = self._request
        proof = next_part(self._api, self._body, request.body, request.target, self._shown(), engine)
        self._questions = Questions(proof, tell, pool, head)
        self._questions.begin(fresh=fresh)

    def abandon(self) -> None:
        if self._questions is not None:
            self._questions.abandon()

    def _shown(self) -> BlockTranscript:
        shown = self.replay.read()
        assert isinstance(shown, BlockTranscript)
        return shown


def next_part(
    api: BlockApi, body: dict[str, Any], sent: bytes, target: bytes, shown: BlockTranscript, engine: str
) -> Generator[ProofRequest, dict[str, Any], NextPart | bytes]:
    """What a unit that runs `engine` gets to go on with an answer to `body` (`sent` to the path `target`) of
    which this was `shown`, or the last events. Raises UnprovenError.
    """
    dialect, ways = api.dialect, api.fields.ways_of(body)
    if not shown.blocks or ways & AGAIN:
        # The tokenizer may spell a text in other tokens than were generated; then a greedy answer would
        # go on in another way. Computed again it is the answer of one unit.
        return NextPart(target, sent, BlockJoiner(dialect, shown, None))
    if not shown.text or engine not in OF_TOKENS or not ways & OPEN:
        raise UnprovenError(f"its engine ({engine}) takes no tokens for a prompt")
    found = yield from prove_prompt(dialect, body, shown, api.chat_of)
    left = {}
    if type(limit := body.get(dialect.limit)) is int:
        left = {dialect.limit: limit - found.tokens.shown}
        if left[dialect.limit] <= 0:
            return last_of(dialect, shown, found.tokens)
    joiner = BlockJoiner(dialect, shown, found.tokens, len(shown.text))
    return NextPart(target, orjson.dumps(body | dialect.unstored | given(found.ids) | left), joiner)


class StreamApi(NamedTuple):
    """How streams are read, and resumed, and what they are counted as."""

    kind: ResumeKind
    shape: MakeTranscript
    way: Callable[[Request, ReplayBuffer], ResumeMethod]


BLOCK_APIS = {
    "messages": BlockApi(messages.Messages(), messages.MESSAGES_FIELDS, messages.chat_of),
    "responses": BlockApi(responses.Responses(), responses.RESPONSES_FIELDS, responses.chat_of),
}


def _of_blocks(kind: ResumeKind, name: str) -> StreamApi:
    api = BLOCK_APIS[name]
    return StreamApi(kind, partial(BlockTranscript, api.dialect), partial(BlockResumption, api=api))


STREAMS = {
    "chat": StreamApi(ResumeKind.TEXT, Transcript, partial(Resumption, chat=True)),
    "completions": StreamApi(ResumeKind.TEXT, Transcript, partial(Resumption, chat=False)),
    "messages": _of_blocks(ResumeKind.MESSAGES, "messages"),
    "responses": _of_blocks(ResumeKind.RESPONSES, "responses"),
}
"""Of these routes the answers are kept: all of each where another unit could resume it, else its end."""
PLAIN_ROUTES = ("chat", "completions")
"""Their streams are of a kind that follows from what they ask for and show (transcript.py)."""
