"""The link between two units: how fast KV blocks move from a prefiller to a decoder, and whether they arrive.

A transfer that fails is the fault of the link, not of either unit: this pair is avoided, and both units stay
in rotation for others. Rules:
1. The first failure closes the link for AVOID_S; each further one in a row for twice as long, up to
   AVOID_MOST_S. Then one request at a time tries it.
2. A slow link is not closed: its price rises, until splitting does not pay there.
3. One request at a time goes over a link that was never used: engines connect first, for seconds.
4. What was not confirmed for STALE_S is forgotten, so that a link that was slow gets another chance.
"""

from __future__ import annotations

from math import exp, log

AVOID_S = 5.0
AVOID_MOST_S = 60.0
STALE_S = 60.0
FIRST_S = 20.0
"""The first transfer of a pair may take so long: its engines connect (vLLM on CPU: 3 to 10 s)."""
FIRST_TOKENS_S = 50_000.0
"""Tokens a second of a link of which nothing is known: 10 GB/s at 200 kB a token."""
SETUP_S = 0.01
"""What a transfer takes apart from its tokens."""
_WEIGHT = 0.5
_CLIP = 4.0


class TransferLink:
    """One pair. `failures` are those in a row, `last_failure` is what was said of the last one.

    `tokens_s` is its learnt speed; `seen` counts the transfers that were measured.
    """

    __slots__ = (
        "avoided_until",
        "failed",
        "failures",
        "last_failure",
        "last_failure_at",
        "seen",
        "seen_at",
        "tokens_s",
        "transferred",
    )

    def __init__(self) -> None:
        self.avoided_until = 0.0
        self.failures = 0
        self.last_failure = ""
        self.last_failure_at = 0.0
        self.tokens_s = FIRST_TOKENS_S
        self.seen = 0
        self.seen_at = 0.0
        self.transferred = 0
        self.failed = 0

    def is_open(self, now: float) -> bool:
        """Whether a request may use it now."""
        return now >= self.avoided_until

    def closed_s(self, now: float) -> float:
        """For how long it is still avoided."""
        return max(0.0, self.avoided_until - now)

    def seconds(self, tokens: float, now: float) -> float:
        """How long a transfer of so many tokens is expected to take."""
        speed = self.tokens_s if now - self.seen_at < STALE_S else max(self.tokens_s, FIRST_TOKENS_S)
        return SETUP_S + tokens / speed

    def use(self, now: float) -> None:
        """A request goes over it. After a failure, and at first, it is the only one for a while."""
        if self.failures or not self.transferred:
            self.avoided_until = now + (AVOID_S if self.failures else FIRST_S)

    def learn(self, tokens: int, seconds: float, now: float) -> None:
        """A transfer has arrived; `seconds` 0: how long it took is not known."""
        self.failures, self.avoided_until = 0, 0.0
        self.transferred += 1
        if seconds <= 0.0 or not tokens or self.transferred == 1:
            return
        if now - self.seen_at >= STALE_S:
            self.tokens_s = max(self.tokens_s, FIRST_TOKENS_S) if self.seen else FIRST_TOKENS_S
        sample = tokens / max(seconds - SETUP_S, 1e-4)
        # Between a factor of 4 slower and faster, so that one sample moves little.
        step = min(max(log(sample / self.tokens_s), -log(_CLIP)), log(_CLIP))
        self.tokens_s *= exp(_WEIGHT * step)
        self.seen += 1
        self.seen_at = now

    def fail(self, reason: str, now: float) -> bool:
        """A transfer has failed. True when the link was open until now."""
        was_open = not self.failures
        # Requests that were on their way together fail together, and count once.
        if now - self.last_failure_at > AVOID_S or was_open:
            self.failures += 1
        self.failed += 1
        self.last_failure, self.last_failure_at = reason, now
        avoid_s = min(AVOID_S * 2.0 ** (self.failures - 1), AVOID_MOST_S)
        self.avoided_until = now + avoid_s
        return was_open
