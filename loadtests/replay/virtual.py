"""The same requests before the same units in virtual time: what no process, socket or clock disturbs.

Where `gym leastconn` and HAProxy agree, the replay measures routers and not itself.
"""

from dataclasses import replace

from loadtests.gym import cells
from loadtests.gym.fleets import FLEETS
from loadtests.gym.nouns import Call
from loadtests.replay.client import Answer
from loadtests.replay.figures import Result, figures_of
from loadtests.replay.plays import Play

RIVALS = {"gym gate": cells.GATE, "gym leastconn": "leastconn", "gym oracle": "oracle"}
"""By the name under which each stands among the routers."""


def run_virtually(play: Play, router: str) -> Result:
    """The figures of one of `RIVALS`."""
    run = cells.run(FLEETS[play.fleet], play.requests, RIVALS[router], play.seed)
    answers = [_answer(call, run.calls[0].came_at) for call in run.calls]
    figures = replace(figures_of(answers, 0), per_unit=run.per_unit)
    return Result(play.cell, router, play.seed, figures, answers)


def _answer(call: Call, begins_at: float) -> Answer:
    """Who answered is not kept for each."""
    request, sequence = call.request, call.sequence
    return Answer(
        due_s=call.came_at - begins_at,
        late_s=0.0,
        ttft_s=call.first_at - call.came_at,
        e2e_s=call.ended_at - call.came_at,
        prompt_tokens=request.prompt.tokens,
        answer_tokens=request.answer_tokens,
        cached_tokens=max(sequence.cached_tokens, 0) if sequence is not None else 0,
        unit="",
        trouble=call.refused,
        is_refused=bool(call.refused),
    )
