"""What the benchmark's clients send and what its engine answers.

Both sides build their bytes from here, so a client compares every body with the one it must get. All that an
answer depends on stands in the last message and in `max_tokens`, for routers may rewrite the rest.
"""

import json
import random
import zlib
from typing import NamedTuple

MODEL = "bench"
CREATED_S = 1_700_000_000
ASK_BYTES = 1024

_ASK = '{"model":"%s","max_tokens":%d,%s"messages":[{"role":"system","content":"%s"},'
_ASK_END = '{"role":"user","content":"<<%s>> %s"}]}'
_AS_STREAM = '"stream":true,"stream_options":{"include_usage":true},'
_HEX = random.Random(1).randbytes(1 << 19).hex(" ", 4)
"""More than 1 MB of text in words of eight letters."""

_LINES = r"    if %s > %s:\n        return %s[\"%s\"]\n"
_CODE = "".join(
    _LINES % (_HEX[at : at + 8], _HEX[at + 9 : at + 12], _HEX[at + 18 : at + 26], _HEX[at + 27 : at + 33])
    for at in range(0, 200_000, 36)
)

_EVENT = (
    'data: {"id":"chatcmpl-%s","object":"chat.completion.chunk","created":%d,"model":"%s",'
    '"choices":[%s]%s}\n\n'
)
_ROLE = '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
_TOKEN = (
    _EVENT
    % (
        "%s",
        CREATED_S,
        MODEL,
        '{"index":0,"delta":{"content":" token %d"},"logprobs":null,"finish_reason":%s}',
        "",
    )
).encode()
_USAGE = '"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":null}'
_REPLY = (
    '{"id":"chatcmpl-%s","object":"chat.completion","created":%d,"model":"%s","choices":[{"index":0,'
    '"message":{"role":"assistant","content":" token 0"},"logprobs":null,"finish_reason":"stop"}],%s}'
)
_TOKEN_BYTES = 4


class User(NamedTuple):
    """Who asks; and, for the engine: how fast to stream (0: as it does), how large the request is."""

    number: int
    interval_ms: int = 0
    ask_bytes: int = ASK_BYTES

    def __str__(self) -> str:
        return f"u{self.number:06}-{self.interval_ms}-{self.ask_bytes}"

    @classmethod
    def of(cls, text: str) -> "User":
        """The user of that name; one nobody has named that way is asked for as little as can be."""
        try:
            _, interval_ms, ask_bytes = text.split("-")
            return cls(0, int(interval_ms), int(ask_bytes))
        except ValueError:
            return cls(0)


def ask(user: str, *, stream: bool, tokens: int) -> bytes:
    """Body of a chat request, as large as `user` says. Half of the prompt is the same in all requests of that
    size, the other half is nobody else's and begins with `user`, which comes back in the ids of the answer.
    """
    begin = _ASK % (MODEL, tokens, _AS_STREAM if stream else "", "%s")
    end = _ASK_END % (user, "%s")
    spare = max(0, User.of(user).ask_bytes - len(begin) - len(end) + 2 * len("%s"))
    common, own = spare // 2, spare - spare // 2
    at = zlib.crc32(user.encode()) % (len(_HEX) - own)
    return (begin % _HEX[-common:] + end % _HEX[at : at + own]).encode()


def user_in(body: bytes) -> str:
    """Who asks in a body made by `ask`, or in what a router has made of one; nobody in any other."""
    at = body.rfind(b"<<")
    return body[at + 2 : body.index(b">>", at)].decode() if at >= 0 else "nobody"


# An agent's session: each request has all messages of the one before it, and then some new ones.


_TOOLS = 24
_TOOL = (
    '{"type":"function","function":{"name":"tool_%d","description":"%s","parameters":{"type":"object",'
    '"properties":{"path":{"type":"string","description":"%s"},"limit":{"type":"integer","minimum":1},'
    '"pattern":{"type":"string","description":"%s"}},"required":["path"]}}}'
)
_CALL = (
    '{"role":"assistant","content":"%s","tool_calls":[{"id":"call_%d","type":"function","function":'
    '{"name":"tool_%d","arguments":"{\\"path\\": \\"%s\\", \\"limit\\": 50}"}}]},'
    '{"role":"tool","tool_call_id":"call_%d","content":"%s"},'
)
_SYSTEM_BYTES, _RESULT_BYTES = 12_000, (300, 800, 1500, 6000)
_TURN_CALLS = 2
"""Calls with their results that one turn adds."""
TURN_BYTES = 5_000
"""So much they come to, about, with a user's word."""


