"""The load: Locust as a process of its own, told what the drill's file says."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtests.drill.plan import Drill
from loadtests.kit import processes

ROOT = Path(__file__).resolve().parents[2]
_START_S = 30.0
_STOP_TIMEOUT_S = 90
"""How long the last answers may take once the time is over."""


def user_class(mix: str) -> str:
    """The class of a mix in the locustfile."""
    return "".join(part.capitalize() for part in mix.split("-")) + "User"


def command(drill: Drill, url: str, folder: Path) -> list[str]:
    """Locust's command line."""
    load, topology = drill.load, drill.topology
    is_simulated = topology.engine == "simulated" and not topology.has_own_workers()
    weights = [json.dumps({"user_class_name": user_class(m), "weight": w}) for m, w in load.mix.items()]
    flags = {
        "--host": url,
        "--users": load.streams,
        "--spawn-rate": load.streams,
        "--run-time": f"{load.seconds:.0f}s",
        "--stop-timeout": _STOP_TIMEOUT_S,
        "--html": folder / "locust.html",
        "--records": folder / "requests.jsonl",
        "--model": "tiny" if topology.engine == "vllm" else "sim",
        "--texts": "known" if is_simulated else "unknown",
        "--hang-s": load.hang_s,
        "--goal-ttft-s": load.goal.ttft_s,
        "--goal-tpot-s": load.goal.tpot_s,
    }
    if load.bursts:
        flags |= {"--burst-every-s": load.bursts.every_s, "--burst-requests": load.bursts.requests}
    options = [str(part) for flag in flags.items() for part in flag]
    program = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtests" / "locustfile.py")]
    users = ["--config-users", *weights, "--headless", "--only-summary"]
    return [*program, *options, *users, *map(user_class, load.mix)]


@contextmanager
def running(drill: Drill, url: str, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Locust, from the moment at which its users begin; ended with the block, if it has not ended by then."""
    log, records = folder / "locust.log", folder / "requests.jsonl"
    process = processes.start(command(drill, url, folder), log)
    try:
        give_up_at = time.monotonic() + _START_S
        while not records.exists():
            if process.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError(f"Locust did not start; it printed:\n{processes.tail(log)}")
            time.sleep(0.02)
        yield process
    finally:
        if process.poll() is None:
            processes.stop(process)
