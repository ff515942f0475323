"""What ranks say of a unit that stands still: who has not entered a collective, which links failed. Pure.

NCCL counts the collectives that each rank has launched, by kind. Ranks that run ahead for a moment are usual.
So a rank is called behind only when two reports, one after the other, have the same counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cellgate.router.node_nouns import Communicator, NodeFacts, RankPlace, UnitFacts

NAMED_MAX = 4
FRESH_S = 60.0
"""A report that is older says nothing of the present."""

_NCCL_ERRORS = {
    1: "unhandled CUDA error",
    2: "system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote process error",
}
"""ncclResult_t, without success (0) and in progress (7)."""


def conclusions(facts: UnitFacts, now: float) -> tuple[str, ...]:
    """Sentences without a full stop, the most telling first."""
    nodes = [node for node in facts.nodes.values() if now - node.at <= FRESH_S]
    of_ranks = (
        line for node in nodes for line in _of_ranks(facts.before.get(node.node), node, facts.node_of)
    )
    of_devices = (line for node in nodes for line in _of_devices(facts.baseline(node.node), node))
    return tuple(dict.fromkeys((*of_ranks, *of_devices)))[:NAMED_MAX]


def _of_ranks(before: NodeFacts | None, now: NodeFacts, node_of: Callable[[str], str]) -> Iterator[str]:
    known = {comm.id: comm for comm in before.communicators} if before is not None else {}
    named = set[tuple[str, int]]()
    for comm in now.communicators:
        stands_still = comm == known.get(comm.id)
        for place, words in _of_communicator(comm, stands_still=stands_still):
            # Its number differs from communicator to communicator; the largest one comes first.
            if (place.host, place.pid) not in named:
                named.add((place.host, place.pid))
                yield f"rank {place.rank} on node {node_of(place.host)} (process {place.pid}) {words}"
        if stands_still and comm.is_mostly_behind and comm.behind:
            late = comm.behind[0]
            yield f"{comm.behind_count} of {comm.size} ranks have not entered {late.operation} {late.most}"


def _of_communicator(comm: Communicator, *, stands_still: bool) -> Iterator[tuple[RankPlace, str]]:
    for place, is_dead in comm.missing:
        lasts = ", for a minute or more" if is_dead else ""
        yield place, f"does not answer the other ranks{lasts}"
    for place, code in comm.failed:
        yield place, f"reports an NCCL error: {_NCCL_ERRORS.get(code, f'number {code}')}"
    for late in comm.behind if stands_still and not comm.is_mostly_behind else ():
        more = f" and {late.most - late.launched - 1} before it" if late.most - late.launched > 1 else ""
        yield (
            late.place,
            f"never entered {late.operation} {late.most}{more}, which {comm.size - comm.behind_count} of "
            f"{comm.size} ranks wait in",
        )


def _of_devices(before: NodeFacts | None, now: NodeFacts) -> Iterator[str]:
    """Error counters of links and devices that have grown."""
    if before is None:
        return
    for name, count in now.counters.items():
        more = count - before.counters.get(name, count)
        if more > 0:
            yield f"node {now.node} counts {name} +{more} within {now.at - before.at:.0f} s"
