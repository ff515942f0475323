"""Answers to agents that a unit breaks: reasoning, text and tool calls go on, by token ids or computed again.

That each of them is the answer of one unit alone is looked at after every scenario (agent_answers.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.scenarios.harness import Stage
from tests.scenarios.test_continuation import LONG, TOOLS, results
from tests.sim.agent_speech import AGENT
from tests.sim.behaviour import Behaviour, Break
from tests.sim.world import played

AGENTS: dict[str, dict[str, Any]] = {
    "tools": {"tools": TOOLS, "tool_choice": "auto"},
    "tools, greedy": {"tools": TOOLS, "temperature": 0},
    "reasoning": {"reasoning_effort": "low"},
    "reasoning, greedy": {"temperature": 0},
}


@pytest.mark.parametrize("after", [1, 2, 4, 6, 9, 12])
@pytest.mark.parametrize("kind", AGENTS)
@played(Stage, units=3, version="0.32.0")
async def test_reasoning_and_tool_calls_are_continued_wherever_they_break(
    stage: Stage, kind: str, after: int
) -> None:
    # By then all versions are known.
    await asyncio.sleep(3.0)
    stage.engines["a"].behaviour = Behaviour(breaks=Break.TRUNCATE, breaks_after_events=after)
    fields = LONG | {"max_tokens": 400} | AGENTS[kind]
    visits = await asyncio.gather(
        *(
            stage.ask(messages=[{"role": "user", "content": f"{AGENT} {number}"}], **fields)
            for number in range(12)
        )
    )
    assert [(visit.code, visit.reply.error) for visit in visits if not visit.is_answered] == []
    # Behind the first event nothing is shown yet: another unit answers from the beginning.
    assert results(stage)["continued"] > 0 or after == 1
