"""Loops with a tool, by the clients that people use: `agents_client.py SDK URL MODEL TOKENS`.

Before each turn it waits for a line on stdin. It prints `begun` when the first text of a turn has come, and
at the end of the turn a line of JSON. It runs in the venv of requirements/agents.lock.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import agents  # type: ignore[import-not-found]
import anthropic  # type: ignore[import-not-found]
import openai
from turns import SCHEMA, Turns  # type: ignore[import-not-found]


async def by_anthropic(url: str, model: str, tokens: int, turns: Turns) -> None:
    """Anthropic's SDK."""
    tool = {"name": "weather", "description": "The weather", "input_schema": SCHEMA}
    messages: list[Any] = [{"role": "user", "content": "Tell me about gates."}]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client:
        while True:
            await turns.go()
            asked = {"model": model, "max_tokens": tokens, "messages": messages, "tools": [tool]}
            async with client.messages.stream(**asked) as stream:
                async for event in stream:
                    if event.type == "text":
                        turns.text()
                message = await stream.get_final_message()
            calls = [block for block in message.content if block.type == "tool_use"]
            said = "".join(block.text for block in message.content if block.type == "text")
            turns.over(text=said, calls=[call.input for call in calls], finish=message.stop_reason)
            if not calls:
                return
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "Rain."} for call in calls]
            messages += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": results},
            ]


async def by_openai(url: str, model: str, tokens: int, turns: Turns) -> None:
    """OpenAI's SDK."""
    tool = {"type": "function", "name": "weather", "description": "The weather", "parameters": SCHEMA}
    items: list[Any] = [{"role": "user", "content": "Tell me about gates."}]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        while True:
            await turns.go()
            asked: Any = {"model": model, "max_output_tokens": tokens, "input": items, "tools": [tool]}
            async with client.responses.stream(**asked) as stream:
                async for event in stream:
                    if event.type == "response.output_text.delta":
                        turns.text()
                response = await stream.get_final_response()
            calls = [item for item in response.output if item.type == "function_call"]
            turns.over(
                text=response.output_text,
                calls=[json.loads(call.arguments) for call in calls],
                finish=response.status,
            )
            if not calls:
                return
            items += [
                item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output
            ]
            items += [
                {"type": "function_call_output", "call_id": each.call_id, "output": "Rain."} for each in calls
            ]


async def by_agents(url: str, model: str, tokens: int, turns: Turns) -> None:
    """OpenAI's Agents SDK, which loops by itself; the tool is called between two turns."""
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)

    @agents.function_tool  # type: ignore[untyped-decorator]
    async def weather(city: str) -> str:
        """The weather."""
        turns.over(text="", calls=[{"city": city}], finish="")
        await turns.go()
        return "Rain."

    agent = agents.Agent(
        name="agent",
        instructions="You are brief.",
        model=agents.OpenAIResponsesModel(model=model, openai_client=client),
        model_settings=agents.ModelSettings(max_tokens=tokens),
        tools=[weather],
    )
    await turns.go()
    running = agents.Runner.run_streamed(agent, "Tell me about gates.", max_turns=20)
    events: AsyncIterator[Any] = running.stream_events()
    async for event in events:
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            turns.text()
    turns.over(text=running.final_output, calls=[], finish="")


SDKS = {"anthropic": by_anthropic, "openai": by_openai, "agents": by_agents}


if __name__ == "__main__":
    asyncio.run(SDKS[sys.argv[1]](sys.argv[2], sys.argv[3], int(sys.argv[4]), Turns()))
