"""What an engine works on and what it shows, and how fast and large one is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """How fast and how large a unit is.

    A step takes base_s + prefilled tokens / prefill_tokens_s + per_sequence_s for each decoding sequence
    + per_context_token_s for each token of their contexts + per_pair_s for each token that a prefilled one
    attends to. `front_end_s` passes before a prompt is queued (tokenizer, network), for many at once.
    `step_tokens` is max_num_batched_tokens, `slots` max_num_seqs.
    """

    prefill_tokens_s: float = 14_000.0
    base_s: float = 0.008
    per_sequence_s: float = 0.00012
    per_context_token_s: float = 0.0
    per_pair_s: float = 0.0
    front_end_s: float = 0.003
    step_tokens: int = 4096
    seats: int = 64
    kv_tokens: int = 500_000

    def step_s(self, prefilled: int, decoding: int, context: float) -> float:
        """How long a step takes, where `context` tokens are read by the decoding sequences."""
        return (
            self.base_s
            + prefilled / self.prefill_tokens_s
            + self.per_sequence_s * decoding
            + self.per_context_token_s * context
        )


class Sequence:
    """One prompt and its answer at a unit. `names` are its blocks, those of the answer included.

    `made` are the tokens shown so far; `computed` those whose KV exists, while it is not decoding.
    `gate` is whose gate sees its tokens come one by one (-1: none), `owner` whoever wants to know of it.
    """

    __slots__ = (
        "answer_tokens",
        "cached_tokens",
        "computed",
        "ends_step",
        "fetched",
        "gate",
        "made",
        "named",
        "names",
        "owner",
        "prompt_tokens",
        "reckoned",
    )

    def __init__(
        self,
        prompt_tokens: int,
        answer_tokens: int,
        names: tuple[int, ...],
        gate: int = -1,
        owner: object = None,
    ) -> None:
        self.prompt_tokens, self.answer_tokens, self.names = prompt_tokens, answer_tokens, names
        self.gate, self.owner = gate, owner
        self.made = self.computed = self.named = self.reckoned = 0
        self.cached_tokens = -1
        """Tokens of the prompt that were found in the cache; -1: it has not been looked for them yet."""
        self.fetched = 0
        """Tokens of the prompt whose KV has come from another unit, until it is in the cache."""
        self.ends_step = 0
        """The step that makes the last token; 0: it is not decoding."""

    @property
    def goal(self) -> int:
        """Tokens that have to be computed before the next one comes."""
        return self.prompt_tokens + self.made


class Shown:
    """What one or more steps have brought: sequences that showed their first token, and that ended; `steps`
    of `step_s` in each of which one more token came of each decoding sequence of the gate's (`decoding`).
    """

    __slots__ = ("at", "decoding", "ended", "first", "step_s", "steps")

    def __init__(self, at: float, steps: int, step_s: float, decoding: list[int]) -> None:
        self.at, self.steps, self.step_s, self.decoding = at, steps, step_s, decoding
        self.first: list[Sequence] = []
        self.ended: list[Sequence] = []
