"""Own health: does the gate say how it is within 5 ms, whatever it is busy with?

`python -m loadtests.own_health` asks /livez and /readyz of a real gate 200 times a second, on new and on
kept connections, while the gate is idle, streams, and is saturated. As a control the same is asked of a
process that has nothing else to do: no answer can be had sooner on this machine under this load. The exit
code is 1 when the gate's p99.9 is above 5 ms; 2 when the control's is as well and the gate's is no worse than
chance makes it: the machine was too busy to tell.
"""

import argparse
import multiprocessing
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle

from loadtests.kit import processes, progress
from loadtests.kit.gate import GateProcess, Named
from loadtests.wire.blocking import BlockingConnection
from loadtests.wire.messages import get
from loadtests.wire.reply import Reply

LIMIT_S = 0.005
PERIOD_S = 0.005
CONTROL_FACTOR = 2
"""Chance alone may make the gate so much later than a control that is late itself."""
INTERVAL_MS = 100
TIMEOUT_S = 10.0
_FILES = 8192

# What keeps the gate busy meanwhile: arguments of the benchmark's load generator. More than is ever used up.
LOADS: dict[str, Sequence[str]] = {
    "idle": (),
    "64 streams": ("streams", "--connections=64", "--tokens=900", "--spread-s=1"),
    "2,000 streams": ("streams", "--connections=2000", "--tokens=900", "--spread-s=3"),
    "saturated": ("requests", "--connections=64", "--count=900000"),
}


@dataclass(slots=True)
class Latencies:
    """Times from question to answer of one server, in seconds, and what went wrong."""

    kept_s: list[float] = field(default_factory=list)
    new_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def ask_for(seconds: float, port: int) -> Latencies:
    """Ask one server for a while."""
    result = Latencies()
    kept, new = (BlockingConnection(f"http://127.0.0.1:{port}", TIMEOUT_S) for _ in range(2))
    ways = ((kept, "keep-alive", result.kept_s), (new, "close", result.new_s))
    rows = cycle([(path, *way) for path in ("/livez", "/readyz") for way in ways])
    began_at = answered_at = time.monotonic()
    for number, (path, connection, wish, times_s) in zip(range(int(seconds / PERIOD_S)), rows, strict=False):
        due_at = began_at + number * PERIOD_S
        if (early_s := due_at - time.monotonic()) > 0:
            time.sleep(early_s)
            result.late_s.append(time.monotonic() - due_at)
        # A question that came late because the answer before it took so long has waited, too.
        asked_at = due_at if answered_at > due_at else time.monotonic()
        try:
            connection.exchange(get(path, lines=f"connection: {wish}\r\n"), reply := Reply())
            if reply.status != 200:
                result.wrong.append(f"{path} said {reply.status}")
        except OSError as error:
            result.wrong.append(f"{path}: {error!r}")
        if connection is new:
            new.close()
        answered_at = time.monotonic()
        times_s.append(answered_at - asked_at)
    kept.close()
    return result


def answer_at_once(ports: "multiprocessing.Queue[int]") -> None:
    """The control: a process that does nothing but answer. Ends with its parent (it is a daemon)."""
    listener = socket.create_server(("127.0.0.1", 0))
    ports.put(listener.getsockname()[1])
    kept, _ = listener.accept()
    while True:
        # The asker takes turns: the kept connection, then a new one.
        _answer(kept)
        new, _ = listener.accept()
        with new:
            _answer(new)


def _answer(sock: socket.socket) -> None:
    if sock.recv(65536):
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n")
    else:
        sys.exit()


@contextmanager
def control_process() -> Iterator[int]:
    """The control's port."""
    spawn = multiprocessing.get_context("spawn")
    ports: multiprocessing.Queue[int] = spawn.Queue()
    process = spawn.Process(target=answer_at_once, args=(ports,), daemon=True)
    process.start()
    try:
        yield ports.get(timeout=TIMEOUT_S)
    finally:
        process.terminate()
        process.join()


def gate_before_engine(stack: ExitStack) -> GateProcess:
    """A gate, ready, before the benchmark's engine."""
    engine = processes.announcing("loadtests.bench.engine", "--interval-ms", INTERVAL_MS)
    _, ports = stack.enter_context(engine)
    units = [Named(f"u{port}", f"http://127.0.0.1:{port}") for port in ports]
    return stack.enter_context(GateProcess(units, max_in_flight=4096))


@contextmanager
def load(port: int, arguments: Sequence[str]) -> Iterator[None]:
    """Inside, the gate is busy with it."""
    if not arguments:
        yield
        return
    command = [sys.executable, "-m", "loadtests.bench.generator", *arguments, f"--port={port}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as generator:
        # It warms up with a tenth of its work, and then waits for this.
        assert generator.stdin is not None
        generator.stdin.write(b"\n")
        generator.stdin.flush()
        try:
            # Its warm-up is a load like the other.
            time.sleep(5.0)
            if generator.poll() is not None:
                raise RuntimeError("the load generator has ended early")
            yield
            if generator.poll() is not None:
                raise RuntimeError("the load ended before the questions did")
        finally:
            generator.kill()


def measure(gate: GateProcess, name: str, seconds: float, control_port: int) -> int:
    """Ask during one load, and print it. Returns the exit code it stands for."""
    with load(gate.port, LOADS[name]):
        in_flight = gate.vitals().in_flight
        cpu_s, at = gate.cpu_s(), time.monotonic()
        with ThreadPoolExecutor() as askers:
            other = askers.submit(ask_for, seconds, control_port)
            took, control = ask_for(seconds, gate.admin_port), other.result()
        cpu = (gate.cpu_s() - cpu_s) / (time.monotonic() - at)
    print(f"{name}: {in_flight} in flight, the gate used {cpu:.0%} of a core", flush=True)
    rows = {"kept": took.kept_s, "new": took.new_s, "asker woke late": took.late_s}
    rows |= {"control, kept": control.kept_s, "control, new": control.new_s}
    for row, times_s in rows.items():
        print(f"  {row:16}{_figures(times_s)}", flush=True)
    if took.wrong:
        print(f"  ! {len(took.wrong)} answers were wrong, first: {took.wrong[0]}")
        return 1
    gate_s = share(took.kept_s + took.new_s, 0.999)
    control_s = share(control.kept_s + control.new_s, 0.999)
    if gate_s <= LIMIT_S:
        return 0
    return 2 if control_s > LIMIT_S and gate_s <= CONTROL_FACTOR * control_s else 1


def _figures(times_s: Sequence[float]) -> str:
    shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    figures = "  ".join(f"{name} {1000 * share(times_s, part):6.2f}" for name, part in shares.items())
    return f"{figures}  ms of {len(times_s)}"


def share(times_s: Sequence[float], part: float) -> float:
    """What that part of the times does not exceed."""
    ordered = sorted(times_s)
    return ordered[max(0, round(part * len(ordered)) - 1)] if ordered else 0.0


@progress.shown("own-health")
def main() -> int:
    """Run all loads; 0 when each answer came in time."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.own_health", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to ask during each load")
    parser.add_argument(
        "--loads", type=lambda text: text.split("/"), default=list(LOADS), metavar="NAME/NAME"
    )
    args = parser.parse_args()
    processes.raise_files(_FILES)
    codes = []
    for name in args.loads:
        progress.phase(f"load {name}")
        # A gate of its own for each load: what one leaves behind does not weigh on the next.
        with ExitStack() as stack:
            control_port = stack.enter_context(control_process())
            codes.append(measure(gate_before_engine(stack), name, args.seconds, control_port))
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
