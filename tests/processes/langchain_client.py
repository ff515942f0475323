"""LangChain's ChatOpenAI as a program: `langchain_client.py URL MODEL TOKENS STREAMS` reads streams side by
side and prints a line of JSON for each. It runs in the venv of requirements/langchain.lock.
"""

import asyncio
import json
import sys
from functools import reduce
from operator import add

from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]


async def read(client: ChatOpenAI) -> None:
    """One stream, put together by LangChain itself."""
    whole = reduce(add, [part async for part in client.astream("Tell me about gates.")])
    told = {
        "text": whole.content,
        "usage": whole.usage_metadata,
        "finish_reason": whole.response_metadata.get("finish_reason"),
    }
    print(json.dumps(told), flush=True)


async def main(url: str, model: str, tokens: str, streams: str) -> None:
    """So many streams at once."""
    client = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="x",
        model=model,
        max_tokens=int(tokens),
        max_retries=0,
        timeout=30,
        stream_usage=True,
    )
    await asyncio.gather(*(read(client) for _ in range(int(streams))))


asyncio.run(main(*sys.argv[1:]))
