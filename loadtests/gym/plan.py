"""Which cells the gym runs when nobody names any, and which limits hold where."""

from __future__ import annotations

from loadtests.gym.cells import Cell
from loadtests.gym.fleets import FLEETS
from loadtests.gym.loads import LOADS, missing

UTILISATIONS = (0.1, 0.5, 0.8, 0.95)
UNEVEN = frozenset(
    {"zipf", "agents", "coding_agents", "agents_forget", "agents_roam", "mooncake", "mooncake_like"}
)
"""Loads whose prefixes repeat unevenly: where a cache is worth going to."""
ISSUE = Cell("shared_prompt", "equal", -16.0)
"""Four units with 64 seats, one system prompt, long answers, 16 requests a second."""
SPARSE = tuple(Cell("rag", fleet, -0.1) for fleet in ("equal", "slow_unit", "far_cell"))
"""A request in ten seconds: nearly always all units are idle."""
QUICK = (
    ISSUE,
    Cell("zipf", "equal", 0.8),
    Cell("agents", "equal", 0.8),
    Cell("bursts", "equal", 0.5),
    Cell("rag", "slow_unit", 0.5),
    Cell("azure_conv", "two_gates", 0.8),
    Cell("agents_roam", "four_gates", 0.8),
    Cell("embeddings", "four_gates", 0.8),
)
ROAMING = ("agents_roam", "chat_roams")
"""Loads whose sessions change gates: nothing new where there is one."""
OF_THEIR_OWN = (*ROAMING, "coding_agents")
FOR_EVENTS = "kv_gates"
"""Evictions, a restart and two gates: what KV events are for. Run only by its name."""
CODING = tuple(
    Cell("coding_agents", fleet, much)
    for fleet in ("agents_4", "agents_16", "agents_4_gates_4", "agents_16_gates_4", "agents_die")
    for much in (0.5, 0.8)
)
"""What has its own fleets: of more KV cache."""
_ON_ALL_FLEETS = ("shared_prompt", "zipf", "agents", "rag", "embeddings", "decode_heavy")


def cells() -> list[Cell]:
    """All loads at all utilisations on equal units; some of them on all fleets."""
    alone = [Cell("two_models", "two_models", much) for much in (0.5, 0.95, 1.3)]
    alone += [Cell("deadlines", "equal", 1.2)]
    loads = [
        load for load in LOADS if load != "two_models" and load not in OF_THEIR_OWN and not missing(load)
    ]
    everywhere = [Cell(load, "equal", much) for load in loads for much in UTILISATIONS]
    fleets = [
        Cell(load, fleet, much)
        for fleet in FLEETS
        if fleet not in ("equal", "two_models", FOR_EVENTS) and not fleet.startswith("agents_")
        for load in _ON_ALL_FLEETS
        for much in (0.5, 0.8)
    ]
    roaming = [
        Cell(load, fleet.name, much)
        for fleet in FLEETS.values()
        if fleet.gates > 1 and fleet.name != FOR_EVENTS and not fleet.name.startswith("agents_")
        for load in ROAMING
        for much in (0.5, 0.8)
    ]
    return [ISSUE, *SPARSE, *alone, *everywhere, *fleets, *roaming, *CODING]


def quick_cells() -> list[Cell]:
    """A few."""
    return list(QUICK)