class Agent:
    """One session. Its first request is `size` bytes long, as if it had come to that before."""

    def __init__(self, number: int, size: int) -> None:
        self._chance = random.Random(number)
        self._calls = 0
        self._head = '{"messages":['
        tools = ",".join(
            _TOOL % (n, self._text(500, n), self._text(80, n), self._text(60, n)) for n in range(_TOOLS)
        )
        self._tail = (
            f'],"model":"{MODEL}","max_tokens":1,"temperature":0.2,"tool_choice":"auto","tools":[{tools}]}}'
        )
        self._said = bytearray(f'{{"role":"system","content":"{self._text(_SYSTEM_BYTES, 0)}"}},'.encode())
        while len(self._said) + len(self._tail) < size:
            self._work()

    def request(self, user: str, port: int) -> bytes:
        """The whole HTTP request of its next turn."""
        for _ in range(_TURN_CALLS):
            self._work()
        self._said += f'{{"role":"user","content":"<<{user}>> {self._text(200)}"}}'.encode()
        body = b"".join((self._head.encode(), self._said, self._tail.encode()))
        self._said += b","
        return _head(port, len(body)) + body

    def _work(self) -> None:
        """It calls a tool, and gets its result."""
        at, self._calls = self._calls, self._calls + 1
        said = self._text(self._chance.randrange(200)), at, at % _TOOLS, _HEX[at : at + 40], at
        self._said += (_CALL % (*said, self._text(self._chance.choice(_RESULT_BYTES)))).encode()

    def _text(self, size: int, at: int | None = None) -> str:
        """Code with quotes and line ends, as JSON writes it."""
        if at is None:
            at = self._chance.randrange(len(_CODE) - size)
        return _CODE[at : at + size].rstrip("\\").lstrip('"n')


def request(user: str, port: int, *, stream: bool, tokens: int) -> bytes:
    """The whole HTTP request around `ask`."""
    body = ask(user, stream=stream, tokens=tokens)
    return _head(port, len(body)) + body


def _head(port: int, length: int) -> bytes:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\n"
        f"Host: 127.0.0.1:{port}\r\n"
        "User-Agent: bench\r\n"
        "Accept: application/json\r\n"
        "Authorization: Bearer none\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    )
    return head.encode()


def reply(user: str) -> bytes:
    """Body of the answer to a request that does not stream, about 300 bytes."""
    return (_REPLY % (user, CREATED_S, MODEL, _usage(user, 1))).encode()


def role(user: str) -> bytes:
    """The SSE event before the first token."""
    return (_EVENT % (user, CREATED_S, MODEL, _ROLE, "")).encode()


def event(user: str, index: int, tokens: int) -> bytes:
    """The SSE event of token `index` (from 0) of `tokens`, about 200 bytes, as vLLM shapes it."""
    return _TOKEN % (user.encode(), index, b'"stop"' if index == tokens - 1 else b"null")


def usage(user: str, tokens: int) -> bytes:
    """The SSE event that `stream_options.include_usage` asks for."""
    return (_EVENT % (user, CREATED_S, MODEL, "", "," + _usage(user, tokens))).encode()


DONE = b"data: [DONE]\n\n"


def stream(user: str, tokens: int) -> bytes:
    """The whole body of a streamed answer."""
    events = b"".join(event(user, index, tokens) for index in range(tokens))
    return role(user) + events + usage(user, tokens) + DONE


def said(body: bytes) -> str:
    """The text in a streamed answer or a plain one, whoever has rewritten it."""
    if not body.startswith(b"data:"):
        return str(json.loads(body)["choices"][0]["message"]["content"])
    events = [line[5:] for line in body.splitlines() if line.startswith(b"data:") and b"[DONE]" not in line]
    choices = [choice for each in events for choice in json.loads(each)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def _usage(user: str, tokens: int) -> str:
    prompt_tokens = User.of(user).ask_bytes // _TOKEN_BYTES
    return _USAGE % (prompt_tokens, prompt_tokens + tokens, tokens)
