"""What the benchmark's clients send and what its engine answers.

Both sides build their bytes from here, so a client compares every body with the one it must get.
"""

MODEL = "bench"
CREATED_S = 1_700_000_000
ASK_BYTES = 1024

_ASK = '{"model":"%s","user":"%s","stream":%s,"max_tokens":%d,"messages":[{"role":"user","content":"%s"}]}'
_FILL = "A gate stands between the users and the units that answer them. " * 32
_EVENT = (
    '{"id":"chatcmpl-%s","object":"chat.completion.chunk","created":%d,"model":"%s","choices":[{"index":0,'
    '"delta":{"content":" token %d"},"logprobs":null,"finish_reason":%s}]}'
)
_REPLY = (
    '{"id":"chatcmpl-%s","object":"chat.completion","created":%d,"model":"%s","choices":[{"index":0,'
    '"message":{"role":"assistant","content":" token 0"},"text":" token 0","logprobs":null,'
    '"finish_reason":"stop"}],"usage":{"prompt_tokens":200,"completion_tokens":1,"total_tokens":201}}'
)


def ask(user: str, *, stream: bool, tokens: int) -> bytes:
    """Body of a chat request of `ASK_BYTES` bytes; `user` comes back inside every id of the answer."""
    flag = "true" if stream else "false"
    spare = ASK_BYTES - len(_ASK % (MODEL, user, flag, tokens, ""))
    return (_ASK % (MODEL, user, flag, tokens, _FILL[:spare])).encode()


def request(user: str, port: int, *, stream: bool, tokens: int) -> bytes:
    """The whole HTTP request around `ask`."""
    body = ask(user, stream=stream, tokens=tokens)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\n"
        f"Host: 127.0.0.1:{port}\r\n"
        "User-Agent: bench\r\n"
        "Accept: application/json\r\n"
        "Authorization: Bearer none\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def reply(user: str) -> bytes:
    """Body of the answer to a request that does not stream, about 300 bytes."""
    return (_REPLY % (user, CREATED_S, MODEL)).encode()


def event(user: str, index: int, tokens: int) -> bytes:
    """The SSE event of token `index` (from 0) of `tokens`, about 200 bytes, as vLLM shapes it."""
    reason = '"stop"' if index == tokens - 1 else "null"
    return f"data: {_EVENT % (user, CREATED_S, MODEL, index, reason)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def stream(user: str, tokens: int) -> bytes:
    """The whole body of a streamed answer."""
    return b"".join(event(user, index, tokens) for index in range(tokens)) + DONE
