"""A real vLLM engine, step by step, on a clock of its own: the CPU time that its steps have taken.

Runs inside .venv-vllm as a script: `python vllm_steps.py MODEL`, with a line of JSON on its standard input
for each scenario, and one on its output. What else runs on the machine makes nothing later.
"""

import json
import sys
from time import process_time
from typing import Any

from vllm import EngineArgs, SamplingParams  # type: ignore[import-not-found]
from vllm.v1.engine.llm_engine import LLMEngine  # type: ignore[import-not-found]


def main() -> None:
    """The first line has the engine's options, each that follows a scenario of [at, ids, answer]."""
    engine = LLMEngine.from_engine_args(EngineArgs(model=sys.argv[1], **json.loads(sys.stdin.readline())))
    print(json.dumps("ready"), flush=True)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(play(engine, number, json.loads(line))), flush=True)


def play(engine: Any, scenario: int, requests: list[tuple[float, list[int], int]]) -> dict[str, Any]:
    """When each request showed its first and its last token, and what was cached of it."""
    now, todo = 0.0, list(enumerate(requests))
    open_ids: set[int] = set()
    times: dict[int, list[float]] = {number: [] for number, _ in todo}
    cached: dict[int, int] = {}
    before = preemptions(engine)
    while todo or open_ids:
        if not open_ids:
            now = max(now, todo[0][1][0])
        while todo and todo[0][1][0] <= now:
            number, (_, ids, answer) = todo.pop(0)
            wanted = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0, detokenize=False)
            engine.add_request(f"{scenario}-{number}", {"prompt_token_ids": ids}, wanted)
            open_ids.add(number)
        began = process_time()
        outputs = engine.step()
        now += process_time() - began
        for output in outputs:
            number = int(output.request_id.split("-")[1])
            times[number].append(now)
            if output.num_cached_tokens is not None:
                cached.setdefault(number, output.num_cached_tokens)
            if output.finished:
                open_ids.discard(number)
    return {
        "first": [times[number][0] for number in sorted(times)],
        "last": [times[number][-1] for number in sorted(times)],
        "cached": sum(cached.values()),
        "preemptions": preemptions(engine) - before,
    }


def preemptions(engine: Any) -> float:
    """How often a sequence has lost its KV cache so far."""
    return float(sum(m.value for m in engine.get_metrics() if m.name == "vllm:num_preemptions"))


if __name__ == "__main__":
    main()
