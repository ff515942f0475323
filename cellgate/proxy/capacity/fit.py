"""How much fits beside the weights: tokens, sequences, and what to write into the gate's file. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cellgate.proxy.capacity.memory import kv_bytes_per_sequence, stages, weight_bytes
from cellgate.proxy.capacity.shape import Shape

GIB = 1 << 30
TOKENS_OF_WEIGHT_1 = 1_000_000


@dataclass(frozen=True, slots=True)
class Devices:
    """A unit's devices: `tensor` x `pipeline` of them, each with `memory_bytes`, of which the engine takes
    the share `utilization` (0 to 1); `reserve_bytes` of that are for activations, graphs and communication.
    """

    memory_bytes: float
    tensor: int = 1
    pipeline: int = 1
    utilization: float = 0.9
    reserve_bytes: float = 2 * GIB


@dataclass(frozen=True, slots=True)
class Workload:
    """Sequences are `context` tokens long, prompt and answer; the engine computes `max_seqs` at once."""

    context: int = 4096
    max_seqs: int = 256
    kv_bits: int = 16
    block: int = 16


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Of the stage that has the least room: weights and room for KV cache on each of its devices, and what a
    sequence takes there.
    """

    weight_bytes: float
    kv_bytes: float
    sequence_bytes: float
    workload: Workload

    @property
    def fits(self) -> bool:
        """Whether at least one sequence does."""
        return self.kv_bytes >= self.sequence_bytes

    @property
    def sequences(self) -> int:
        """Sequences of the workload that fit at the same time."""
        return max(int(self.kv_bytes / self.sequence_bytes), 0)

    @property
    def tokens(self) -> int:
        """Tokens that fit, in sequences of the workload."""
        return max(int(self.kv_bytes / self.sequence_bytes * self.workload.context), 0)

    @property
    def max_in_flight(self) -> int:
        """No more than are computed at a time: what waits is better kept at the gate, which can still send it
        elsewhere.
        """
        return max(1, min(self.sequences, self.workload.max_seqs))

    @property
    def weight(self) -> float:
        """1 for each million tokens, so that unlike units planned one by one compare."""
        return float(f"{max(self.tokens, 1) / TOKENS_OF_WEIGHT_1:.2g}")


def plan_memory(shape: Shape, devices: Devices, workload: Workload, scale: float = 1.0) -> MemoryPlan:
    """What fits on the fullest stage. `scale` is by how much the real weights are larger than reckoned."""
    usable = devices.memory_bytes * devices.utilization - devices.reserve_bytes
    made = []
    for layers in stages(shape.layers, devices.pipeline):
        weights = weight_bytes(shape, layers, devices.tensor) * scale
        sequence = kv_bytes_per_sequence(
            shape, layers, workload.context, devices.tensor, workload.kv_bits, workload.block
        )
        made.append(MemoryPlan(weights, usable - weights, sequence, workload))
    return min(made, key=lambda each: each.kv_bytes / each.sequence_bytes)
