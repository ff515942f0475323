"""Requests by the SDK of OpenAI or Anthropic, as it makes them: `keys_client.py SDK URL MODEL`.

For each line of JSON on stdin (key, tokens, retries) it streams an answer and prints a line of JSON: the
class of the exception, its status, how many pieces of text came, and how long it took. `begun` comes before
that, with the first piece. Anthropic's SDK is in the venv of requirements/agents.lock.
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me about gates."}]


def by_openai(url: str, model: str, asked: dict[str, Any]) -> Iterator[str]:
    """The pieces of an answer."""
    import openai

    options = {"api_key": asked["key"], "max_retries": asked["retries"]}
    with openai.OpenAI(base_url=f"{url}/v1", **options) as client:
        for chunk in client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=asked["tokens"], stream=True
        ):
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content


def by_anthropic(url: str, model: str, asked: dict[str, Any]) -> Iterator[str]:
    """The pieces of an answer."""
    import anthropic  # type: ignore[import-not-found]

    options = {"api_key": asked["key"], "max_retries": asked["retries"]}
    with (
        anthropic.Anthropic(base_url=url, **options) as client,
        client.messages.stream(model=model, max_tokens=asked["tokens"], messages=MESSAGES) as stream,
    ):
        yield from stream.text_stream


def main() -> None:
    """Answer lines until there are no more."""
    sdk, url, model = sys.argv[1:]
    ask = {"openai": by_openai, "anthropic": by_anthropic}[sdk]
    for line in sys.stdin:
        begun_at, pieces = time.monotonic(), 0
        told: dict[str, Any] = {"error": None, "status": None}
        try:
            for _ in ask(url, model, json.loads(line)):
                pieces += 1
                if pieces == 1:
                    print("begun", flush=True)
        except Exception as error:
            told = {"error": type(error).__name__, "status": getattr(error, "status_code", None)}
        print(json.dumps({**told, "pieces": pieces, "s": time.monotonic() - begun_at}), flush=True)


if __name__ == "__main__":
    main()
