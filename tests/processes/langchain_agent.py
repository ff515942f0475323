"""A loop with a tool by LangChain: `langchain_agent.py SDK URL MODEL TOKENS`, as agents_client.py.

It runs in the venv of requirements/langchain.lock.
"""

import asyncio
import sys
from functools import reduce
from operator import add

from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]
from turns import SCHEMA, Turns  # type: ignore[import-not-found]

CALLS = 9
"""The simulated model calls the tool once for what a user says, and then tells what came of it."""


async def main(_sdk: str, url: str, model: str, tokens: str) -> None:
    """Turns, until one has no call."""
    turns, tool = Turns(), {"name": "weather", "description": "The weather", "parameters": SCHEMA}
    client = ChatOpenAI(
        base_url=f"{url}/v1", api_key="x", model=model, max_tokens=int(tokens), max_retries=0, timeout=30
    ).bind_tools([{"type": "function", "function": tool}])
    messages: list[BaseMessage] = [HumanMessage("Tell me about gates.")]
    while True:
        await turns.go()
        parts = []
        async for part in client.astream(messages):
            parts.append(part)
            if part.content:
                turns.text()
        whole = reduce(add, parts)
        turns.over(
            text=whole.content,
            calls=[call["args"] for call in whole.tool_calls],
            finish=whole.response_metadata.get("finish_reason"),
        )
        if not whole.tool_calls:
            return
        messages += [whole, *(ToolMessage("Rain.", tool_call_id=call["id"]) for call in whole.tool_calls)]
        if sum(isinstance(message, ToolMessage) for message in messages) < CALLS:
            messages.append(HumanMessage("Go on."))


asyncio.run(main(*sys.argv[1:]))
