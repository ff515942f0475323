"""The nouns of the engine: a unit's speed, one text being computed, one step's work, what came of it."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from loadtests.simunit.text import BLOCK_TOKENS, Context

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Timing:
    """How fast and how large the unit is. Step time = `step_ms` + `per_sequence_ms` x batch + prefill / rate.

    `mean_answer_tokens`: how long an answer is on average when its request sets no limit.
    `transfer_tokens_per_s`: how fast KV blocks come from another unit.
    """

    step_ms: float = 20.0
    per_sequence_ms: float = 0.05
    prefill_tokens_per_s: float = 8000.0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    num_gpu_blocks: int = 8192
    max_model_len: int = 32768
    transfer_tokens_per_s: float = 50_000.0
    mean_answer_tokens: int = 256

    def __post_init__(self) -> None:
        if self.max_model_len > self.num_gpu_blocks * BLOCK_TOKENS:
            raise ValueError(
                f"max_model_len {self.max_model_len} does not fit {self.num_gpu_blocks} KV blocks"
            )


class Listener(Protocol):
    """Who is told what a sequence brings."""

    def token(self, text: str, finish: FinishReason | None, said: str | None = None) -> None:
        """One generated token, and whether it was the last. A prefill-only sequence ends with empty text."""

    def fail(self, message: str) -> None:
        """The sequence ends in an error of the unit."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One text being computed. `max_tokens` 0 means prefill only; `natural_end` that it may end by itself.

    `computed` counts the tokens whose KV exists, `cached_tokens` those found in the prefix cache at first.
    """

    context: Context
    listener: Listener
    max_tokens: int
    min_tokens: int = 0
    natural_end: bool = False
    arrived_s: float = 0.0
    prompt_tokens: int = field(init=False)
    computed: int = 0
    generated: int = 0
    cached_tokens: int | None = None
    blocks_named: int = 0
    blocks_unnamed: int = 0
    ended: bool = False
    script: list[str] | None = None
    """The tokens that it says, if they are known beforehand."""
    is_poison: bool = False
    """Its unit exits after its first token."""
    fetched: int = 0
    """Tokens whose KV has come from another unit, until they are in the cache."""
    handed: dict[str, Any] | None = None
    """What the unit that fetches its blocks needs to know."""

    def __post_init__(self) -> None:
        self.prompt_tokens = self.context.tokens


Part = tuple[Sequence, int]
"""A sequence and the number of its tokens to compute in one step."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work."""

    parts: tuple[Part, ...]
    duration_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Output:
    """What one sequence got out of a step."""

    sequence: Sequence
    text: str
    finish: FinishReason | None


@dataclass(slots=True)
class Counts:
    """What the engine has done since it started."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    ended: dict[FinishReason, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})


@dataclass(slots=True)
class Moved:
    """KV blocks held for other units, and fetched from them. `held` are prompts, `fetching` are requests that
    wait for theirs; `fetched_tokens` were computed by others.
    """

    held: int = 0
    expired: int = 0
    fetching: int = 0
    failed: int = 0
    fetched_tokens: int = 0
