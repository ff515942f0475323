"""`python -m deploy.first_start [--wheel FILE]`: what a new user has is started once, with nothing around it.

The checkout by `make run`, and a wheel without extras: each with an empty environment and Debian's Python, in
a folder of its own, until it has answered a chat of the simulated units. Exits with 1, and says what was
printed, when one does not. Without --wheel, one is made of the checkout.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "/usr/bin/python3"
START_S = 300.0
"""To install all that is needed, and to start; pip has most of the time."""
_BODY = {"model": "sim", "max_tokens": 5, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}


class FirstStartError(Exception):
    """A new user would have been stopped. `str()` says where, and what was printed."""


def main() -> int:
    """Start both, or say what keeps a new user from it."""
    parser = argparse.ArgumentParser(prog="python -m deploy.first_start", description=__doc__)
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="start this wheel, and no checkout")
    args = parser.parse_args()
    try:
        if args.wheel is None:
            start_checkout()
        start_wheel(args.wheel)
    except FirstStartError as error:
        print(f"first start: {error}", file=sys.stderr)
        return 1
    return 0


def start_checkout() -> None:
    """`make run` in a copy of what git has. Raises FirstStartError."""
    with tempfile.TemporaryDirectory(prefix="cellgate-first-") as place:
        _copy(Path(place))
        port = _free_port()
        command = ["make", "run", f"PYTHON={PYTHON}", f"LISTEN=127.0.0.1:{port}"]
        _start("make run", command, Path(place), port)


def start_wheel(wheel: Path | None = None) -> None:
    """`cellgate demo` of a wheel in an environment without extras. Raises FirstStartError."""
    with tempfile.TemporaryDirectory(prefix="cellgate-first-") as name:
        place = Path(name)
        _done(place, [PYTHON, "-m", "venv", "env"])
        if wheel is None:
            _copy(place / "sources")
            _done(place, ["env/bin/pip", "wheel", "-q", "--no-deps", "./sources"])
            (wheel,) = place.glob("*.whl")
        _done(place, ["env/bin/pip", "install", "-q", str(wheel.resolve())])
        port = _free_port()
        _start("the wheel", ["env/bin/cellgate", "demo", "--listen", f"127.0.0.1:{port}"], place, port)


def _copy(place: Path) -> None:
    """What git has of the checkout, as it is now."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in files.stdout.splitlines():
        if (ROOT / name).exists():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name, follow_symlinks=False)


def _environment(place: Path) -> dict[str, str]:
    """Nothing but where programs are; what pip needs to reach its index is the machine's matter, not ours."""
    for_pip = {
        key: value
        for key, value in os.environ.items()
        if key.startswith(("PIP_INDEX", "PIP_CERT", "SSL_CERT"))
    }
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": str(place), **for_pip}


def _done(place: Path, command: list[str]) -> None:
    made = subprocess.run(
        command, cwd=place, env=_environment(place), capture_output=True, text=True, timeout=START_S
    )
    if made.returncode:
        raise FirstStartError(f"{' '.join(command)} failed: {made.stdout}{made.stderr}")


def _start(what: str, command: list[str], place: Path, port: int) -> None:
    """Run it until it has answered, and end it as Ctrl-C does."""
    began = time.monotonic()
    with (place / "said.txt").open("w+") as said:
        running = subprocess.Popen(
            command,
            cwd=place,
            env=_environment(place),
            stdout=said,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            while not (answer := _ask(port)) and running.poll() is None:
                if time.monotonic() - began > START_S:
                    break
                time.sleep(0.5)
        finally:
            _end(running)
        said.seek(0)
        printed = said.read()
    if not answer or "Traceback" in printed:
        raise FirstStartError(f"{what} did not work in {time.monotonic() - began:.0f} s:\n{printed}")
    print(f"first start: {what} answered after {time.monotonic() - began:.0f} s")


def _end(running: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C in a terminal does."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if running.poll() is None:
            os.killpg(running.pid, number)
            try:
                running.wait(20.0)
            except subprocess.TimeoutExpired:
                continue


def _ask(port: int) -> bool:
    """Whether a chat is answered."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(_BODY).encode(),
        {"content-type": "application/json"},
    )
    straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with straight.open(asked, timeout=5.0) as reply:
            return bool(json.load(reply)["choices"][0]["message"]["content"])
    except (OSError, ValueError, LookupError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
