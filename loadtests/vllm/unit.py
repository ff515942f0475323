"""One real unit: the leader that serves the API and the headless follower that computes with it.

Each is a process group of its own, as it would be a machine of its own; all traffic stays on loopback.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from loadtests.kit.processes import free_port
from loadtests.vllm import processes
from loadtests.vllm.install import MODEL, RUN, VENV
from loadtests.wire.blocking import answers

HOST = "127.0.0.1"
MODEL_NAME = "tiny"
HEALTH_TIMEOUT_S = 2.0
WARM_UP_TIMEOUT_S = 120.0
TITLES = {"VLLM::EngineCore": "engine", "VLLM::Worker": "worker"}  # What vLLM's processes call themselves.

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, for each of the two workers.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # Else each unit claims the same first cores.
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": HOST,
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True, slots=True)
class Unit:
    """A started unit. `leader` and `follower` are the pids that were started; vLLM starts more below them."""

    port: int
    leader: int
    follower: int

    @property
    def name(self) -> str:
        """The name that its logs carry too."""
        return f"unit-{self.port}"

    @property
    def url(self) -> str:
        """The base URL of the leader's API."""
        return f"http://{HOST}:{self.port}"

    def pids(self) -> dict[str, int]:
        """Return the pid of each role that is alive: five in a unit that is whole."""
        sides = (("leader", self.leader), ("follower", self.follower))
        return {
            role: process.pid
            for side, group in sides
            for process in processes.living({group})
            if (role := _role(side, process))
        }

    def lost(self) -> list[str]:
        """Return which of the two started processes have ended."""
        alive = self.pids()
        return [role for role in ("leader", "follower") if role not in alive]

    def healthy(self) -> bool:
        """Say whether `/health` answers 200: the API is up, which does not mean that it can generate."""
        return answers(f"{self.url}/health", silence_s=HEALTH_TIMEOUT_S)

    def warmed_up(self) -> bool:
        """Say whether a chat for one token, then a greedy one for several, is answered. Slow at first."""
        chat = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Are you there?"}]}
        bodies = (chat | {"max_tokens": 1}, chat | {"max_tokens": 8, "temperature": 0})
        url = f"{self.url}/v1/chat/completions"
        return all(answers(url, orjson.dumps(body), silence_s=WARM_UP_TIMEOUT_S) for body in bodies)


def start(port: int, options: Sequence[str] = ()) -> Unit:
    """Start the leader, with its API on `port`, and the follower; where they meet is new each time.

    Both get `options` besides.
    """
    common = ["-tp", "2", "--nnodes", "2", "--master-addr", HOST, "--master-port", str(free_port())]
    common += ["--distributed-executor-backend", "mp", "--max-model-len", "4096", "--enforce-eager", *options]
    leader = ["--node-rank", "0", "--host", HOST, "--port", str(port)]
    follower = ["--node-rank", "1", "--headless"]
    return Unit(
        port=port,
        leader=_serve(log_of(port, "leader"), [*common, *leader]),
        follower=_serve(log_of(port, "follower"), [*common, *follower]),
    )


def log_of(port: int, role: str) -> Path:
    """Return where the leader or the follower of the unit on `port` writes."""
    return RUN / f"unit-{port}-{role}.log"


def _role(side: str, process: processes.Process) -> str | None:
    """Return what this process is to its unit; None for vLLM's small helpers."""
    if process.pid == process.group:
        return side
    roles = (f"{side}_{role}" for title, role in TITLES.items() if process.title.startswith(title))
    return next(roles, None)


def _serve(log: Path, options: list[str]) -> int:
    """Start `vllm serve` in a session of its own and return its pid."""
    command = [str(VENV / "bin" / "vllm"), "serve", str(MODEL), "--served-model-name", MODEL_NAME, *options]
    # Not subprocess.Popen: a garbage-collected one reaps its child, which processes.py forbids.
    return os.posix_spawn(
        command[0],
        command,
        os.environ | ENVIRONMENT,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
