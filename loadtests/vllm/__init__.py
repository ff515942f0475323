"""Real vLLM leader/follower units on this machine's CPU. Linux only: processes are found through /proc."""


class VllmUnitError(Exception):
    """What stopped the units and what the operator can do about it, in one line."""
