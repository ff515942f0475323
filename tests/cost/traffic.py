"""What a client asks and a unit answers, as it comes in from their sockets."""

from __future__ import annotations

import orjson


def request(*, stream: bool) -> bytes:
    body = orjson.dumps(
        {
            "model": "m",
            "stream": stream,
            "stream_options": {"include_usage": True} if stream else None,
            "max_tokens": 128,
            "messages": [{"role": "user", "content": "x" * 900}],
        }
    )
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nUser-Agent: client\r\n"
        "Accept: application/json\r\nAuthorization: Bearer none\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


REPLY = orjson.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 230, "completion_tokens": 1, "total_tokens": 231},
    }
)
WHOLE = (
    b"HTTP/1.1 200 OK\r\nServer: engine\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    % (len(REPLY), REPLY)
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


EVENT = (
    '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":'
    '[{"index":0,"delta":{%s},"logprobs":null,"finish_reason":%s}]}'
)


def token(number: int, ids: str = "") -> bytes:
    """`ids`: the field that an engine adds which was asked for token ids."""
    return _chunk(EVENT % (f'"content":" t{number}"', f"null{ids}"))


def _chunk(event: str) -> bytes:
    data = b"data: %b\n\n" % event.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_EVENTS = _chunk(EVENT % ("", '"stop"')) + END
"""A choice has finished, and so has the stream."""
