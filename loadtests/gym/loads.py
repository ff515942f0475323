"""The loads, by name: each a class of its own."""

from __future__ import annotations

from loadtests.gym.loads_sessions import CodingAgents, Sessions
from loadtests.gym.loads_single import Single, Tenants, TwoModels
from loadtests.gym.loads_traces import Mooncake, MooncakeLike
from loadtests.gym.shapes import Load

SHARED = Single(system_tokens=(4096, 4096), own_tokens=200, own_is_fixed=True, answer_tokens=800)

LOADS: dict[str, Load] = {
    "shared_prompt": SHARED,
    "shared_ramp": Single(
        system_tokens=(4096, 4096), own_tokens=200, own_is_fixed=True, answer_tokens=800, ramp_s=10.0
    ),
    "shared_no_usage": Single(
        system_tokens=(4096, 4096), own_tokens=200, own_is_fixed=True, answer_tokens=800, usage=False
    ),
    "zipf": Single(systems=400, system_tokens=(1000, 6000), own_tokens=150, answer_tokens=150),
    "zipf_few": Single(systems=30, system_tokens=(2000, 8000), own_tokens=100, answer_tokens=300),
    "chat": Sessions(),
    "agents": Sessions(
        system_tokens=(2500, 2500), turns=(5, 20), first=(200, 2000), added=(200, 3000), answer_tokens=80,
        pause_s=(0.5, 4.0),
    ),
    "chat_roams": Sessions(roams=True),
    "agents_roam": Sessions(
        system_tokens=(2500, 2500), turns=(5, 20), first=(200, 2000), added=(200, 3000), answer_tokens=80,
        pause_s=(0.5, 4.0), roams=True,
    ),
    "agents_forget": Sessions(
        systems=4, system_tokens=(1500, 6000), turns=(5, 25), first=(500, 4000), added=(100, 2500),
        answer_tokens=120, pause_s=(0.2, 3.0), keeps=0.85,
    ),
    "coding_agents": CodingAgents(),
    "rag": Single(system_tokens=(300, 300), own_tokens=9000, own_median=8000, own_most=24_000,
                  answer_tokens=150),
    "completion": Sessions(
        systems=1, system_tokens=(120, 120), turns=(3, 12), first=(600, 2500), added=(5, 60),
        answer_tokens=20, answer_most=100, pause_s=(0.2, 1.5), keeps=0.7,
    ),
    "decode_heavy": Single(own_tokens=100, answer_tokens=1500),
    "embeddings": Single(own_tokens=350, own_median=250, own_most=4000, answer_tokens=1, answer_most=1,
                         stream=False),
    "classify": Single(systems=6, system_tokens=(400, 1500), own_tokens=200, answer_tokens=1, answer_most=1,
                       stream=False),
    "plain": Single(system_tokens=(500, 500), own_tokens=400, answer_tokens=300, stream=False),
    "plain_short": Single(own_tokens=275, own_median=140, answer_tokens=64, arrivals="waves", stream=False),
    "bursts": Single(system_tokens=(1500, 1500), own_tokens=500, answer_tokens=150, arrivals="bursts"),
    "waves": Single(system_tokens=(800, 800), own_tokens=700, answer_tokens=200, arrivals="waves"),
    "deadlines": Single(systems=20, system_tokens=(500, 4000), own_tokens=1500, own_median=700,
                        answer_tokens=150, deadline_s=2.0),
    "tenants": Tenants(),
    "two_models": TwoModels(),
    "azure_conv": Single(own_tokens=1155, own_median=1020, own_most=14_000, answer_tokens=211,
                         answer_median=129, answer_most=1000),
    "azure_code": Single(own_tokens=2048, own_median=1930, own_most=7400, answer_tokens=28,
                         answer_median=13, answer_most=1900),
    "mooncake": Mooncake(),
    "mooncake_like": MooncakeLike(),
}  # fmt: skip


def missing(load: str) -> str:
    """Why a load cannot be run here; empty when it can."""
    return str(getattr(LOADS[load], "missing", ""))
