"""Workloads with more and more users, one after the other, and a report in HTML.

    python -m loadtests.load --host http://gate:8000 --admin http://gate:9901 --api-key KEY
    python -m loadtests.load --host http://gate:8000 --workloads chat --users 10,20 --seconds 60
    python -m loadtests.load --host http://gate:8000 --dataset ShareGPT.json

Each step is a run of Locust, in a closed loop: a user asks again when its answer has come. The exit code is 1
when a request had no whole answer, 2 when the API cannot be asked.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from loadtests.datasets.nouns import DatasetError
from loadtests.datasets.reading import read as read_dataset
from loadtests.drill.load import ROOT, user_class
from loadtests.drill.records import UnfinishedError, read
from loadtests.drill.summary import Goal, Summary, percentile
from loadtests.kit import progress
from loadtests.kit.report import columns, machine
from loadtests.load import target
from loadtests.load.figures import LoadStep
from loadtests.load.report import report, seconds
from loadtests.load.seen import watched

WORKLOADS = ("prefill-heavy", "decode-heavy", "chat")
USERS = (50, 100, 200)
STOP_S = 120
"""How long the last answers of a step may take."""


@progress.shown("load")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run all steps, print a table, leave the report. Returns the exit code."""
    args = _arguments(arguments)
    if find_spec("locust") is None:
        print("locust is not installed; type:  make check", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    began_at = time.time()
    try:
        args.model = args.model or target.first_model(args.host, args.api_key)
        if args.dataset:
            read_dataset(args.dataset, requests=1, max_tokens=args.max_prompt_tokens)
        steps = [_step(args, workload, users) for workload, users in product(args.workloads, args.users)]
    except (target.TargetError, DatasetError, UnfinishedError) as error:
        print(error, file=sys.stderr)
        return 2
    print(as_text(steps))
    page = args.out / "report.html"
    page.write_text(report(_facts(args, began_at), steps))
    print(f"\n{page}")
    return 1 if any(step.failed for step in steps) else 0


def as_text(steps: Sequence[LoadStep]) -> str:
    """The steps as a table."""
    head = ["workload", "users", "requests", "failed", "requests/s", "tokens/s"]
    rows = [[*head, "first token, median", "95 %", "between tokens, 95 %", "failovers"]]
    for step in steps:
        times = step.times()
        first, gap = times["first token"], times["between tokens"]
        counts = [step.users, len(step.summary.records), step.failed]
        rates = [f"{step.requests_per_s:.1f}", f"{step.tokens_per_s:.0f}"]
        shown = [seconds(percentile(*each)) for each in ((first, 0.5), (first, 0.95), (gap, 0.95))]
        moved = "-" if step.failovers is None else str(step.failovers)
        rows.append([step.workload, *map(str, counts), *rates, *shown, moved])
    return columns(rows, numbers=True)


def _step(args: argparse.Namespace, workload: str, users: int) -> LoadStep:
    """Run Locust once. Raises UnfinishedError."""
    progress.phase(f"{workload}, {users} users")
    folder = args.out / f"{workload}-{users}"
    folder.mkdir(exist_ok=True)
    # If Locust does not start, an earlier run must not speak for this one.
    (folder / "requests.jsonl").unlink(missing_ok=True)
    before = target.failovers(args.admin)
    with watched(args.admin) as seen, (folder / "locust.log").open("wb") as log:
        environment = os.environ | {"OPENAI_API_KEY": args.api_key}
        subprocess.run(_command(args, workload, users, folder), stdout=log, stderr=log, env=environment)
    after = target.failovers(args.admin)
    moved = None if before is None or after is None else after - before
    summary = Summary(read(folder / "requests.jsonl"), Goal(args.goal_ttft_s, args.goal_tpot_s))
    return LoadStep(workload, users, summary, moved, seen)


def _command(args: argparse.Namespace, workload: str, users: int, folder: Path) -> list[str]:
    # The key is not among them: other users of this machine can read a command line.
    flags = {
        "--host": args.host,
        "--users": users,
        "--spawn-rate": users,
        "--run-time": f"{args.seconds:.0f}s",
        "--stop-timeout": STOP_S,
        "--model": args.model,
        "--texts": args.texts,
        "--hang-s": args.hang_s,
        "--records": folder / "requests.jsonl",
        "--html": folder / "locust.html",
    }
    if workload == "dataset":
        flags |= {"--dataset": args.dataset, "--max-prompt-tokens": args.max_prompt_tokens}
    options = [str(part) for flag in flags.items() for part in flag]
    program = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtests" / "locustfile.py")]
    return [*program, *options, "--headless", "--only-summary", user_class(workload)]


def _facts(args: argparse.Namespace, began_at: float) -> dict[str, str]:
    facts = {
        "asked": args.host,
        "model": args.model,
        "on": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began_at)),
        "each step": f"{args.seconds:g} s",
        "objective": f"first token in {args.goal_ttft_s:g} s, {1000 * args.goal_tpot_s:g} ms a token",
        "asked from": machine(),
    }
    return facts | ({"dataset": args.dataset.name} if args.dataset else {})


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.load", description=__doc__)
    add = parser.add_argument
    add("--host", default="http://127.0.0.1:8000", help="URL of the API")
    add("--admin", default="", help="URL of the gate's admin port, to count failovers")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="default: $OPENAI_API_KEY")
    add("--model", default="", help="default: the first of /v1/models")
    add("--workloads", type=_names, default=None, metavar="NAME,NAME", help=f"default: {','.join(WORKLOADS)}")
    add("--users", type=_counts, default=list(USERS), metavar="N,N", help="how many at once, step by step")
    add("--seconds", type=float, default=30.0, help="of each step")
    add("--dataset", type=Path, help="ShareGPT, BurstGPT, Azure or Mooncake file to ask instead")
    add("--max-prompt-tokens", type=int, default=8000, help="longer prompts of a dataset are left out")
    add("--texts", choices=("unknown", "known"), default="unknown", help="known: of simulated units")
    add("--hang-s", type=float, default=60.0, help="a stream without a byte for so long has failed")
    add("--goal-ttft-s", type=float, default=2.0, help="what goodput counts")
    add("--goal-tpot-s", type=float, default=0.1, help="what goodput counts")
    add("--out", type=Path, default=ROOT / ".run" / "load", help="where the report goes")
    args = parser.parse_args(arguments)
    args.workloads = args.workloads or (["dataset"] if args.dataset else list(WORKLOADS))
    args.host, args.dataset = args.host.rstrip("/"), args.dataset and args.dataset.resolve()
    return args


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - {*WORKLOADS, "short-chat", "rag", "long-generation"}:
        raise argparse.ArgumentTypeError(
            f"unknown {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}"
        )
    return names


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",") if part.isdecimal()]
    if len(counts) != text.count(",") + 1 or not all(counts):
        raise argparse.ArgumentTypeError(f"has to be numbers from 1 on, such as 50,100; found {text!r}")
    return counts


if __name__ == "__main__":
    sys.exit(main())
