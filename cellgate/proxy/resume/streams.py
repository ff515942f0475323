"""How the streams of each route are read and resumed: a table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from cellgate.proxy.metrics.continuations import ContinuationKind
from cellgate.proxy.resume import messages_request, messages_stream, responses_request, responses_stream
from cellgate.proxy.resume.block_resumption import BlockApi, BlockResumption
from cellgate.proxy.resume.blocks import BlockTranscript
from cellgate.proxy.resume.questions import MakeHead
from cellgate.proxy.resume.replay_buffer import MakeTranscript, ReplayBuffer
from cellgate.proxy.resume.resumption import Resuming, Resumption
from cellgate.proxy.resume.transcript import Transcript
from cellgate.proxy.wire.pool import Pool
from cellgate.proxy.wire.request import Request


class Way(Protocol):
    """How one broken stream is resumed."""

    @property
    def is_proving(self) -> bool:
        """Whether a unit is being asked."""

    def why_not(self) -> str:
        """Why it cannot be continued as it stands; empty when it can, or is complete."""

    def last_events(self) -> bytes | None:
        """The events that a complete text still lacks, if no unit is needed for them."""

    def begin(self, owner: Resuming, pool: Pool, engine: str, head: MakeHead, *, fresh: bool = False) -> None:
        """Ask a unit that runs `engine` to resume the stream; `owner` gets the result."""

    def abandon(self) -> None:
        """Stop asking."""


class StreamApi(NamedTuple):
    """How streams are read, and resumed, and what they are counted as."""

    kind: ContinuationKind
    shape: MakeTranscript
    way: Callable[[Request, ReplayBuffer], Way]


_MESSAGES = BlockApi(messages_stream.Messages(), messages_request.FIELDS, messages_request.chat_of)
_RESPONSES = BlockApi(responses_stream.Responses(), responses_request.FIELDS, responses_request.chat_of)

_MESSAGES_SHAPE = partial(BlockTranscript, _MESSAGES.dialect)
_RESPONSES_SHAPE = partial(BlockTranscript, _RESPONSES.dialect)

STREAMS = {
    "chat": StreamApi(ContinuationKind.TEXT, Transcript, partial(Resumption, chat=True)),
    "completions": StreamApi(ContinuationKind.TEXT, Transcript, partial(Resumption, chat=False)),
    "messages": StreamApi(
        ContinuationKind.MESSAGES, _MESSAGES_SHAPE, partial(BlockResumption, api=_MESSAGES)
    ),
    "responses": StreamApi(
        ContinuationKind.RESPONSES, _RESPONSES_SHAPE, partial(BlockResumption, api=_RESPONSES)
    ),
}
"""Of these routes the answers are kept: all of each where another unit could resume it, else its end."""
PLAIN_ROUTES = ("chat", "completions")
"""Their streams are of a kind that follows from what they ask for and show (kinds.py)."""
