"""Reads the file of keys: one JSON object a line, each a key, a tenant or the price of a model.

A file with a mistake is refused as a whole, with a line for each mistake. Not YAML: a file of ten thousand
keys must be read in a tenth of a second, and `cellgate keys new` must be able to append to it.

In this order: `LimitRules`, `Key`, `_wrong`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from io import BytesIO
from math import inf
from pathlib import Path
from typing import Any

import orjson

from cellgate.proxy.config.checks import did_you_mean

PRIORITY_LAST = 1_000_000
"""The priority that goes last; less than nothing goes before, down to minus as much."""


def read_keys(path: str, rest: Callable[[], None] = lambda: None) -> KeyRing:
    """The keys of the file at `path`; `rest` is called every LINES_AT_ONCE lines. Raises KeyFileError."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise KeyFileError([f"{path}: expected a readable file: {reason}"]) from None
    if len(data) > FILE_BYTES:
        raise KeyFileError([f"{path}: expected at most {FILE_BYTES} bytes"])
    return keys_in(path, data, rest)


@dataclass(frozen=True, slots=True)
class LimitRules:
    """How much may be used; None: as much as one likes. Money is in the currency of the prices.

    `requests_per_minute` and `tokens_per_minute` count in minutes of the clock (UTC), the others in its days
    and months; `in_flight` are requests at a time.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    in_flight: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    cost_per_day: float | None = None
    cost_per_month: float | None = None


@dataclass(frozen=True, slots=True)
class TenantRules:
    """Those who share the queue as one, and these limits. `models` None: all; lower priorities go first."""

    name: str
    models: frozenset[str] | None = None
    priority: tuple[int, int] = (0, PRIORITY_LAST)
    limits: LimitRules = LimitRules()


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """What a million tokens of a model cost."""

    prompt: float = 0.0
    completion: float = 0.0


FILE_BYTES = 64 << 20
LINES_AT_ONCE = 64
"""Half a millisecond of reading."""
FORGOTTEN_AT_ONCE = 1024
PROBLEMS_MAX = 20
"""So many mistakes are told; the rest is counted."""

_KEY_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY_FILE_LARGEST = 10**15


class KeyFileError(Exception):
    """The file cannot be used. `problems` has a line for each mistake: file, line, field."""

    def __init__(self, problems: list[str]) -> None:
        more = [f"and {len(problems) - PROBLEMS_MAX} more"] if len(problems) > PROBLEMS_MAX else []
        self.problems = (*problems[:PROBLEMS_MAX], *more)
        super().__init__("; ".join(self.problems))


class _WrongError(Exception):
    """A value is not what it has to be: what was expected."""


def keys_in(path: str, data: bytes, rest: Callable[[], None] = lambda: None) -> KeyRing:
    """`read_keys` for bytes that were read already. Raises KeyFileError."""
    draft = _Draft(path)
    for number, line in enumerate(BytesIO(data), 1):
        if number % LINES_AT_ONCE == 0:
            rest()
        if line.strip() and not line.lstrip().startswith(b"#"):
            draft.take(number, line)
    if draft.problems:
        raise KeyFileError(draft.problems)
    return draft.ring(rest)


@dataclass
class _Draft:
    """What has been read so far."""

    path: str
    problems: list[str] = field(default_factory=list)
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    tenants: dict[str, TenantRules] = field(default_factory=dict)
    prices: dict[str, TokenPrice] = field(default_factory=dict)

    def take(self, number: int, line: bytes) -> None:
        """One line of the file."""
        try:
            found = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            self._wrong(number, "", f"expected a JSON object: {error.msg} at column {error.colno}")
            return
        kind = next((kind for kind in _KEY_FILE_FIELDS if isinstance(found, dict) and kind in found), None)
        if kind is None:
            self._wrong(number, "", "expected an object with the field key, tenant or model")
            return
        problems = len(self.problems)
        values = self._values(number, kind, found)
        if len(self.problems) == problems:
            self._keep(number, kind, values)

    def _values(self, number: int, kind: str, found: dict[str, Any]) -> dict[str, Any]:
        """The values of the fields, checked."""
        known, values = _KEY_FILE_FIELDS[kind], {}
        for name, value in found.items():
            if name not in known:
                hint = did_you_mean(name, known) or f"known here: {', '.join(known)}"
                self._wrong(number, name, f"unknown field; {hint}")
                continue
            try:
                values[name] = known[name](value)
            except _WrongError as error:
                self._wrong(number, f"{name}{error.args[1]}", f"expected {error.args[0]}")
        for name in _KEY_FILE_REQUIRED[kind]:
            if name not in found:
                self._wrong(number, name, "required field is missing")
        return values

    def _keep(self, number: int, kind: str, values: dict[str, Any]) -> None:
        name = values.pop(kind)
        taken = {"key": self.keys.keys(), "tenant": self.tenants.keys(), "model": self.prices.keys()}
        if name in taken[kind]:
            self._wrong(number, kind, f"duplicate {kind} {name!r}")
        elif kind == "tenant":
            self.tenants[name] = TenantRules(name, **values)
        elif kind == "model":
            self.prices[name] = TokenPrice(**values)
        elif (other := self.digests.setdefault(values["sha256"], name)) != name:
            self._wrong(number, "sha256", f"duplicate of key {other!r}")
        else:
            self.keys[name] = values

    def _wrong(self, number: int, name: str, text: str) -> None:
        # The value is not shown: somebody may have pasted the key itself.
        self.problems.append(
            f"{self.path}:{number}: {name}: {text}" if name else f"{self.path}:{number}: {text}"
        )

    def ring(self, rest: Callable[[], None]) -> KeyRing:
        """All of it. What a key leaves out is as for its tenant; a tenant without a line has no limits."""
        keys: dict[bytes, Key] = {}
        for number, name in enumerate(list(self.keys)):
            if number % LINES_AT_ONCE == 0:
                rest()
            # Taken off one by one: all at once would stop the threads beside this one.
            values = self.keys.pop(name)
            del self.digests[values["sha256"]]
            tenant_name, digest = values.pop("tenant", name), bytes.fromhex(values.pop("sha256"))
            tenant = self.tenants.setdefault(tenant_name, TenantRules(tenant_name))
            inherited = {"models": tenant.models, "priority": tenant.priority}
            expires_at = values.pop("expires", inf)
            keys[digest] = Key(name, tenant, expires_at=expires_at, **(inherited | values))
        return KeyRing(keys, self.tenants, self.prices)


# What the file of keys says: who may come in, as whom, and how much each may use. Immutable.


@dataclass(frozen=True, slots=True)
class Key:
    """One key, without itself. `name` is empty for bearers of a JWT: they have the limits of their tenant
    only. `expires_at`: seconds since 1970.
    """

    name: str
    tenant: TenantRules
    models: frozenset[str] | None = None
    priority: tuple[int, int] = (0, PRIORITY_LAST)
    limits: LimitRules = LimitRules()
    expires_at: float = inf


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys, by the SHA-256 of each; tenants and prices by their names; limits by `key NAME` and `tenant
    NAME`, of those who have some.
    """

    keys: Mapping[bytes, Key] = field(default_factory=dict)
    tenants: Mapping[str, TenantRules] = field(default_factory=dict)
    prices: Mapping[str, TokenPrice] = field(default_factory=dict)
    limits: Mapping[str, LimitRules] = field(init=False)

    def __post_init__(self) -> None:
        # Here, because whoever reads the file does so in a thread of its own.
        tenants = {f"tenant {name}": each.limits for name, each in self.tenants.items()}
        keys = {f"key {each.name}": each.limits for each in self.keys.values()}
        object.__setattr__(self, "limits", {**tenants, **keys})

    def forget(self, rest: Callable[[], None]) -> None:
        """Let it go, a part at a time: a hundred thousand keys at once would stop all threads. It is empty
        from the first moment on.
        """
        for table in (self.keys, self.tenants, self.limits):
            assert isinstance(table, dict)
            while table:
                table.popitem()
                if len(table) % FORGOTTEN_AT_ONCE == 0:
                    rest()


