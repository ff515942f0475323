"""Real redis-servers that replace each other: a primary with a replica and Sentinels, or a Cluster."""

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from redis import Redis
from redis.exceptions import RedisError

from loadtests.kit.processes import free_port, start, stop
from loadtests.kit.waiting import wait_until

PRIMARY = "main"
"""The name under which Sentinels know the primary."""
DOWN_AFTER_MS = 500
"""Redis's own: how long a server is silent before it counts as down."""
_READY_S = 30.0
_LOOK_S = 0.005


class RedisNode:
    """One redis-server on a TCP port of this machine. Runs within its context."""

    def __init__(
        self, folder: Path, *options: str, program: str = "redis-server", password: str = ""
    ) -> None:
        self.port = free_port()
        self.password = password
        self._folder = folder / str(self.port)
        self._folder.mkdir()
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder), "--save", ""]
        self._command = [program, *words, *options]

    @property
    def place(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.process = start(self._command, self._folder / "log")
        if not wait_until(self.is_there, _READY_S, _LOOK_S):
            stop(self.process)
            raise RuntimeError(f"Redis did not start; it printed:\n{(self._folder / 'log').read_text()}")
        return self

    def __exit__(self, *_: object) -> None:
        stop(self.process)

    def kill(self) -> None:
        """As a crash does."""
        self.process.kill()
        self.process.wait()

    def do(self, *words: Any) -> Any:
        """The answer to a command. Raises redis-py's errors."""
        with Redis(port=self.port, socket_timeout=5.0, password=self.password or None) as client:
            return client.execute_command(*words)

    def is_there(self) -> bool:
        """Whether it answers."""
        with suppress(RedisError):
            return bool(self.do("PING"))
        return False


class SentinelNode(RedisNode):
    """A Sentinel that watches a primary; two of them agree that it is down."""

    def __init__(self, folder: Path, primary: RedisNode, *lines: str, password: str, program: str) -> None:
        super().__init__(folder, program=program, password=password)
        config = self._folder / "sentinel.conf"
        watch = [
            f"monitor {PRIMARY} 127.0.0.1 {primary.port} 2",
            f"down-after-milliseconds {PRIMARY} {DOWN_AFTER_MS}",
            f"failover-timeout {PRIMARY} 3000",
            *([f"auth-pass {PRIMARY} {primary.password}"] if primary.password else []),
        ]
        rows = [f"port {self.port}", "bind 127.0.0.1", *(f"sentinel {line}" for line in watch), *lines]
        config.write_text("\n".join([*rows, ""]))
        self._command = [program, str(config), "--sentinel"]

    def primary(self) -> str:
        """Where the primary is, as it says."""
        host, port = self.do("SENTINEL", "GET-MASTER-ADDR-BY-NAME", PRIMARY)
        return f"{host.decode()}:{port.decode()}"


class Sentinels:
    """A primary, a replica and three Sentinels. `sentinel_password`: what Sentinels want, if anything."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        *,
        password: str = "",
        sentinel_password: str = "",
        program: str = "redis-server",
    ) -> None:
        secret = ["--requirepass", password, "--masterauth", password] if password else []
        self.primary = stack.enter_context(RedisNode(folder, *secret, program=program, password=password))
        follows = ["--replicaof", "127.0.0.1", str(self.primary.port)]
        replica = RedisNode(folder, *secret, *follows, program=program, password=password)
        self.replica = stack.enter_context(replica)
        lines = [f"requirepass {sentinel_password}"] if sentinel_password else []
        self._sentinels = [
            stack.enter_context(
                SentinelNode(folder, self.primary, *lines, password=sentinel_password, program=program)
            )
            for _ in range(3)
        ]
        if not wait_until(self._is_whole, _READY_S, 0.1):
            raise RuntimeError("the Sentinels do not know each other and the replica")

    @property
    def url(self) -> str:
        """For gates."""
        return f"redis+sentinel://{','.join(each.place for each in self._sentinels)}/{PRIMARY}"

    def failed_over(self) -> bool:
        """Whether every Sentinel names another primary than the first one."""
        return all(each.primary() != self.primary.place for each in self._sentinels)

    def _is_whole(self) -> bool:
        return all(
            len(each.do("SENTINEL", what, PRIMARY)) >= count
            for each in self._sentinels
            for what, count in (("REPLICAS", 1), ("SENTINELS", 2))
        )


class Cluster:
    """Three primaries with a replica each."""

    def __init__(self, folder: Path, stack: ExitStack, program: str = "redis-server") -> None:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(DOWN_AFTER_MS))
        self.nodes = [
            stack.enter_context(
                RedisNode(folder, *options, "--cluster-port", str(free_port()), program=program)
            )
            for _ in range(6)
        ]
        places = [node.place for node in self.nodes]
        _cli("create", *places, "--cluster-replicas", "1")
        if not wait_until(self._is_whole, _READY_S, 0.1):
            raise RuntimeError("the nodes of the cluster do not all say that it is ok")

    @property
    def url(self) -> str:
        """For gates: the first two nodes are enough to find the others."""
        return f"redis+cluster://{','.join(node.place for node in self.nodes[:2])}"

    def move_slots(self, count: int) -> None:
        """From the second primary to the first, while both are in use."""
        to, from_ = (self._id(node) for node in self.nodes[:2])
        slots = ("--cluster-from", from_, "--cluster-to", to, "--cluster-slots", str(count))
        _cli("reshard", self.nodes[0].place, *slots)

    def serves_without(self, gone: RedisNode) -> bool:
        """Whether all other nodes say that another one has taken over its slots."""
        others = [node for node in self.nodes if node is not gone]
        return all(_is_ok(node) and gone.port not in _owners(node) for node in others)

    def _id(self, node: RedisNode) -> str:
        return str(node.do("CLUSTER", "MYID").decode())

    def _is_whole(self) -> bool:
        return all(_is_ok(node) and len(_rows(node)) == 3 for node in self.nodes) and all(
            len(row) > 3 for row in _rows(self.nodes[0])
        )


def _is_ok(node: RedisNode) -> bool:
    return b"cluster_state:ok" in node.do("CLUSTER", "INFO")


def _rows(node: RedisNode) -> list[Any]:
    found: list[Any] = node.do("CLUSTER", "SLOTS")
    return found


def _owners(node: RedisNode) -> set[int]:
    return {int(row[2][1]) for row in _rows(node)}


def _cli(order: str, *words: str) -> None:
    """`redis-cli --cluster`. Raises RuntimeError when it does not succeed."""
    command: Sequence[str] = ["redis-cli", "--cluster", order, *words, "--cluster-yes"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"redis-cli --cluster {order} failed: {done.stdout[-2000:]}{done.stderr[-500:]}")


@contextmanager
def redis_sentinels() -> Iterator[Sentinels]:
    """Some that run in a folder of their own, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder, ExitStack() as stack:
        yield Sentinels(Path(folder), stack)


@contextmanager
def redis_cluster() -> Iterator[Cluster]:
    """One that runs in a folder of its own, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder, ExitStack() as stack:
        yield Cluster(Path(folder), stack)
