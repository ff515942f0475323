"""The names under which gates keep things in Redis."""

from __future__ import annotations

from cellgate.proxy.config.settings import REDIS_PREFIX


class Names:
    """The names of keys and channels under a prefix. Unit, cell and gate names have no colon."""

    def __init__(self, prefix: str = REDIS_PREFIX) -> None:
        self.prefix = prefix
        self.cells = f"{prefix}cells"
        """The set of cells."""
        self.flips = f"{prefix}flips"
        """The channel on which a document is published after each change of verdict."""

        self.poison = f"{prefix}poison"
        """The set of prompts that are refused, by fingerprint."""

    def flips_of(self, gate: str) -> str:
        """Where a gate says what it publishes on the channel, as signatures have it."""
        return f"{self.flips}:{gate}"

    def beat(self, gate: str) -> str:
        """The key of a gate's heartbeat. In a Cluster all are in one slot: one command reads them."""
        return f"{self.prefix}{{beat}}:{gate}"

    def prefixes(self, gate: str) -> str:
        """The key of a gate's hashes of cached prompts."""
        return f"{self.prefix}prefixes:{gate}"

    def response(self, mark: str) -> str:
        """The key of a stored response."""
        return f"{self.prefix}response:{mark}"

    def limit(self, counter: str) -> str:
        """The key of the counter of one limit in one window of the clock."""
        return f"{self.prefix}limit:{counter}"

    def ban(self, mark: str) -> str:
        """The key of the document of a refused prompt."""
        return f"{self.prefix}poison:{mark}"

    def gates_of(self, cell: str) -> str:
        """The set of gates that report units of a cell."""
        return f"{self.prefix}cell:{cell}"

    def acting(self, cell: str) -> str:
        """The key of what gates agree on about a cell: which of them acts, and on what."""
        return f"{self.prefix}acting:{cell}"

    def units_of(self, gate: str) -> str:
        """The key of a gate's hash of documents, by unit."""
        return f"{self.prefix}units:{gate}"

    def unit(self, unit: str, gate: str) -> str:
        """Where a document stands, as signatures have it."""
        return f"{self.units_of(gate)}:{unit}"
