"""Token ids in a stream of chat: asked for by the gate, kept beside the text, not shown to the client. Pure.

Wire format: vLLM from 0.10.2 on. `return_token_ids` in the request; then `prompt_token_ids` in the first
event and `token_ids` in the choice of each further one. Without it both are null, or not there.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import Any

from xxhash import xxh3_64_hexdigest

EVENT_BYTES = 4 << 20
"""The largest first event with the ids of a prompt: half a million tokens."""

_ASKED = b'{"return_token_ids":true,'
# In a text the quotes would be escaped, so these are found as fields only.
_PROMPT = re.compile(rb'"prompt_token_ids":\s*\[([\d,\s]*)\]')
_TOKENS = re.compile(rb'"token_ids":\s*\[([\d,\s]*)\]')
_VERSION = re.compile(r"v?(\d+)\.(\d+)")
_SINCE = (0, 11)


def gives_ids(engine: str, version: str) -> bool:
    """Whether an engine gives token ids in its streams, and continues them."""
    found = _VERSION.match(version)
    return engine == "vllm" and found is not None and (int(found[1]), int(found[2])) >= _SINCE


def asking(body: bytes) -> bytes:
    """The request, a JSON object with fields, that asks for token ids."""
    return _ASKED + body[body.index(b"{") + 1 :]


def without_ids(events: bytes) -> bytes:
    """Events as they would be if nobody had asked."""
    if b'token_ids":' not in events:
        return events
    if b'"prompt_token_ids":' in events:
        events = _PROMPT.sub(b'"prompt_token_ids":null', events)
    return _TOKENS.sub(b'"token_ids":null', events)


def without_prompt(events: bytes) -> bytes:
    """Events with a digest in the place of the prompt's ids, which may be very many."""
    if b'"prompt_token_ids":' not in events:
        return events
    return _PROMPT.sub(lambda found: b'"prompt_token_ids":"%b"' % _digest(found[1]).encode(), events)


def digest_of(ids: Sequence[int]) -> str:
    """What tells one prompt from another."""
    return _digest(b",".join(b"%d" % each for each in ids))


def _digest(ids: bytes) -> str:
    return xxh3_64_hexdigest(b"".join(ids.split()))


class TokenLog:
    """The token ids of one answer, and the digest of its prompt's."""

    __slots__ = ("ids", "prompt")

    def __init__(self) -> None:
        self.prompt = ""
        self.ids = array("Q")

    def pull(self, events: bytes) -> bytes:
        """Take the ids of the answer out of whole events."""
        return _TOKENS.sub(self._pulled, events) if b'"token_ids":' in events else events

    def _pulled(self, found: re.Match[bytes]) -> bytes:
        self.ids.extend(int(each) for each in found[1].split(b",") if each.strip())
        return b'"token_ids":null'

    def take(self, document: dict[str, Any]) -> None:
        """Take them out of the object of an event. Ids that are none are left, and found strange."""
        prompt = document.pop("prompt_token_ids", None)
        if isinstance(prompt, str | list) and not self.prompt:
            self.prompt = prompt if isinstance(prompt, str) else digest_of(prompt)
        choices = document.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                choice.pop("prompt_token_ids", None)
                if _are_ids(choice.get("token_ids")):
                    self.ids.extend(choice.pop("token_ids"))

    def restart(self) -> None:
        """The answer begins again."""
        self.ids = array("Q")


def _are_ids(ids: object) -> bool:
    return isinstance(ids, list) and all(type(each) is int and each >= 0 for each in ids)
