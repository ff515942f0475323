"""The bodies of a split request, as vLLM's NixlConnector takes them. Pure.

Wire format: `kv_transfer_params`, vLLM 0.32 and 0.33 (toy_proxy_server.py of its tests of the connector).
Leg 1 asks the prefiller for one token; its answer has the parameters with which the decoder fetches the
blocks. An engine does not check that these belong to the prompt that it gets with them: with those of another
request it answers from that one's blocks. So parameters exist only inside a Handoff, which is made of one
request and the answer to it, and gives the decoder's body once.
"""

from __future__ import annotations

from typing import Any

import orjson

_REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_NO_PART_OF_THE_PROMPT = frozenset(
    (
        "stream_options",
        "min_tokens",
        "min_completion_tokens",
        "stop",
        "stop_token_ids",
        "logprobs",
        "top_logprobs",
        "response_format",
        "structured_outputs",
        "return_token_ids",
    )
)
"""Fields that leg 1 goes without: a first token that ended the answer would leave no blocks to fetch."""
_ONLY_AS: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "use_beam_search": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "prompt_embeds": (),
}
"""Fields with other values need more of the engine that answers than one prompt's blocks."""
_STRIPPED = b',"kv_transfer_params":null}'


class PromptLeg:
    """Leg 1 of one request: `body` is what the prefiller gets."""

    __slots__ = ("_document", "_request_id", "body")

    def __init__(self, document: dict[str, Any], request_id: str) -> None:
        self._document = document
        self._request_id = request_id
        self.body = orjson.dumps(_one_token(document) | {"kv_transfer_params": _REMOTE_DECODE})

    @classmethod
    def of(cls, body: bytes, request_id: str) -> PromptLeg | str:
        """The leg of a request with this JSON object, or why it cannot be split."""
        document: dict[str, Any] = orjson.loads(body)
        reason = _why_unfit(document)
        return reason or cls(document, request_id)

    def handoff(self, reply: bytes) -> Handoff | str:
        """What the prefiller's answer hands over, or what is wrong with it."""
        try:
            answer = orjson.loads(reply)
        except orjson.JSONDecodeError:
            return "its answer is not JSON"
        given = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
        if not isinstance(given, dict) or not given.get("do_remote_prefill"):
            return "its answer has no kv_transfer_params: its engine may have no KV connector"
        of = given.get("remote_request_id")
        if isinstance(of, str) and self._request_id not in of:
            return "its answer has the kv_transfer_params of another request"
        return Handoff(self._document, given)


class Handoff:
    """Blocks that a prefiller holds for one request."""

    __slots__ = ("_document", "_parameters", "is_spent")

    def __init__(self, document: dict[str, Any], parameters: dict[str, Any]) -> None:
        self._document = document
        self._parameters = parameters
        self.is_spent = False

    def spend(self) -> bytes:
        """The decoder's body. Once fetched, blocks may be another request's. Raises RuntimeError the second
        time.
        """
        if self.is_spent:
            raise RuntimeError("the blocks of a request were handed over twice")
        self.is_spent = True
        return orjson.dumps(self._document | {"kv_transfer_params": self._parameters})

    def releasing(self) -> bytes:
        """The body that makes any decoder fetch the blocks, so that the prefiller frees them. Its answer is
        of no use.
        """
        return orjson.dumps(_one_token(self._document) | {"kv_transfer_params": self._parameters})


def stripped(body: bytes) -> bytes:
    """The JSON object without the transfer parameters of its client: of two fields with one name, engines
    take the last.
    """
    bare = body.rstrip()
    return bare if bare[:-1].rstrip().endswith(b"{") else bare[:-1] + _STRIPPED


def _one_token(document: dict[str, Any]) -> dict[str, Any]:
    asked = {name: value for name, value in document.items() if name not in _NO_PART_OF_THE_PROMPT}
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    return asked | {"stream": False, "max_tokens": 1, "ignore_eos": True}


def _why_unfit(document: dict[str, Any]) -> str:
    for name, harmless in _ONLY_AS.items():
        value = document.get(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in harmless):
            return f"the request has {name}"
    prompt = document.get("prompt", "")
    if isinstance(prompt, list) and not all(type(each) is int for each in prompt):
        return "the request has several prompts"
    return ""
