"""What stands for a round: an engine, and fresh processes of all targets before it."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from loadtests.bench.targets import TARGETS, setup
from loadtests.kit import processes
from loadtests.kit.routers import MissingError, Running


@dataclass(slots=True)
class Stage:
    """Targets that run before the engine, what each took at rest, and why others do not run."""

    number: int
    engine: int
    units: Sequence[int]
    folder: Path
    running: dict[str, Running] = field(default_factory=dict)
    idle_mb: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, running: Running) -> None:
        """A target is ready; its memory is read before it has done anything."""
        self.running[name] = running
        self.idle_mb[name] = processes.resident_mb(running.pid) if running.pid else 0.0

    def folder_of(self, name: str) -> Path:
        """Where the files of a target are, what it prints among them."""
        return self.folder / name.replace("/", "-")

    def in_turn(self, load: str) -> list[str]:
        """The targets of a load; every other round the other way round, so that none always comes first."""
        names = [name for name in self.running if not TARGETS[name].loads or load in TARGETS[name].loads]
        return names[:: -1 if self.number % 2 else 1]


@contextmanager
def stage(number: int, names: Sequence[str], units: int = 2) -> Iterator[Stage]:
    """All of it, for as long as the context lasts. A target that does not start is `missing`."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        engine = processes.announcing("loadtests.bench.engine", "--units", units)
        made = Stage(number, *stack.enter_context(engine), folder)
        for name in names:
            try:
                own = setup(made.units, made.folder_of(name))
                made.add(name, stack.enter_context(TARGETS[name].start(own)))
            except (MissingError, RuntimeError) as error:
                made.missing[name] = str(error)
        yield made
