"""What simulated engines say to agents: reasoning, text and tool calls as raw text, and how it is shown.

A chat whose text has `[agent]` in it gets such an answer. It is a function of the prompt, and whoever sends
the prompt with a beginning of the answer gets exactly the rest, as with a greedy engine. It is shown as the
parsers `deepseek_r1` and `hermes` of vLLM do, by reading all of it again with each token.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from hashlib import blake2b

AGENT = "[agent]"
CALLS_LIKE = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
"""What templates explain to models."""

_ASSISTANT = "<assistant>"
_NAME = re.compile(r'"name": "([^"]+)"')


def is_for_agents(text: str) -> bool:
    """Whether a prompt gets such an answer."""
    return AGENT in text


def raw_answer(prompt: str) -> str:
    """The whole answer."""
    seed = blake2b(prompt.encode(), digest_size=8).digest()
    thought = _words(seed, 3 + seed[0] % 8)
    said = _words(seed[1:], 2 + seed[1] % 6)
    calls = [_call(seed[2 + at :]) for at in range(seed[2] % 3)] if CALLS_LIKE in prompt else []
    begin = f"<think> {thought} </think> " if seed[3] % 3 else ""
    return f"{begin}{said} " + " ".join(calls) if calls else f"{begin}{said}"


def rest_of(text: str) -> str:
    """What follows a prompt, and a beginning of its answer; nothing like it, if that is another one."""
    prompt, said = text.rsplit(_ASSISTANT, 1)
    whole = raw_answer(prompt + _ASSISTANT)
    return whole[len(said) :] if whole.startswith(said) else " something else altogether"


def _words(seed: bytes, count: int) -> str:
    return " ".join(blake2b(seed + bytes([at]), digest_size=3).hexdigest() for at in range(count))


def _call(seed: bytes) -> str:
    arguments = {"query": _words(seed, 2 + seed[0] % 6), "in": [seed[0], {"deep": _words(seed, 2)}]}
    return "<tool_call> " + json.dumps({"name": f"f{seed[0] % 4}", "arguments": arguments}) + " </tool_call>"


@dataclass(slots=True)
class Seen:
    """What clients are shown of a raw text. `calls` are names and arguments."""

    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def seen_of(raw: str, *, may_think: bool = True) -> Seen:
    """How an engine shows it."""
    seen = Seen()
    if may_think and raw.startswith("<think>"):
        seen.reasoning, ended, raw = raw.removeprefix("<think>").partition("</think>")
        if not ended:
            return seen
    seen.text, *regions = raw.split("<tool_call>")
    for region in regions:
        inside, is_closed, _ = region.partition("</tool_call>")
        name = _NAME.search(inside)
        if name is None:
            break
        _, found, arguments = inside.strip().partition('"arguments": ')
        if is_closed or _is_json(inside):
            arguments = arguments.rstrip()[:-1].rstrip()
        seen.calls.append((name[1], arguments if found else ""))
    return seen


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def delta_of(before: Seen, now: Seen, call_ids: str) -> dict[str, object]:
    """What a client is sent of one token."""
    delta: dict[str, object] = {}
    if reasoning := now.reasoning[len(before.reasoning) :]:
        delta["reasoning"] = reasoning
    if text := now.text[len(before.text) :]:
        delta["content"] = text
    calls: list[dict[str, object]] = []
    for index, (name, arguments) in enumerate(now.calls):
        known = before.calls[index][1] if index < len(before.calls) else None
        if known is None:
            head = {"index": index, "id": f"{call_ids}-{index}", "type": "function"}
            calls.append(head | {"function": {"name": name}})
        if new := arguments[len(known or "") :]:
            calls.append({"index": index, "function": {"arguments": new}})
    return delta | ({"tool_calls": calls} if calls else {})
