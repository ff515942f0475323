"""What a command that takes long is doing: elapsed time, phase, figures so far.

On stderr, so that stdout has the results alone: on a terminal one line, rewritten each second; elsewhere a
line every ten seconds. What must stay true: to tell costs the measured processes nothing.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text

from loadtests.kit import processes

AFTER_S = 2.0
"""A command that ends sooner shows nothing on a terminal."""
LINE_EVERY_S = 10.0

Figures = Callable[[], str]


class _Now:
    """The phase that the command is in. One for each process, as there is one stderr."""

    command = ""
    began_at = 0.0
    phase = ""
    figures: Figures = str


def phase(name: str, figures: Figures | None = None) -> None:
    """What begins now; `figures` tells in a few words what it has come to, whenever it is asked."""
    _Now.phase = name
    if figures is not None:
        _Now.figures = figures


def figures(told: Figures) -> None:
    """What tells the figures of the phase from now on."""
    _Now.figures = told


@contextmanager
def shown(command: str) -> Iterator[None]:
    """Inside, a thread shows how far `command` is, and SIGTERM ends what was started, as Ctrl-C does. Also a
    decorator, for a `main`.
    """
    processes.end_on_sigterm()
    _Now.command, _Now.began_at, _Now.phase, _Now.figures = command, time.monotonic(), "", str
    console, over = Console(stderr=True, highlight=False), threading.Event()
    if console.is_terminal:
        # What is printed meanwhile stands above the line; a stdout that goes to a file is left alone.
        with Live(
            console=console,
            get_renderable=lambda: Text(line() if _elapsed_s() > AFTER_S else "", no_wrap=True),
            refresh_per_second=1,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        ):
            yield
        return
    teller = threading.Thread(target=_tell, args=(over,), daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def line() -> str:
    """How far it is now: `failover 1:05  round 2 of 5  310 answers`."""
    minutes, seconds = divmod(int(_elapsed_s()), 60)
    told = ""
    with suppress(Exception):  # What the figures are of may just have ended.
        told = _Now.figures()
    return "  ".join(filter(None, (f"{_Now.command} {minutes}:{seconds:02}", _Now.phase, told)))


def _elapsed_s() -> float:
    return time.monotonic() - _Now.began_at


def _tell(over: threading.Event) -> None:
    while not over.wait(LINE_EVERY_S):
        print(line(), file=sys.stderr, flush=True)
