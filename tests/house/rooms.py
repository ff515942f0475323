"""The order of rooms: who may import whom. Arrows run down this table, and never in a circle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from tests.house.source import Finding, product, uses

ORDER = (
    "extras/agent extras/answers extras/clusters extras/completion extras/demo extras/guardrail"
    " extras/kv_events extras/node_probes extras/operator extras/otlp extras/planner extras/realtime"
    " extras/redis extras/scaling extras/top extras/web_tokens extras/workers",
    "cli",
    "app",
    "telemetry",
    "generations",
    "gateway",
    "admin",
    "discovery",
    "control",
    "admission",
    "request",
    "handover resume",
    "extras/redis_client http",
    "process",
    "observe",
    "ingress",
    "config",
    "probes policies extras/orchestrators",
    "router extras",
)
"""From the top. A room may import those on lines below; rooms of one line do not know of each other."""

_LEVEL = {room: level for level, line in enumerate(ORDER) for room in line.split()}


def arrows() -> Counter[tuple[str, str]]:
    """How many imports there are from one room to another."""
    rooms = {name: source.room for name, source in product().items()}
    pairs = ((rooms[name], rooms[other]) for name, used in uses().items() for other in used)
    return Counter(pair for pair in pairs if pair[0] != pair[1])


def rooms_unknown() -> list[Finding]:
    """Rooms that have no place in the order."""
    found = {source.room for source in product().values()}
    return [
        Finding(room, f"{room} has no place in ORDER, tests/house/rooms.py")
        for room in sorted(found - _LEVEL.keys())
    ]


def arrows_up() -> list[Finding]:
    """Arrows that do not run down."""
    found = []
    for above, below in sorted(arrows()):
        if above in _LEVEL and below in _LEVEL and _LEVEL[above] >= _LEVEL[below]:
            found.append(Finding(f"{above} -> {below}", ", ".join(_imports(above, below))))
    return found


def _imports(above: str, below: str) -> Iterator[str]:
    modules = product()
    for name, used in uses().items():
        for other in sorted(used):
            if modules[name].room == above and modules[other].room == below:
                yield f"{modules[name].path} imports {modules[other].path}"


def circles() -> list[Finding]:
    """Modules that import each other, directly or through others."""
    modules, found = product(), []
    for circle in components(uses()):
        rooms = sorted({modules[name].room for name in circle})
        found.append(
            Finding(" + ".join(rooms), ", ".join(str(modules[name].path) for name in sorted(circle)))
        )
    return found


def components(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """The sets of two or more nodes that all reach each other. No module imports itself."""
    reach: dict[str, set[str]] = {}
    for node in graph:
        seen, left = set[str](), [node]
        while left:
            new = set(graph[left.pop()]) - seen
            seen |= new
            left += new
        reach[node] = seen
    rings = {
        frozenset(other for other in reach[node] if node in reach[other])
        for node in graph
        if node in reach[node]
    }
    return sorted(map(set, rings), key=min)