def _wrong(expected: str, where: str = "") -> _WrongError:
    return _WrongError(expected, where)


def _name(found: object) -> str:
    if isinstance(found, str) and _KEY_FILE_NAME.fullmatch(found):
        return found
    raise _wrong("a name of at most 128 letters, digits, '.', '_', '@' and '-'")


def _model(found: object) -> str:
    if isinstance(found, str) and 0 < len(found) <= 1024:
        return found
    raise _wrong("the name of a model")


def _models(found: object) -> frozenset[str]:
    if isinstance(found, list) and found and all(isinstance(model, str) and model for model in found):
        return frozenset(found)
    raise _wrong("a list of models; leave it out for all")


def _digest(found: object) -> str:
    if isinstance(found, str) and _DIGEST.fullmatch(found.lower()):
        return found.lower()
    raise _wrong("the SHA-256 of a key, 64 hexadecimal digits (see cellgate keys new)")


def _priority(found: object) -> tuple[int, int]:
    if isinstance(found, list) and len(found) == 2 and all(type(end) is int for end in found):
        low, high = found
        if -PRIORITY_LAST <= low <= high <= PRIORITY_LAST:
            return low, high
    raise _wrong(f"[LOWEST, HIGHEST], whole numbers from {-PRIORITY_LAST} to {PRIORITY_LAST}")


def _expires(found: object) -> float:
    try:
        at = datetime.fromisoformat(found) if isinstance(found, str) else None
    except ValueError:
        at = None
    if at is None:
        raise _wrong("a time such as 2027-01-31 or 2027-01-31T12:00:00Z")
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _amount(found: object) -> float:
    if isinstance(found, (int, float)) and not isinstance(found, bool) and 0 <= found <= _KEY_FILE_LARGEST:
        return float(found)
    raise _wrong("a number, 0 or more")


def _count(found: object) -> int:
    if type(found) is int and 0 <= found <= _KEY_FILE_LARGEST:
        return found
    raise _wrong("a whole number, 0 or more")


_KEY_FILE_LIMITS: dict[str, Callable[[object], float]] = {
    each.name: _amount if each.name.startswith("cost") else _count for each in fields(LimitRules)
}


def _limits(found: object) -> LimitRules:
    if not isinstance(found, dict):
        raise _wrong("an object of limits")
    values: dict[str, Any] = {}
    for name, value in found.items():
        if name not in _KEY_FILE_LIMITS:
            raise _wrong(f"one of {', '.join(_KEY_FILE_LIMITS)}", f".{name}")
        try:
            values[name] = _KEY_FILE_LIMITS[name](value)
        except _WrongError as error:
            raise _wrong(error.args[0], f".{name}") from None
    return LimitRules(**values)


_SHARED: dict[str, Callable[[object], Any]] = {"models": _models, "priority": _priority, "limits": _limits}
_KEY_FILE_FIELDS: dict[str, dict[str, Callable[[object], Any]]] = {
    "key": {"key": _name, "sha256": _digest, "tenant": _name, "expires": _expires, **_SHARED},
    "tenant": {"tenant": _name, **_SHARED},
    "model": {"model": _model, "prompt": _amount, "completion": _amount},
}
"""The fields of each kind of line, with their checks. A line is of the first kind whose field it has."""
_KEY_FILE_REQUIRED = {"key": ("sha256",), "tenant": (), "model": ()}
