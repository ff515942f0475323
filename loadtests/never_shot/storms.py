"""What looks like trouble and is none: phases of load that a gate must not take for a sick unit.

What must stay true: each phase checks that it was what its name says, and puts it into `Place.bad` if not.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from loadtests.kit.gate import GateProcess
from loadtests.kit.questions import HANG_S, Answer, End, Question, ask
from loadtests.simunit.process import SimUnit
from loadtests.wire.client import Connections
from loadtests.wire.messages import post
from loadtests.wire.raw import dial
from loadtests.wire.reply import Reply

BURST = 150
BURST_EVERY_S = 5.0
LONG_TOKENS = 100_000
LONG_AT_ONCE = 2
QUEUE = 4
"""Requests that may wait at a unit while its queue is full."""

LATE_S = 5.0
BAD_PER_S = 100
SLOW_CLIENTS = 32
SLOW_BYTES_PER_S = 1000


@dataclass(frozen=True, slots=True)
class Place:
    """Where it happens. `bad`: what a phase did not see as it should have."""

    gate: GateProcess
    units: Sequence[SimUnit]
    bad: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.bad.append(otherwise)


@dataclass(frozen=True, slots=True)
class Phase:
    """`run` keeps it up for so many seconds and says what came of it."""

    name: str
    run: Callable[[Place, float], Awaitable[str]]


async def bursts(place: Place, seconds: float) -> str:
    """Many requests in the same instant, again and again."""
    rng, answers = random.Random(1), list[Answer]()
    over_at = time.monotonic() + seconds
    async with Connections(place.gate.url) as gate, asyncio.TaskGroup() as group:
        while time.monotonic() < over_at:
            for _ in range(BURST):
                question = Question.draw(rng, prompt_tokens=rng.randint(50, 500), max_tokens=8)
                answers.append(answer := Answer(question))
                group.create_task(ask(gate, answer))
            await asyncio.sleep(BURST_EVERY_S)
    return _told(place, "bursts", answers)


async def long_prompts(place: Place, seconds: float) -> str:
    """Prompts of 100k tokens, a few at a time, one after the other."""
    answers: list[Answer] = []
    over_at = time.monotonic() + seconds

    async def use(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < over_at:
            question = Question.draw(rng, prompt_tokens=LONG_TOKENS, max_tokens=4)
            answers.append(answer := Answer(question))
            await ask(gate, answer)

    async with Connections(place.gate.url) as gate:
        await asyncio.gather(*(use(seed) for seed in range(LONG_AT_ONCE)))
    return _told(place, "long prompts", answers)


async def queues_full(place: Place, seconds: float) -> str:
    """One unit refuses with 503 and the other with 429, since their queues are kept full."""
    for unit, status in zip(place.units, (503, 429), strict=True):
        await asyncio.to_thread(unit.fault, "full_queue", waiting=QUEUE, status=status)
    rng, answers = random.Random(2), list[Answer]()
    over_at = time.monotonic() + seconds
    async with Connections(place.gate.url) as gate, asyncio.TaskGroup() as group:
        while time.monotonic() < over_at:
            for _ in range(BURST // 5):
                question = Question.draw(rng, prompt_tokens=rng.randint(500, 2500), max_tokens=8)
                answers.append(answer := Answer(question))
                group.create_task(ask(gate, answer))
            await asyncio.sleep(0.5)
    statuses = Counter(answer.status for answer in answers)
    refused = statuses[429] + statuses[503]
    place.expect(refused > 0, f"queues full: nobody was refused, {statuses}")
    return f"{refused} of {len(answers)} more refused ({dict(statuses)})"


async def late_probes(place: Place, seconds: float) -> str:
    """What probes ask is answered after 5 s; generation goes on."""
    for unit in place.units:
        await asyncio.to_thread(unit.fault, "late_probes", seconds=LATE_S)
    await asyncio.sleep(seconds)
    return f"/health, /metrics and /v1/models took {LATE_S:.0f} s"


async def storm_of_400(place: Place, seconds: float) -> str:
    """Requests that the units refuse as nonsense, a hundred a second."""
    statuses: Counter[int] = Counter()
    over_at = time.monotonic() + seconds
    body = b'{"messages": [{"role": "user", "content": "?"}], "max_tokens": -1}'

    async def send() -> None:
        await gate.exchange(post(body), reply := Reply(), silence_s=HANG_S)
        statuses[reply.status] += 1

    async with Connections(place.gate.url) as gate, asyncio.TaskGroup() as group:
        while time.monotonic() < over_at:
            group.create_task(send())
            await asyncio.sleep(1 / BAD_PER_S)
    place.expect(set(statuses) == {400}, f"400-storm: statuses {dict(statuses)}")
    return f"{statuses.total()} more, statuses {dict(statuses)}"


async def slow_clients(place: Place, seconds: float) -> str:
    """Clients that read a kilobyte a second of what comes at twenty."""
    question = Question.draw(random.Random(3), prompt_tokens=50, max_tokens=2000)
    read = await asyncio.gather(*(_read_slowly(place, question, seconds) for _ in range(SLOW_CLIENTS)))
    place.expect(min(read) > 0, "slow clients: one was answered nothing")
    return f"{len(read)} more read {min(read)} to {max(read)} bytes each"


async def _read_slowly(place: Place, question: Question, seconds: float) -> int:
    count, over_at = 0, time.monotonic() + seconds
    with await asyncio.to_thread(dial, place.gate.port, post(question.body())) as sock:
        while time.monotonic() < over_at:
            with suppress(BlockingIOError):
                count += len(sock.recv(SLOW_BYTES_PER_S // 4))
            await asyncio.sleep(0.25)
    return count


def _told(place: Place, name: str, answers: Sequence[Answer]) -> str:
    """What became of the requests of a phase: each answered whole, or refused for lack of room."""
    whole = sum(answer.end() is End.WHOLE for answer in answers)
    refused = sum(answer.status in (429, 503) for answer in answers)
    rest = [a for a in answers if a.end() is not End.WHOLE and a.status not in (429, 503)]
    place.bad.extend(f"{name}: {answer.why()}" for answer in rest[:3])
    place.expect(whole > 0, f"{name}: none was answered")
    return f"{whole} of {len(answers)} more answered whole, {refused} refused"


PHASES = (
    Phase("bursts", bursts),
    Phase("long prompts", long_prompts),
    Phase("queues full", queues_full),
    Phase("late probes", late_probes),
    Phase("400-storm", storm_of_400),
    Phase("slow clients", slow_clients),
)
