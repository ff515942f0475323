"""One answer to an agent in a simulated engine: its tokens, and its events as vLLM writes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.sim.agent_speech import Seen, delta_of, rest_of, seen_of
from tests.sim.speech import tokenize, tokens_of


class Agent:
    """Says the rest of an answer. Of a completion it shows raw text, as engines do."""

    def __init__(self, text: str, body: dict[str, Any]) -> None:
        self._tokens = tokens_of(rest_of(text))
        self._chat = "messages" in body
        self._gives_ids = bool(body.get("return_token_ids"))
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        self._prompt = given or tokenize(text)
        self._calls_ids = f"call-{len(text)}"
        self._raw = ""
        self._seen = Seen()
        # Of an answer that has begun only what is new is parsed.
        self._may_think = not (given or body.get("continue_final_message"))

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return self._tokens.pop(0)

    @property
    def has_more(self) -> bool:
        return bool(self._tokens)

    def role(self) -> dict[str, Any]:
        """The first event of a chat."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return {"choices": [choice], "prompt_token_ids": self._prompt if self._gives_ids else None}

    def choices(self, token: str, finish: str | None) -> list[dict[str, Any]]:
        """What is shown of a token: nothing, if nothing has come of it and nobody asked for its id."""
        self._raw += token
        ids = tokenize(token) if self._gives_ids else None
        if not self._chat:
            return [{"index": 0, "text": token, "finish_reason": finish, "token_ids": ids}]
        before, self._seen = self._seen, seen_of(self._raw, may_think=self._may_think)
        delta = delta_of(before, self._seen, self._calls_ids)
        if finish == "stop" and self._seen.calls:
            finish = "tool_calls"
        if not delta and finish is None and ids is None:
            return []
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": ids}]
