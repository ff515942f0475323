"""Clients that ask a gate for streams without a break, each in a thread of its own."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from loadtests.wire.blocking import fetch

SILENCE_S = 30.0
PAUSE_S = 0.05
"""After an answer that was none, so that a refusal does not become a busy loop."""


@contextmanager
def asking(
    url: str, users: int, *, tokens: int = 100, spread_s: float = 0.0, model: str = "sim"
) -> Iterator[list[bool]]:
    """Inside, so many users ask `model` for `tokens` at a time, one more of them every `spread_s`; whether
    each request got its whole answer.
    """
    over = threading.Event()
    message = {"role": "user", "content": "Hello"}
    body = {"model": model, "stream": True, "max_tokens": tokens, "messages": [message]}
    answers: list[bool] = []

    def use(number: int) -> None:
        over.wait(number * spread_s)
        while not over.is_set():
            answers.append(is_whole := _is_answered(url, body))
            if not is_whole:
                over.wait(PAUSE_S)

    threads = [threading.Thread(target=use, args=(number,), daemon=True) for number in range(users)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _is_answered(url: str, body: Mapping[str, object]) -> bool:
    try:
        reply = fetch(f"{url}/v1/chat/completions", json.dumps(body).encode(), silence_s=SILENCE_S)
    except OSError:
        return False
    return reply.status == 200 and reply.body.endswith(b"data: [DONE]\n\n") and b'"error"' not in reply.body
