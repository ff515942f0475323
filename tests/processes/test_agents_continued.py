"""An agent of OpenAI's SDK runs a loop of tool calls while the units that answer it are killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai import OpenAI

from loadtests.simunit.process import SimUnit
from tests.wire.process import GateProcess, eventually, metrics

TURNS = 4
TOOLS: Any = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


def turn(client: OpenAI, messages: list[Any], breaks: Callable[[], object], at: int) -> dict[str, Any]:
    """The message of one streamed turn; with its event `at` something breaks."""
    text, finish = "", ""
    calls: dict[int, dict[str, str]] = {}
    asked: dict[str, Any] = {"model": "sim", "messages": messages, "tools": TOOLS, "temperature": 0}
    stream = client.chat.completions.create(**asked, stream=True)
    for number, chunk in enumerate(stream):
        if number == at:
            breaks()
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for each in choice.delta.tool_calls or []:
                assert each.function is not None
                call = calls.setdefault(each.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += each.id or ""
                call["name"] += each.function.name or ""
                call["arguments"] += each.function.arguments or ""
    assert finish == ("tool_calls" if calls else "stop")
    tool_calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in calls.values()
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": tool_calls} if tool_calls else {})


def conversation(
    url: str, breaks: Callable[[], object] = bool, settle: Callable[[], object] = bool
) -> list[Any]:
    """All messages of these turns; something breaks in each of them, later each time, and settles before."""
    messages: list[Any] = [{"role": "user", "content": "Look up some things."}]
    with OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=60.0) as client:
        for number in range(TURNS):
            settle()
            said = turn(client, messages, breaks, 3 + 27 * number)
            (call,) = said["tool_calls"]
            assert json.loads(call["function"]["arguments"])["step"] == 0
            call["id"] = f"call-{number}"
            messages += [said, {"role": "user", "content": f"And the next? {number}"}]
    return messages


def test_turns_of_tool_calls_are_as_of_one_unit(tmp_path: Path) -> None:
    units = SimUnit.start_all(["a", "b", "c"], step_ms=10)
    try:
        alone = conversation(units[0].url)
        urls = {unit.name: unit.url for unit in units}
        # The build of a new process is not known at once.
        with GateProcess(tmp_path, urls, continue_across_builds=True) as gate:

            def kill_the_one_that_answers() -> None:
                answering = next(name for name, unit in gate.units().items() if unit["in_flight"])
                (unit,) = (unit for unit in units if unit.name == answering)
                unit.kill()
                unit.restart()

            def verdicts() -> list[str]:
                return [unit["verdict"] for unit in gate.units().values()]

            def settle() -> None:
                assert eventually(lambda: verdicts().count("up") > 1)

            assert conversation(gate.url, kill_the_one_that_answers, settle) == alone
            counted = [line for line in metrics(gate).splitlines() if "cellgate_continuations_total{" in line]
        kept = {line.split('"')[1]: line.split()[-1] for line in counted if 'result="continued"' in line}
        assert sum(map(float, kept.values())) == TURNS
        assert float(kept["tools"]) + float(kept["tool_call"]) == TURNS
    finally:
        for unit in units:
            unit.stop()
