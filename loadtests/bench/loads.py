"""What targets are put under: requests of three sizes, streams, few and fast or many and slow, and
bursts of new clients.
"""

from dataclasses import dataclass

from loadtests.kit import processes


@dataclass(frozen=True, slots=True)
class Requests:
    """Chat completions that do not stream, in a closed loop; `share` of --requests a round."""

    about: str
    ask_bytes: int
    share: float
    connections: int = 16

    @property
    def kind(self) -> str:
        """What the generator calls it."""
        return "requests"

    def flags(self, requests: int, share: float) -> dict[str, float]:
        """The generator's flags; `share` is what the target gets of it."""
        count = max(self.connections, round(requests * self.share * share))
        return {"connections": self.connections, "bytes": self.ask_bytes, "count": count}


@dataclass(frozen=True, slots=True)
class Agents(Requests):
    """Turns of agents, each session on its own connection: every request has all that the one before it had,
    and some 5 kB that are new. The warm-up is the first turn of each. `ask_bytes` is the mean.
    """

    @property
    def kind(self) -> str:
        """What the generator calls it."""
        return "agents"


@dataclass(frozen=True, slots=True)
class Streams:
    """`streams` at once, each of `tokens` tokens and followed by another one, measured for `seconds`."""

    about: str
    streams: int
    tokens: int
    interval_ms: int
    spread_s: float
    seconds: float

    @property
    def kind(self) -> str:
        """What the generator calls it."""
        return "streams"

    @property
    def tokens_s(self) -> float:
        """How many tokens should come a second: between those of a stream there is one interval less."""
        return self.streams * self.tokens / (self.tokens - 1) * 1000 / self.interval_ms

    def flags(self, _requests: int, _share: float) -> dict[str, float]:
        """The generator's flags."""
        return {
            "connections": self.streams,
            "tokens": self.tokens,
            "interval-ms": self.interval_ms,
            "spread-s": self.spread_s,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True)
class Bursts:
    """`clients` that all connect and ask at once, each for a stream of `tokens`; again every `pause_s`."""

    about: str
    clients: int
    bursts: int
    tokens: int
    interval_ms: int
    pause_s: float

    @property
    def kind(self) -> str:
        """What the generator calls it."""
        return "bursts"

    def flags(self, _requests: int, _share: float) -> dict[str, float]:
        """The generator's flags; no connection is open before."""
        return {
            "connections": 0,
            "clients": self.clients,
            "count": self.bursts,
            "tokens": self.tokens,
            "interval-ms": self.interval_ms,
            "seconds": self.pause_s,
        }


Load = Requests | Streams | Bursts


def most_streams() -> int:
    """Through a router, which has two descriptors for each, and keeps some."""
    return processes.FILES * 9 // 20


_MANY = min(10_000, most_streams())

LOADS: dict[str, Load] = {
    "2000-streams": Streams("2,000 streams of 32 tokens, 200 ms apart", 2000, 32, 200, 3.0, 6.4),
    "256-streams": Streams("256 streams of 128 tokens, 20 ms apart", 256, 128, 20, 0.5, 2.6),
    "32-streams": Streams("32 streams of 32 tokens, 200 ms apart", 32, 32, 200, 0.5, 3.2),
    "bursts": Bursts("256 new clients at once, a stream of 16 tokens each", 256, 4, 16, 20, 5.0),
    "1kB": Requests("requests of 1 kB", 1_000, 1.0),
    "16kB": Requests("requests of 16 kB", 16_000, 0.5),
    "200kB": Requests("requests of 200 kB", 200_000, 0.05),
    "agents-80kB": Agents("an agent's turns of 80 kB", 80_000, 1 / 75),
    "agents-200kB": Agents("an agent's turns of 200 kB", 200_000, 1 / 75),
    "agents-600kB": Agents("an agent's turns of 600 kB", 600_000, 1 / 75),
    "agents-1200kB": Agents("an agent's turns of 1.2 MB", 1_200_000, 1 / 75),
    "many": Streams(f"{_MANY:,} streams of 30 tokens, a second apart", _MANY, 30, 1000, 15.0, 15.0),
}
"""In the order in which they are run: memory is read under the first, of processes that have just started."""

QUICK = ("256-streams", "1kB")
USUAL = tuple(name for name in LOADS if name != "many")
