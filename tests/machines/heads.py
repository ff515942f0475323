"""Heads as real clients and proxies write them, and odd ones: what the readers of heads are tried with."""

from __future__ import annotations

from hypothesis import strategies as st

OPENAI_PYTHON = (
    b"Accept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\nAccept: application/json\r\n"
    b"Content-Type: application/json\r\nUser-Agent: OpenAI/Python 1.54.0\r\nX-Stainless-Lang: python\r\n"
    b"X-Stainless-Package-Version: 1.54.0\r\nX-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\n"
    b"X-Stainless-Runtime: CPython\r\nX-Stainless-Runtime-Version: 3.11.7\r\n"
    b"Authorization: Bearer sk-0123456789\r\nX-Stainless-Async: false\r\nx-stainless-retry-count: 0\r\n"
)
OPENAI_NODE = (
    b"accept: application/json\r\ncontent-type: application/json\r\nuser-agent: OpenAI/JS 4.73.0\r\n"
    b"x-stainless-lang: js\r\nx-stainless-retry-count: 0\r\nauthorization: Bearer sk-0123456789\r\n"
    b"accept-encoding: gzip,deflate\r\nconnection: keep-alive\r\n"
)
CURL = b"User-Agent: curl/8.5.0\r\nAccept: */*\r\nContent-Type: application/json\r\n"
ENVOY = (
    b"user-agent: OpenAI/Python 1.54.0\r\ncontent-type: application/json\r\nx-forwarded-for: 10.0.0.1\r\n"
    b"x-forwarded-proto: https\r\nx-envoy-internal: true\r\nx-envoy-expected-rq-timeout-ms: 15000\r\n"
    b"x-request-id: 7d9f8a0c-2f3b-4c1e-9d7a-0123456789ab\r\n"
    b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"
)
REQUEST_HEADS = [OPENAI_PYTHON, OPENAI_NODE, CURL, ENVOY]

NAMES = [
    *(
        b"Accept",
        b"X-A",
        b"x-a",
        b"X_A",
        b"a.b",
        b"X-A ",
        b" X-A",
        b"",
        b"\xffx",
        b"X-Session",
        b"Authorization",
    ),
    *(b"X-Request-Id", b"X-Forwarded-For", b"Accept-Encoding", b"Cookie", b"Keep-Alive", b"TE", b"Trailer"),
    *(b"Connection", b"Proxy-Connection", b"Upgrade", b"Expect", b"Host", b"Content-Length"),
    *(b"Transfer-Encoding", b"X-Cellgate-Unit", b"X-Cellgate-Explain", b"X-Cellgate-Resume"),
    *(b"Content-Type", b"Content-Encoding", b"Date", b"Server", b"Proxy-Authorization", b"HTTP2-Settings"),
]
VALUES = [
    *(
        b"a",
        b"",
        b"a b",
        b" a",
        b"a ",
        b"\ta",
        b"a\tb",
        b"a\0",
        b"a\x7f",
        b"\xe4",
        b"a\rb",
        b"a\nb",
        b"a\r\n b",
    ),
    *(b"keep-alive", b"Keep-Alive", b"close", b"upgrade", b"x-a", b"chunked", b"Chunked", b"gzip, chunked"),
    *(b"100-continue", b"websocket", b"0", b"2", b"02", b"+2", b"2, 2", b"1", b"on", b"identity"),
    *(b"text/event-stream", b"text/event-stream; charset=utf-8", b"x" * 300, b"x" * 2500),
]
ENDS = [b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\r\n", b"\r\n\r\n"]
COLONS = [b": ", b": ", b": ", b": ", b":", b":  ", b" : ", b":\t", b" "]
EACH_ODD_LINE = [
    *(b"%b: %b\r\n" % (name, value) for name in NAMES for value in VALUES),
    *(name + colon + b"a" + end for name in NAMES[::4] for colon in COLONS[3:] for end in ENDS[3:]),
]
ODD_LINES = st.builds(lambda *parts: b"".join(parts), *map(st.sampled_from, (NAMES, COLONS, VALUES, ENDS)))
GOOD_LINES = st.sampled_from(
    [
        *(b"Accept: */*\r\n", b"X-A: b\r\n", b"Connection: keep-alive\r\n", b"X-Request-Id: 1\r\n"),
        *(b"X-Session: s\r\n", b"X-Session: t\r\n", b"Accept-Encoding: gzip\r\n", b"Date: now\r\n"),
    ]
)
LINES = GOOD_LINES | ODD_LINES
REPLY_LINES = (
    st.sampled_from(
        [
            *(
                b"Server: engine\r\n",
                b"date: Mon, 01 Jan 2024 00:00:00 GMT\r\n",
                b"Connection: keep-alive\r\n",
            ),
            *(b"Keep-Alive: timeout=5\r\n", b"x-request-id: 1\r\n", b"content-encoding: identity\r\n"),
        ]
    )
    | ODD_LINES
)
TARGETS = st.sampled_from(
    [
        *(b"POST /v1/chat/completions HTTP/1.1\r\n",) * 6,
        *(
            b"GET /v1/models HTTP/1.1\r\n",
            b"POST /v1/messages?beta=true HTTP/1.1\r\n",
            b"GET /a?b#c HTTP/1.1\r\n",
        ),
        *(b"GET /x HTTP/1.0\r\n", b"GET /x HTTP/1.2\r\n", b"HEAD /x HTTP/1.1\r\n", b"PUT /x HTTP/1.1\r\n"),
        *(b"GET http://a/x HTTP/1.1\r\n", b"CONNECT a:1 HTTP/1.1\r\n", b"GET //a/x HTTP/1.1\r\n"),
        *(
            b"GET /v1/realtime HTTP/1.1\r\n",
            b"GET  /x HTTP/1.1\r\n",
            b"GET /x\tHTTP/1.1\r\n",
            b"get /x HTTP/1.1\r\n",
        ),
        *(
            b"GET /x%00 HTTP/1.1\r\n",
            b"GET /x HTTP/1.1 \r\n",
            b"GET /x HTTP/1.1\n",
            b"\r\nGET /x HTTP/1.1\r\n",
        ),
        *(b"GET /\xe4 HTTP/1.1\r\n", b"GET * HTTP/1.1\r\n", b"OPTIONS * HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n"),
    ]
)
