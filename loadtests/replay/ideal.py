"""Least connections without a router: the same engines in virtual time alone. Exact, and the same every time.

It says what HAProxy's leastconn comes to if nothing costs time on the way: where the two agree, the replay
measures routers and not itself.
"""

from collections.abc import Sequence as Items

from loadtests.replay.client import Answer
from loadtests.replay.engine import Engine, Model, Output, Sequence, block_names
from loadtests.replay.trace import Request


def least_connections(requests: Items[Request], scale: float, models: Items[Model]) -> list[Answer]:
    """The answers when each request goes to the unit with the fewest, in turn where there are several."""
    units = [_Unit(f"unit-{index}", model) for index, model in enumerate(models)]
    by_turn = list(units)
    for request in requests:
        now = request.at_s / scale
        for unit in units:
            unit.advance(now)
        chosen = min(by_turn, key=_Unit.open_requests)
        by_turn.remove(chosen)
        by_turn.append(chosen)
        chosen.add(request, now)
    for unit in units:
        unit.advance(float("inf"))
    return sorted((answer for unit in units for answer in unit.answers), key=lambda each: each.due_s)


class _Unit:
    """One engine and what it has answered."""

    def __init__(self, name: str, model: Model) -> None:
        self.answers: list[Answer] = []
        self._name = name
        self._engine = Engine(model)
        self._asked: dict[Sequence, float] = {}
        self._first_s: dict[Sequence, float] = {}

    def open_requests(self) -> int:
        return len(self._asked)

    def add(self, request: Request, now: float) -> None:
        names = block_names(request.prompt().encode())
        sequence = Sequence(request.prompt_tokens, request.answer_tokens, names)
        self._asked[sequence] = now
        self._engine.add(sequence, now)

    def advance(self, now: float) -> None:
        for output in self._engine.advance(now):
            self._first_s.setdefault(output.sequence, output.at)
            if output.is_last:
                self._end(output)

    def _end(self, output: Output) -> None:
        sequence = output.sequence
        due_s = self._asked.pop(sequence)
        self.answers.append(
            Answer(
                due_s=due_s,
                late_s=0.0,
                ttft_s=self._first_s.pop(sequence) - due_s,
                e2e_s=output.at - due_s,
                prompt_tokens=sequence.prompt_tokens,
                answer_tokens=sequence.answer_tokens,
                cached_tokens=sequence.cached_tokens,
                unit=self._name,
            )
        )
