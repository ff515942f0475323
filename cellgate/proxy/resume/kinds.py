"""The kind of a broken answer: what it has shown, and what its request asks for besides text. Pure."""

from __future__ import annotations

from typing import Any

from cellgate.proxy.metrics.continuations import ContinuationKind
from cellgate.proxy.resume.eligible import PENALTIES, is_harmless
from cellgate.proxy.resume.shown import Shown

_LOGPROBS = ("logprobs", "top_logprobs")


def kind_of(body: dict[str, Any], shown: Shown) -> ContinuationKind:
    """The kind of an answer to `body` of which this was shown."""
    if shown.calls:
        return ContinuationKind.TOOL_CALL
    if shown.reasoning:
        return ContinuationKind.REASONING
    more = {name for name in body if not is_harmless(name, body)}
    if shown.logprobs or more.intersection(_LOGPROBS):
        return ContinuationKind.LOGPROBS
    if more:
        return ContinuationKind.PENALTIES if more <= PENALTIES else ContinuationKind.CONSTRAINED
    return ContinuationKind.TOOLS if body.get("tools") else ContinuationKind.TEXT
