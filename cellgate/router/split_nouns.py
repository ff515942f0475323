"""The nouns of a split request: its prompt is computed by one unit, its answer by another.

Strings and plain tuples, because workers get them over a socket.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

ServingRole = Literal["both", "prefill", "decode"]
"""What a unit does for requests: all of it, only prompts for others, or whole requests and answers."""
Transfer = Literal["none", "nixl", "sglang"]
"""How KV blocks go from one unit of a cell to another; none: they do not."""


class SplitPlan(NamedTuple):
    """The plan of a request whose prompt `prefiller` computes for the unit of the lease.

    The prompt should be computed in `prefill_s`; then `tokens` of KV cache are to be moved. The first token
    should come `transfer_s` after the request was sent to the decoder; after `limit_s` without one the
    transfer counts as failed. `is_first`: nothing has gone over this link yet, and its engines have yet to
    connect, in which time the decoder may do nothing at all. `together`: both units get the request at the
    same time, and the decoder cannot compute a prompt. `may_wait`: the decoder may have no decode slot for it
    yet, or has prompts of its own to compute.
    """

    prefiller: str
    tokens: int
    prefill_s: float
    transfer_s: float
    limit_s: float
    is_first: bool = False
    together: bool = False
    may_wait: bool = False


class SplitStep(NamedTuple):
    """What became of one step of a split request, as it is reported.

    `kind` is one of STEPS; `seconds` is how long it took, where that is known.
    """

    kind: str
    prefiller: str
    decoder: str
    tokens: int = 0
    seconds: float = 0.0
    reason: str = ""


PREFILLED, LEG_LOST, TRANSFERRED, LINK_FAILED, UNFIT, ORPHANED, RELEASED = STEPS = (
    "prefilled",
    "prefill_lost",
    "transferred",
    "transfer_failed",
    "unfit",
    "orphaned",
    "released",
)
"""The prompt was computed; the prefiller failed; the decoder has sent its first token; the blocks did not
arrive; the request cannot be split; blocks were computed that nobody will fetch; those were released."""
ORPHAN_S = 30.0
"""Engines free blocks that nobody has fetched for this long (vLLM: kv_lease_duration)."""
