"""Locust's users of an OpenAI-compatible API: `locust -f loadtests/locustfile.py --host http://127.0.0.1:8000`.

A class for each mix; `--config-users` changes their weights. Locust's requests are whole ones, from sending
to the last byte; first tokens, gaps, tokens a second and failovers are a part of its page, and of `make
load`'s report. What must stay true: every request gets exactly one record.
"""

import argparse
import itertools
import os
import random
import sys
from pathlib import Path
from typing import Any

if __package__ is None or __package__ == "":  # Locust runs a file, from whichever folder one is in.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gevent  # type: ignore[import-untyped]
from locust import User, constant, events, task
from locust.env import Environment
from locust.user.task import LOCUST_STATE_STOPPING

from loadtests.datasets import nouns as datasets
from loadtests.datasets.reading import read as read_dataset
from loadtests.drill.answers import Answer, End
from loadtests.drill.asking import Client
from loadtests.drill.mixes import Request
from loadtests.drill.records import Record, Writer, read
from loadtests.drill.summary import Goal, Summary
from loadtests.load import live, target

DATASET_MOST = 20_000
"""Requests of a file that are kept."""
RETRY_S = 0.5
"""Who was not answered asks again after this; a refusal must not become a busy loop."""

SEEN_TO_END = (End.WHOLE, End.ERROR_EVENT, End.REFUSED)
_numbers, _asked = itertools.count(), itertools.count()


class _Run:
    """What belongs to one run, from Locust's `test_start` to its `test_stop`."""

    writer: Writer
    bursts: gevent.Greenlet | None = None
    model = ""
    failovers_before: int | None = None
    dataset: tuple[datasets.Request, ...] = ()
    live = live.Live()


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
        if ask(self.environment, self._client, self.draw()) is not End.WHOLE:
            gevent.sleep(RETRY_S)

    def draw(self) -> Request:
        """What to ask next."""
        return Request.draw(self.mix, self._rng, known=_options(self.environment).texts == "known")


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


def _named(name: str) -> int:
    """The weight of a class that takes part only when it is named."""
    return int(name in sys.argv)


class Stream48User(MixUser):
    """Streams of 48 tokens, for units that are slow."""

    mix, weight = "stream-48", _named("Stream48User")


class LongPromptUser(MixUser):
    """100k tokens at once."""

    mix, weight = "long-prompt", _named("LongPromptUser")


class PrefillHeavyUser(MixUser):
    """Long prompts, short answers."""

    mix, weight = "prefill-heavy", _named("PrefillHeavyUser")


class DecodeHeavyUser(MixUser):
    """Short prompts, long answers."""

    mix, weight = "decode-heavy", _named("DecodeHeavyUser")


class ChatUser(MixUser):
    """Prompts and answers of many lengths."""

    mix, weight = "chat", _named("ChatUser")


class DatasetUser(MixUser):
    """Asks what `--dataset` holds, in its order; all such users together, and from its start again."""

    mix, weight = "chat", _named("DatasetUser")

    def draw(self) -> Request:
        """The next one of the file."""
        found = _run.dataset[next(_asked) % len(_run.dataset)]
        return Request.of(found, self._rng, known=_options(self.environment).texts == "known")


def client_of(environment: Environment) -> Client:
    """A client of what `--host` names."""
    options = _options(environment)
    return Client(_host(environment), _run.model, options.hang_s, options.api_key)


def ask(environment: Environment, client: Client, request: Request) -> End:
    """Ask once, leave the record and the event."""
    answer = Answer(request)
    _run.writer.begin()
    try:
        client.ask(answer)
    finally:
        record = Record.of(answer)
        _run.writer.write(record)
        _run.live.take(record)
    _fire(environment, record)
    return record.end


def _host(environment: Environment) -> str:
    return environment.host or "http://127.0.0.1:8000"


def _options(environment: Environment) -> argparse.Namespace:
    options = environment.parsed_options
    assert isinstance(options, argparse.Namespace)
    return options


def _fire(environment: Environment, record: Record) -> None:
    """Tell Locust of a request, the only kind that it knows of."""
    bad = None if record.end is End.WHOLE else RuntimeError(f"{record.end}: {record.why}")
    request: Any = environment.events.request
    request.fire(
        request_type="whole answer",
        name=record.mix,
        response_time=1000 * record.e2e_s,
        response_length=record.tokens,
        exception=bad,
        context={},
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", help="the model's name; without it the first of /v1/models")
    key = os.environ.get("OPENAI_API_KEY", "")
    parser.add_argument("--api-key", default=key, help="sent as a bearer token; default: $OPENAI_API_KEY")
    parser.add_argument("--admin", default="", help="URL of the gate's admin port, to count failovers")
    parser.add_argument("--dataset", default="", help="what DatasetUser asks: a file of requests")
    parser.add_argument("--max-prompt-tokens", type=int, default=8000, help="longer ones are left out")
    parser.add_argument("--texts", default="unknown", help="known: of simulated units; unknown: of any other")
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
    try:
        _run.model = options.model or target.first_model(_host(environment), options.api_key)
        if options.dataset:
            most = options.max_prompt_tokens
            _run.dataset = tuple(read_dataset(Path(options.dataset), requests=DATASET_MOST, max_tokens=most))
    except (target.TargetError, datasets.DatasetError) as error:
        # Locust only logs other exceptions of a listener, and its users would go on without a model.
        raise SystemExit(str(error)) from None
    _run.failovers_before = target.failovers(options.admin)
    _run.live.clear()
    _run.live.goal = Goal(options.goal_ttft_s, options.goal_tpot_s)
    _run.writer = Writer(Path(options.records))
    _run.bursts = gevent.spawn(_burst, environment) if options.burst_every_s else None


def _add_page(environment: Environment, **_: Any) -> None:
    """The part of Locust's page that tells of tokens."""

    def html() -> str:
        runner = environment.runner
        now = target.failovers(_options(environment).admin)
        before = _run.failovers_before
        moved = None if now is None or before is None else now - before
        return _run.live.html(runner.user_count if runner is not None else 0, moved)

    if environment.web_ui is not None:
        live.add_to(environment.web_ui.app, html)


def _burst(environment: Environment) -> None:
    """Many at once, again and again; ends when all of the last ones have been answered."""
    options, group = _options(environment), []
    while environment.runner is not None and environment.runner.state not in ("stopping", "stopped"):
        group = [gevent.spawn(_one_of_burst, environment) for _ in range(options.burst_requests)]
        gevent.sleep(options.burst_every_s)
    gevent.joinall(group)


def _one_of_burst(environment: Environment) -> None:
    client = client_of(environment)
    known = _options(environment).texts == "known"
    ask(
        environment, client, Request.draw("short-chat", random.Random(f"burst {next(_numbers)}"), known=known)
    )
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
    bad = sum(count for end, count in summary.ends().items() if end not in SEEN_TO_END)
    environment.process_exit_code = 1 if bad else 0


_hooks: Any = events
_hooks.init_command_line_parser.add_listener(_add_options)
_hooks.init.add_listener(_add_page)
_hooks.test_start.add_listener(_open)
_hooks.test_stop.add_listener(_close)
_hooks.quitting.add_listener(_sum_up)
