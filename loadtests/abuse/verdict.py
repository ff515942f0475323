"""What one client may cost everyone else: the limits, and the verdict on one try. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import median

from loadtests.abuse.nouns import Abuse, Got

P99_TIMES, P99_MORE_S = 2.0, 0.1
"""The law of all rows: the p99 of the neighbour's TTFT is at most so many times its undisturbed one, and so
much more."""
WAIT_LIMIT_S = 0.1
"""The worst wait of a neighbour's request, beside a control of `CONTROL_S`."""
CONTROL_S = 0.02
"""The worst wait without abuse on a quiet machine, and how late an idle process is let run there. What the
control is above it is the machine's, …"""
CONTROL_MOST_S = 0.1
"""… up to this: on a machine that is noisier nothing can be proven, and the line fails."""
CPU_LIMIT_S = 0.3
CPU_S_PER_MB = 0.1
"""2 s for 20 MB."""
CPU_S_PER_REQUEST = 0.001
"""Of requests that are many and in order: each may cost what any other user's costs, and a connection."""
MEMORY_LIMIT_MB = 20.0
"""By so much memory may be above what it was, some seconds after the abuse."""


@dataclass(frozen=True, slots=True)
class Try:
    """One try of one abuse. Waits are the neighbour's for first tokens, in seconds: the worst, and the p99
    beside that without abuse; `late_s` is how late the machine let the neighbour itself run meanwhile,
    `queued_s` how long in all it let the gate wait for a processor.
    Memory is resident, of all processes of the gate, in MB.
    """

    abuse: Abuse
    got: Got
    cpu_s: float
    wait_s: float
    p99_s: float
    undisturbed_p99_s: float
    control_s: float
    late_s: float
    queued_s: float
    lost: int
    before_mb: float
    peak_mb: float
    after_mb: float
    took_s: float

    def problems(self) -> list[str]:
        """Which limits it broke."""
        allowed_s = wait_limit_s(self.control_s)
        cpu_s = cpu_limit_s(self.abuse)
        grown_mb = self.after_mb - self.before_mb
        wrong = [what for what in self.got if not re.match(self.abuse.answers, what)]
        found = []
        if self.wait_s > allowed_s:
            found.append(f"a neighbour waited {1000 * self.wait_s:.0f} ms, more than {1000 * allowed_s:.0f}")
        p99_most_s = p99_limit_s(self.undisturbed_p99_s)
        if self.p99_s > p99_most_s:
            p99_ms, most_ms = 1000 * self.p99_s, 1000 * p99_most_s
            found.append(f"the p99 of a neighbour's TTFT was {p99_ms:.0f} ms, more than {most_ms:.0f}")
        if self.lost:
            found.append(f"{self.lost} of the neighbour's requests were not answered well")
        if self.cpu_s > cpu_s:
            found.append(f"CPU {self.cpu_s:.2f} s, more than {cpu_s:.2f}")
        if grown_mb > MEMORY_LIMIT_MB:
            found.append(f"memory {grown_mb:+.0f} MB afterwards, more than {MEMORY_LIMIT_MB:.0f}")
        return found + [f"got {what!r} ({self.got[what]} times)" for what in wrong]

    def badness(self) -> float:
        """How far it is over the worst of its limits; 1.0 is at the limit."""
        shares = (
            self.wait_s / wait_limit_s(self.control_s),
            self.p99_s / p99_limit_s(self.undisturbed_p99_s),
            self.cpu_s / cpu_limit_s(self.abuse),
            (self.after_mb - self.before_mb) / MEMORY_LIMIT_MB,
        )
        other = any(
            not problem.startswith(("a neighbour", "the p99", "CPU", "memory")) for problem in self.problems()
        )
        return max(*shares, 2.0 if other else 0.0)

    def line(self) -> str:
        """All of it for people."""
        got = ", ".join(f"{count} x {what}" for what, count in self.got.most_common(4))
        times = (self.p99_s, self.undisturbed_p99_s, self.wait_s, self.control_s, self.late_s, self.queued_s)
        p99_ms, usual_ms, wait_ms, control_ms, late_ms, queued_ms = (1000 * each for each in times)
        wait = f"p99 {p99_ms:.0f} ms (usual {usual_ms:.0f}), worst {wait_ms:.0f} (control {control_ms:.0f}, "
        wait += f"late {late_ms:.0f}, gate queued {queued_ms:.0f})"
        memory = f"{self.before_mb:.0f}/{self.peak_mb:.0f}/{self.after_mb:.0f} MB"
        return f"CPU {self.cpu_s:.2f} s, wait {wait}, memory {memory}, took {self.took_s:.1f} s; got {got}"


def wait_limit_s(control_s: float) -> float:
    """How long a neighbour may wait, given its worst wait without abuse."""
    return WAIT_LIMIT_S + max(0.0, min(control_s, CONTROL_MOST_S) - CONTROL_S)


def p99_limit_s(undisturbed_s: float) -> float:
    """What the p99 of the neighbour's TTFT may be, given the one without abuse."""
    return P99_TIMES * undisturbed_s + P99_MORE_S


def cpu_limit_s(abuse: Abuse) -> float:
    """How much CPU time an abuse may cost."""
    return max(CPU_LIMIT_S, CPU_S_PER_MB * abuse.megabytes, CPU_S_PER_REQUEST * abuse.requests)


def middle(tries: list[Try]) -> Try:
    """The try by which an abuse is judged: the median of how bad they were; of two the worse."""
    ordered = sorted(tries, key=Try.badness)
    return ordered[len(ordered) // 2]


def is_failed(tries: list[Try]) -> bool:
    """Whether the median try failed."""
    return bool(tries) and bool(middle(tries).problems())


def worst_first(rows: list[list[Try]]) -> list[list[Try]]:
    """The rows of the summary."""
    return sorted(rows, key=lambda tries: median(each.badness() for each in tries), reverse=True)
