"""Locust's users of an OpenAI-compatible API: `locust -f loadtests/locustfile.py --host http://127.0.0.1:8000`.

A class for each mix; `--config-users` changes their weights. TTFT, ITL, TPOT, E2E, tokens/s and goodput are
Locust events; the summary comes at the end. What must stay true: every request gets exactly one record.
"""

import argparse
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import gevent  # type: ignore[import-untyped]
from locust import User, constant, events, task
from locust.env import Environment
from locust.user.task import LOCUST_STATE_STOPPING

from loadtests.drill.answers import Answer, End
from loadtests.drill.asking import Client
from loadtests.drill.mixes import Request
from loadtests.drill.records import Record, Writer, read
from loadtests.drill.summary import Goal, Summary

RETRY_S = 0.5
"""Who was not answered asks again after this; a refusal must not become a busy loop."""

HONEST = (End.WHOLE, End.HONEST, End.REFUSED)
_numbers = itertools.count()


class _Run:
    """What belongs to one run, from Locust's `test_start` to its `test_stop`."""

    writer: Writer
    bursts: gevent.Greenlet | None = None


_run = _Run()


class MixUser(User):
    """Asks, reads the answer, and asks again. `mix` names the kind of its requests."""

    abstract = True
    mix = ""
    wait_time = constant(0)

    def on_start(self) -> None:
        """Draw from a seed of its own: the same requests in every run."""
        self._rng = random.Random(f"{self.mix} {next(_numbers)}")
        self._client = client_of(self.environment)

    def stop(self, force: bool = False) -> bool:
        """Only between two requests. Locust kills whoever pauses, and that may be a moment too late: the user
        has just begun to ask.
        """
        if force or self._state is None:
            return bool(super().stop(force))
        self._state = LOCUST_STATE_STOPPING
        return False

    @task
    def ask(self) -> None:
        """One request."""
        if ask(self.environment, self._client, self.mix, self._rng) is not End.WHOLE:
            gevent.sleep(RETRY_S)


class ShortChatUser(MixUser):
    """A short question, a short answer."""

    mix, weight = "short-chat", 6


class RagUser(MixUser):
    """A question about a long document that others ask about, too."""

    mix, weight = "rag", 2


class LongGenerationUser(MixUser):
    """A short question, a long answer."""

    mix, weight = "long-generation", 2


class BatchUser(MixUser):
    """Completions in one piece."""

    mix, weight = "batch", 1


class EmbeddingsUser(MixUser):
    """Vectors. They come at once, so that without a pause there would be hardly anything else."""

    mix, weight = "embeddings", 1
    wait_time = constant(0.5)


class Stream48User(MixUser):
    """Streams of 48 tokens, for units that are slow."""

    mix, weight = "stream-48", int("Stream48User" in sys.argv)  # Only who is named takes part.


class LongPromptUser(MixUser):
    """100k tokens at once."""

    mix, weight = "long-prompt", int("LongPromptUser" in sys.argv)


def client_of(environment: Environment) -> Client:
    """A client of what `--host` names."""
    options = _options(environment)
    return Client(environment.host or "http://127.0.0.1:8000", options.model, options.hang_s)


def ask(environment: Environment, client: Client, mix: str, rng: random.Random) -> End:
    """Ask once, leave the record and the events."""
    options = _options(environment)
    request = Request.draw(mix, rng, known=options.texts == "known")
    answer = Answer(request)
    _run.writer.begin()
    try:
        client.ask(answer)
    finally:
        record = Record.of(answer)
        _run.writer.write(record)
    _fire(environment, record, Goal(options.goal_ttft_s, options.goal_tpot_s))
    return record.end


def _options(environment: Environment) -> argparse.Namespace:
    options = environment.parsed_options
    assert isinstance(options, argparse.Namespace)
    return options


def _fire(environment: Environment, record: Record, goal: Goal) -> None:
    request: Any = environment.events.request

    def fire(kind: str, value: float, exception: Exception | None = None) -> None:
        request.fire(
            request_type=kind,
            name=record.mix,
            response_time=value,
            response_length=record.tokens,
            exception=exception,
            context={},
        )

    bad = None if record.end is End.WHOLE else RuntimeError(f"{record.end}: {record.why}")
    fire("E2E ms", 1000 * record.e2e_s, bad)
    if record.gaps_s and record.ttft_s is not None and record.tpot_s is not None:
        fire("TTFT ms", 1000 * record.ttft_s)
        fire("TPOT ms", 1000 * record.tpot_s)
        fire("tokens/s", record.tokens / record.e2e_s)
        for gap_s in record.gaps_s:
            fire("ITL ms", 1000 * gap_s)
    if goal.met_by(record):
        fire("goodput", 1000 * record.e2e_s)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="sim", help="the model's name")
    parser.add_argument("--texts", default="known", help="known: of simulated units; unknown: of any other")
    parser.add_argument("--records", default="requests.jsonl", help="where each request is written")
    parser.add_argument(
        "--hang-s", type=float, default=10.5, help="a stream without a byte for so long hangs"
    )
    parser.add_argument("--goal-ttft-s", type=float, default=2.0, help="what goodput counts")
    parser.add_argument("--goal-tpot-s", type=float, default=0.1, help="what goodput counts")
    parser.add_argument("--burst-every-s", type=float, default=0.0, help="0: no bursts")
    parser.add_argument("--burst-requests", type=int, default=100, help="short chats in the same instant")


def _open(environment: Environment, **_: Any) -> None:
    options = _options(environment)
    _run.writer = Writer(Path(options.records))
    _run.bursts = gevent.spawn(_burst, environment) if options.burst_every_s else None


def _burst(environment: Environment) -> None:
    """Many at once, again and again; ends when all of the last ones have been answered."""
    options, group = _options(environment), []
    while environment.runner is not None and environment.runner.state not in ("stopping", "stopped"):
        group = [gevent.spawn(_one_of_burst, environment) for _ in range(options.burst_requests)]
        gevent.sleep(options.burst_every_s)
    gevent.joinall(group)


def _one_of_burst(environment: Environment) -> None:
    client = client_of(environment)
    ask(environment, client, "short-chat", random.Random(f"burst {next(_numbers)}"))
    client.close()


def _close(**_: Any) -> None:
    if _run.bursts is not None:
        _run.bursts.join()
    _run.writer.close()


def _sum_up(environment: Environment, **_: Any) -> None:
    options = _options(environment)
    goal = Goal(options.goal_ttft_s, options.goal_tpot_s)
    summary = Summary(read(Path(options.records)), goal)
    print(*summary.lines(), sep="\n", flush=True)
    bad = sum(count for end, count in summary.ends().items() if end not in HONEST)
    environment.process_exit_code = 1 if bad else 0


_hooks: Any = events
_hooks.init_command_line_parser.add_listener(_add_options)
_hooks.test_start.add_listener(_open)
_hooks.test_stop.add_listener(_close)
_hooks.quitting.add_listener(_sum_up)
