"""Load tools: what is measured and drilled on a gate from outside. Each runs as `python -m loadtests.NAME`.

`wire` is their HTTP client and the scripted engine, `simunit` the engine that behaves as a unit does, `kit`
what tools are made of: gates, agents, users, Redis, other routers. All else is a tool, in a file or a folder.
"""

import sys
from types import TracebackType


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A package that a tool needs, and the gate does not, is one line."""
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.split(".")[0] != "loadtests":
        print(f"{error.name} is not installed, which this tool needs; type:  make check", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _say
