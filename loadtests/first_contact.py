"""Drill: the README's "Try it" followed to the letter, in a fresh clone. Is each line true, and how soon?

`python -m loadtests.first_contact` clones this repository, types what the README and then `make run` itself
tell to type, and times it. Every line that `make run` prints is known here and checked; another one is a
failure. The exit code is 1 when something is not as it says.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from loadtests.kit import progress
from loadtests.kit.report import columns, print_problems, verdict
from loadtests.kit.waiting import wait_until
from loadtests.wire.blocking import fetch

ROOT = Path(__file__).resolve().parents[1]
READY_S, HEALED_S, ENDING_S = 600.0, 60.0, 60.0
_PROSE = (
    r"setting up \.venv, once \.\.\.",
    r"starting 3 simulated units .*",
    r"cellgate is up: .*",
    r"the status page: .*",
    r"stream a completion:",
    r"look, in a second terminal:",
    r"hurt a unit, and watch the gate move its requests:",
    r"Ctrl-C stops everything\.",
    r"\d\d:\d\d:\d\d(\.\d+)? .*",  # The gate's own log.
    r"\d{4}-\d\d-\d\dT.*",
    r"installing Debian's .*",
    r"\{.*\}",
    r"WARNING: .*",  # Pip's, of its own set-up.
    r"",
)
"""Lines that tell nothing to type."""

_OF_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
"""What a make tells those that it starts: they would print which folder they are in."""


class Contact:
    """A fresh clone, and `make run` in it. `rows` are what was done and how long it took."""

    def __init__(self, folder: Path) -> None:
        self._clone = folder / "cellgate"
        self._log = folder / "make-run.log"
        self.rows: list[tuple[str, float]] = []
        self.problems: list[str] = []

    def run(self) -> None:
        """Everything, in the order of the README."""
        command = ["git", "clone", "-q", str(ROOT), str(self._clone)]
        self._timed("git clone", lambda: subprocess.run(command, check=True))
        # As in a terminal: a group of its own, all of which gets a Ctrl-C, and no make around it.
        environ = {name: value for name, value in os.environ.items() if name not in _OF_MAKE}
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                ["make", "run"],
                cwd=self._clone,
                env=environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._timed("make run, until it says what to type", lambda: self._until_up(process))
            self._type_readme()
            self._type_printed()
            self._freeze()
        finally:
            self._timed("Ctrl-C, until all of it has ended", lambda: self._interrupt(process))
        self._check_lines()

    def _until_up(self, process: subprocess.Popen[bytes]) -> None:
        up = wait_until(
            lambda: "Ctrl-C stops everything" in self._printed() or process.poll() is not None, READY_S
        )
        if not up or process.poll() is not None:
            raise RuntimeError(f"make run did not come up:\n{self._printed()[-2000:]}")

    def _type_readme(self) -> None:
        """The request of the README, at the address that was printed."""
        readme = (self._clone / "README.md").read_text()
        [first] = re.findall(r"^    (curl -N http.*?)\n\n", readme, re.DOTALL | re.MULTILINE)
        line = first.replace("\\\n", " ").replace("127.0.0.1:8000", self._address("cellgate is up"))
        self._ask("the README's request", line)

    def _type_printed(self) -> None:
        """Each command that `make run` has printed, but for those that hurt a unit."""
        for line in self._commands():
            if line.startswith("curl -N"):
                self._ask("the request that was printed", line)
            elif not line.startswith("kill"):
                self._timed(line.split("    ")[0], partial(self._shell, line))
        page = fetch(f"http://{self._address('the status page')}/")
        self._expect("the status page is a page", page.status == 200 and b"Cellgate" in page.body)

    def _freeze(self) -> None:
        """The first `kill -STOP`, and the `kill -CONT` that heals it."""
        line = next(line for line in self._commands() if line.startswith("kill -STOP"))
        pid, name = re.findall(r"kill -STOP (\d+) +# the follower of (\w+);", line)[0]
        os.kill(int(pid), signal.SIGSTOP)
        self._timed("kill -STOP, until the unit is out", lambda: self._until(name, "down"))
        nodes = [node["name"] for node in self._unit(name).get("nodes", ()) if node.get("bad")]
        told = str(self._unit(name))
        self._expect(f"it says which node is at fault: {nodes or told[:300]}", f"{name}-1" in told)
        os.kill(int(pid), signal.SIGCONT)
        self._timed("kill -CONT, until it is back", lambda: self._until(name, "up"))

    def _interrupt(self, process: subprocess.Popen[bytes]) -> None:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(ENDING_S)
        left = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, check=False).stdout
        self._expect(f"nothing is left: {left!r}", not left)

    def _check_lines(self) -> None:
        commands = set(self._commands())
        for line in map(str.strip, self._joined().splitlines()):
            known = line in commands or any(re.fullmatch(each, line) for each in _PROSE)
            self._expect(f"a line of make run is known here: {line!r}", known)

    def _commands(self) -> Iterator[str]:
        """The indented lines."""
        return (line.strip() for line in re.findall(r"^  (\S.*)$", self._joined(), re.MULTILINE))

    def _joined(self) -> str:
        """What was printed, with lines that end in a backslash joined to the next ones."""
        return self._printed().replace("\\\n", " ")

    def _ask(self, what: str, line: str) -> None:
        answer = self._timed(what, lambda: self._shell(line))
        self._expect(f"{what} is answered to its end", answer.endswith("data: [DONE]\n\n"))

    def _shell(self, line: str) -> str:
        words = shlex.split(line, comments=True)
        words = words[: next((n for n, word in enumerate(words) if word in ("what", "the", "for")), None)]
        done = subprocess.run(words, cwd=self._clone, capture_output=True, text=True, check=False, timeout=60)
        self._expect(f"{line!r} works: {done.stderr[-200:]}", done.returncode == 0 and bool(done.stdout))
        return done.stdout

    def _until(self, name: str, wanted: str) -> None:
        is_so = wait_until(lambda: self._unit(name)["verdict"] == wanted, HEALED_S)
        self._expect(f"{name} comes to be {wanted}", is_so)

    def _unit(self, name: str) -> dict[str, Any]:
        units = orjson.loads(fetch(f"http://{self._address('the status page')}/units").body)
        return next(unit for unit in units if unit["name"] == name)

    def _address(self, after: str) -> str:
        return str(re.findall(rf"{after}: +http://([\d.:]+)", self._printed())[0])

    def _printed(self) -> str:
        return self._log.read_text(errors="replace")

    def _expect(self, what: str, is_so: bool) -> None:
        if not is_so:
            self.problems.append(f"not so: {what}")

    def _timed(self, what: str, do: Callable[[], Any]) -> Any:
        progress.phase(what)
        began_s = time.monotonic()
        found = do()
        self.rows.append((what, time.monotonic() - began_s))
        return found


@progress.shown("first contact")
def main() -> int:
    """Follow the README; 0 when all of it is so."""
    with tempfile.TemporaryDirectory(prefix="first-contact-") as folder:
        contact = Contact(Path(folder))
        contact.run()
    print(columns([("step", "seconds"), *((what, f"{took_s:.1f}") for what, took_s in contact.rows)]))
    print(verdict(contact.problems))
    print_problems(contact.problems)
    return int(bool(contact.problems))


if __name__ == "__main__":
    sys.exit(main())
