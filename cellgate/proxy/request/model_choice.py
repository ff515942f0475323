"""Which model serves a request for a name. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from xxhash import xxh3_64_intdigest

from cellgate.proxy.config.settings import Split

_POINTS = 1 << 64


class ModelChoice:
    """The names of a configuration (see proxy/config/model_aliases.py)."""

    def __init__(self, names: Mapping[str, Split], fallback: Mapping[str, tuple[str, ...]]) -> None:
        self._fallback = fallback
        self._models = {name: [model for model, _ in split] for name, split in names.items()}
        self._ends = {name: list(accumulate(share for _, share in split)) for name, split in names.items()}
        self.names = tuple(names)

    def served(self, name: str, session: str) -> str:
        """The model that serves `name` for a session; the same each time, and for every gate.

        A session is a point between 0 and the sum of the weights. So when weights change, only the sessions
        between the old border and the new one move.
        """
        models = self._models.get(name)
        if models is None:
            return name
        if len(models) == 1:
            return models[0]
        ends = self._ends[name]
        point = xxh3_64_intdigest(f"{name}\0{session}".encode()) / _POINTS * ends[-1]
        return next((model for model, end in zip(models, ends, strict=True) if point < end), models[-1])

    def others(self, name: str, served: str) -> tuple[str, ...]:
        """The names to try, in order, when no unit can serve the model."""
        return self._fallback.get(name) or self._fallback.get(served) or ()


class Naming:
    """Of one request: the name that its client wrote, the one that is tried now, and those to try next."""

    __slots__ = ("_choice", "_others", "_session", "asked", "name", "told")

    def __init__(self, choice: ModelChoice, asked: str, session: str) -> None:
        self._choice = choice
        self._session = session
        self._others = choice.others(asked, self.served(asked))
        self.asked = self.name = asked
        self.told = b""
        """The header lines that the response has of it."""

    def served(self, name: str) -> str:
        """The model that serves a name for this request."""
        return self._choice.served(name, self._session)

    def next(self) -> str | None:
        """The model of the next name to fall back to; None: there is none."""
        if not self._others:
            return None
        self.name, self._others = self._others[0], self._others[1:]
        return self.served(self.name)

    def line(self, model: str) -> bytes:
        """The header line that tells the client which model served, and what it stands in for."""
        line = b"x-cellgate-model: %b\r\n" % _in_header(model)
        return (
            line
            if self.name == self.asked
            else line + b"x-cellgate-fallback-from: %b\r\n" % _in_header(self.asked)
        )


def _in_header(name: str) -> bytes:
    """A name as it can stand in a header line."""
    return name.encode("ascii", "replace").translate(None, b"\r\n\0")


def choice_of(names: Mapping[str, Split], fallback: Mapping[str, tuple[str, ...]]) -> ModelChoice | None:
    """None: nothing is configured."""
    return ModelChoice(names, fallback) if names or fallback else None
