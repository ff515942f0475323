"""Loads of sessions: what somebody asks next begins with what was said before, and comes when it was read."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

from loadtests.gym.nouns import Request
from loadtests.gym.prompts import Text
from loadtests.gym.shapes import byte_rate, exponential, lognormal, poisson


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions of `turns` requests, that begin with one of `systems` texts. Each turn adds `added` tokens to
    what was said before, gets `answer_tokens` on average, and comes `pause_s` after the answer before.

    `keeps`: the share of the turns in which all that was said is kept; else the session goes on from its
    first prompt (an editor whose file has changed near its beginning, an agent that forgets). `roams`: each
    turn may come to another gate, as behind a balancer that chooses one for each request.
    """

    systems: int = 1
    system_tokens: tuple[int, int] = (1000, 1000)
    turns: tuple[int, int] = (2, 8)
    first: tuple[int, int] = (50, 400)
    added: tuple[int, int] = (30, 200)
    answer_tokens: float = 250.0
    answer_most: float = 2000.0
    pause_s: tuple[float, float] = (1.0, 6.0)
    keeps: float = 1.0
    roams: bool = False
    most_tokens: int = 60_000
    more: float = 2.5
    """So many times as many requests are needed until as many sessions end as begin."""

    def make(self, rng: random.Random, rate: float, requests: int) -> list[Request]:
        nothing, made, number = Text(), [], 0
        systems = [nothing.extend(rng.randint(*self.system_tokens)) for _ in range(self.systems)]
        begins = poisson(rng, rate / (sum(self.turns) / 2.0))
        while number < requests:
            session = self._session(rng, rng.choice(systems), next(begins), number, requests - number)
            made.append(session[0])
            number += len(session)
        return made

    def _session(self, rng: random.Random, system: Text, at: float, number: int, most: int) -> list[Request]:
        bytes_per_token, chance = byte_rate(rng), rng.random()
        begin = system.extend(rng.randint(*self.first), bytes_per_token)
        prompt, turns = begin, list[Request]()
        for turn in range(min(rng.randint(*self.turns), most)):
            answer = exponential(rng, self.answer_tokens, self.answer_most)
            context = prompt.extend(answer, bytes_per_token)
            wait_s = rng.uniform(*self.pause_s) if turn else at
            # A client keeps its connection, and so its gate.
            chance = rng.random() if self.roams else chance
            turns.append(Request(number + turn, wait_s, prompt, context, session=f"s{number}", chance=chance))
            said = context if rng.random() < self.keeps else begin
            prompt = said.extend(rng.randint(*self.added), bytes_per_token)
            if prompt.tokens > self.most_tokens:
                break
        for before, after in pairwise(turns):
            before.then = after
        return turns


@dataclass(frozen=True, slots=True)
class CodingAgents(Sessions):
    """Agents that write programs: a median of 43 turns, each with the result of a tool, seconds to minutes
    after the answer before. Beyond `most_tokens` a session is compacted to its system text and a summary.

    In `nests` of them sub-agents begin meanwhile, with the same system text and then a task of their own.
    """

    systems: int = 3
    system_tokens: tuple[int, int] = (10_000, 20_000)
    answer_tokens: float = 220.0
    most_tokens: int = 142_000
    summary: tuple[int, int] = (4000, 10_000)
    nests: float = 0.44

    def make(self, rng: random.Random, rate: float, requests: int) -> list[Request]:
        nothing, made, number = Text(), [], 0
        systems = [nothing.extend(rng.randint(*self.system_tokens)) for _ in range(self.systems)]
        # A session has some 60 turns, its sub-agents 10.
        begins = poisson(rng, rate / 70.0)
        while number < requests:
            system, at = rng.choice(systems), next(begins)
            turns = lognormal(rng, 43.0, 60.0, 200.0)
            sizes = [(at, turns)]
            if rng.random() < self.nests:
                sizes += [
                    (at + rng.uniform(0.0, 8.0 * turns), rng.randint(5, 15)) for _ in range(rng.randint(1, 4))
                ]
            root = f"s{number}"
            for begin, count in sizes:
                if number < requests:
                    made.append(self.agent(rng, system, begin, number, min(count, requests - number), root))
                    number += min(count, requests - number)
        return made

    def agent(
        self, rng: random.Random, system: Text, at: float, number: int, turns: int, root: str
    ) -> Request:
        """The first request of one agent, from which the others follow."""
        bytes_per_token, chance = byte_rate(rng), rng.random()
        prompt = system.extend(lognormal(rng, 800.0, 2000.0, 10_000.0), bytes_per_token)
        made: list[Request] = []
        for turn in range(turns):
            context = prompt.extend(exponential(rng, self.answer_tokens, self.answer_most), bytes_per_token)
            wait_s = min(rng.lognormvariate(1.2, 1.3), 180.0) if turn else at
            session = f"s{number}"
            made.append(
                Request(number + turn, wait_s, prompt, context, session=session, root=root, chance=chance)
            )
            if context.tokens > self.most_tokens:
                context = system.extend(rng.randint(*self.summary), bytes_per_token)
            prompt = context.extend(lognormal(rng, 1200.0, 2400.0, 16_000.0), bytes_per_token)
        for before, after in pairwise(made):
            before.then = after
        return made[0]
