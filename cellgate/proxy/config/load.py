"""Configuration: a YAML file, flags and environment become Settings, or one line for every problem.

Flags win over the file. Tokens and keys come from the environment or from files of their own, never from the
configuration, so that the configuration may be shown to anyone.

In this order: `load`, `role_misfits`, `ProblemSource`, `_mappings`, `UnitsKeys`.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from cellgate.extras import EXTRAS, part_of
from cellgate.proxy.config import yaml_file
from cellgate.proxy.config.checks import PAIRS, InvalidValueError, admin_token, token
from cellgate.proxy.config.key_file import KeyFileError, read_keys
from cellgate.proxy.config.load_process import ADMIN_TOKEN_VARIABLE, ConfigError, Overrides
from cellgate.proxy.config.problems import Schema, dotted, explained, sentence, unit_at
from cellgate.proxy.config.schema import INGREDIENTS, SCHEMA, CellKeys, FileKeys
from cellgate.proxy.config.settings import SECRET_VARIABLE, HeaderNames, RedisAccess, Settings
from cellgate.proxy.config.sources import RedisSource, Source
from cellgate.proxy.config.units import Keys, NodeKeys, ProbeKeys, UnitKeys, all_but, unit_of
from cellgate.proxy.config.yaml_file import KeyPath, Problem, YamlFile
from cellgate.router.nouns import Cell, Fleet, Unit

AGENT_TOKEN_VARIABLE = "CELLGATE_AGENT_TOKEN"
REDIS_USERNAME_VARIABLE = "CELLGATE_REDIS_USERNAME"
REDIS_PASSWORD_VARIABLE = "CELLGATE_REDIS_PASSWORD"
FLEET_SECRET_VARIABLE = "CELLGATE_FLEET_SECRET"
UNIT_API_KEY_VARIABLE = "CELLGATE_UNIT_API_KEY"
_VARIABLES = (
    ADMIN_TOKEN_VARIABLE,
    AGENT_TOKEN_VARIABLE,
    FLEET_SECRET_VARIABLE,
    UNIT_API_KEY_VARIABLE,
    REDIS_USERNAME_VARIABLE,
    REDIS_PASSWORD_VARIABLE,
    SECRET_VARIABLE,
)

K = TypeVar("K", bound=Keys)
_ALL_ADDRESSES = {"0.0.0.0", "::"}
_FLAGS = {
    "workers": "--workers",
    "listen": "--listen",
    "admin": "--admin",
    "cells": "--unit",
    "redis": "--redis",
    "policy": "--policy",
    "access_log": "--access-log",
}


def load(
    path: str | None,
    overrides: Overrides,
    environ: Mapping[str, str] = os.environ,
    also: Callable[[FileKeys], Iterable[str]] | None = None,
) -> Settings:
    """The settings that the file at `path` (if any), the flags and the environment make together.

    Raises ConfigError with every problem of all three, and those that `also` finds; a file that holds no YAML
    mapping has that one only.
    """
    flags = overrides.keys()
    document = _read(path, environ)
    keys = {**overrides.defaults(), **document.found, **flags}
    file, misfits = _checked(keys, FileKeys, SCHEMA)
    place = ProblemSource(yaml_file.title(path) if path else None, document, flags)
    problems = place.lines(document.repeated, in_file=True)
    problems += place.lines([*_repeated_names(keys), *misfits])
    secrets: dict[str, str] = {}
    for variable in _VARIABLES:
        try:
            read = admin_token if variable == ADMIN_TOKEN_VARIABLE else token
            secrets[variable] = read(environ[variable]) if environ.get(variable) else ""
        except InvalidValueError as error:
            problems.append(f"{variable}: {sentence(error)}")
    rest, more = (file, []) if file is not None else _rest(keys, misfits)
    if rest is not None:
        more += [*_shared_addresses(rest), *role_misfits(rest.cells)]
        problems += [*place.lines(more), *_wrong_keys(rest), *(also(rest) if also is not None else ())]
    operator, operator_files = _operator(keys, file, environ, problems)
    if file is None or problems:
        raise ConfigError(problems)
    return _settings(file, operator, secrets, (*_secret_files(keys), *operator_files))


def _operator(
    keys: Mapping[Any, object], file: FileKeys | None, environ: Mapping[str, str], problems: list[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings of the operator's file, if one is named, and the files of secrets there; what is wrong
    with it is added to `problems`.
    """
    path = keys.get("operator")
    if not isinstance(path, str) or not os.access(path, os.R_OK) or "operator" not in EXTRAS:
        return {}, ()
    extra = part_of("operator", "keys")
    try:
        document = _read(path, environ)
    except ConfigError as error:
        problems += error.problems
        return {}, ()
    written = document.found
    checked, more = _checked(written, extra.OperatorKeys, extra.OPERATOR_SCHEMA)
    misfits = [*document.repeated, *more]
    secret = environ.get(SECRET_VARIABLE, "")
    if checked is not None:
        cells = [cell.name for cell in file.cells] if file is not None else []
        has_redis = file is not None and file.redis is not None
        misfits += extra.operator_misfits(checked, secret, cells, has_redis=has_redis)
    problems += ProblemSource(path, document).lines(misfits)
    return extra.operated(checked, secret) if checked is not None else {}, tuple(_secret_files(written))


def _secret_files(found: object) -> Iterator[str]:
    """The files of tokens and keys that are named anywhere in the configuration."""
    if isinstance(found, dict):
        for key, value in found.items():
            if isinstance(value, str) and str(key).endswith("_file"):
                yield value
            else:
                yield from _secret_files(value)
    elif isinstance(found, list):
        for each in found:
            yield from _secret_files(each)


def _read(path: str | None, environ: Mapping[str, str]) -> YamlFile:
    if path is None:
        return YamlFile({}, [])
    try:
        return yaml_file.read(path, environ)
    except yaml_file.UnreadableError as error:
        raise ConfigError(list(error.problems)) from None


def _settings(
    file: FileKeys, operator: Mapping[str, Any], secrets: Mapping[str, str], secret_files: tuple[str, ...]
) -> Settings:
    api_key = secrets[UNIT_API_KEY_VARIABLE]
    made: dict[str, Any] = {
        "fleet": Fleet(
            cells=tuple(Cell(**all_but(cell, "discover", "units")) for cell in file.cells),
            units=tuple(unit_of(cell.name, unit, api_key) for cell in file.cells for unit in cell.units),
        ),
        "sources": _sources(file, api_key),
        "redis": _redis(file, secrets),
        "headers": HeaderNames(sessions=file.session_headers),
        "admin_token": secrets[ADMIN_TOKEN_VARIABLE] or file.admin_token_file,
        "agent_token": secrets[AGENT_TOKEN_VARIABLE] or file.agent_token_file,
        "fleet_secret": secrets[FLEET_SECRET_VARIABLE] or file.fleet_secret_file,
        "secret_files": secret_files,
    }
    return Settings(**all_but(file, *made, *INGREDIENTS), **made, **operator)


def _sources(file: FileKeys, api_key: str) -> tuple[Source, ...]:
    if file.discovery:
        return (RedisSource(),)
    return tuple(cell.discover.source(cell.name, api_key) for cell in file.cells if cell.discover)


def _redis(file: FileKeys, secrets: Mapping[str, str]) -> RedisAccess | None:
    if file.redis is None:
        return None
    return RedisAccess(
        file.redis,
        secrets[REDIS_USERNAME_VARIABLE] or None,
        secrets[REDIS_PASSWORD_VARIABLE] or file.redis_password_file,
        file.redis_prefix,
    )


def _wrong_keys(file: FileKeys) -> Iterable[str]:
    if file.keys is not None:
        try:
            read_keys(file.keys.file)
        except KeyFileError as error:
            return error.problems
    return ()


_LOADED_ENGINES = {"nixl": "vllm", "sglang": "sglang"}


def role_misfits(cells: Sequence[CellKeys]) -> Iterator[Problem]:
    """Which roles of units do not go with each other, or with the transfer of their cell, and where."""
    for number, cell in enumerate(cells):
        place = ("cells", number)
        if cell.transfer == "none":
            for index, unit in enumerate(cell.units):
                if unit.role != "both":
                    reason = f"role: {unit.role} requires a transfer of its cell, such as transfer: nixl"
                    yield (*place, "units", index, "role"), reason
            continue
        engine = _LOADED_ENGINES[cell.transfer]
        for unit in cell.units:
            if unit.engine not in ("", engine):
                reason = f"transfer: {cell.transfer} requires {engine}, and unit {unit.name} is {unit.engine}"
                yield (*place, "transfer"), reason
        # What is discovered is not known yet.
        if cell.discover is None and (reason := _why_no_pair(cell)):
            yield (*place, "transfer"), reason


def _why_no_pair(cell: CellKeys) -> str:
    """Why no two units of a cell are a pair; empty: some are."""
    roles = [unit.role for unit in cell.units]
    if cell.transfer == "sglang":
        missing = " and none with role: ".join(role for role in ("prefill", "decode") if role not in roles)
        more = "transfer: sglang requires both; units with role: both get whole requests only"
        return f"cell {cell.name} has no unit with role: {missing}; {more}" if missing else ""
    if all(role == "prefill" for role in roles):
        return f"cell {cell.name} has no unit for answers: give one of its units role: decode or both"
    if len(roles) < 2 or all(role == "decode" for role in roles):
        return f"cell {cell.name} has no pair: give it a second unit, with role: prefill or both"
    return ""


class ProblemSource(NamedTuple):
    """What problems are in: a file (None: there is none), and flags that stand for keys of it."""

    path: str | None
    document: YamlFile
    flags: Mapping[object, object] = MappingProxyType({})

    def lines(self, problems: Iterable[Problem], *, in_file: bool = False) -> list[str]:
        """Each after its flag, or its file, line and place there. `in_file`: flags have no part in it."""
        return [self._line(key_path, text, in_file=in_file) for key_path, text in problems]

    def _line(self, key_path: KeyPath, text: str, *, in_file: bool) -> str:
        if key_path and (self.path is None or (key_path[0] in self.flags and not in_file)):
            return f"{_FLAGS[str(key_path[0])]}: {text}"
        line = self.document.line(key_path)
        where = f"{self.path}:{line}" if line else self.path
        return f"{where}: {dotted(key_path)}{unit_at(self.document.found, key_path)}: {text}"


_ANY_CELLS = [{"name": "any", "units": [{"name": "any", "url": "http://any"}]}]


def _rest(keys: Mapping[Any, object], misfits: Sequence[Problem]) -> tuple[FileKeys | None, list[Problem]]:
    """The file without what is wrong in it, so that later checks see the rest; and what is wrong there."""
    wrong = [key_path for key_path, _ in misfits]
    file, more = _checked(_without(keys, wrong), FileKeys, SCHEMA)
    known = {key_path[:2] for key_path in wrong if len(key_path) > 1} | set(wrong)
    more = [(at, text) for at, text in more if not known & {at[:size] for size in range(1, len(at) + 1)}]
    if file is None:
        whole = [key_path[:1] for key_path in (*wrong, *(at for at, _ in more))]
        file, _ = _checked(_without(keys, whole), FileKeys, SCHEMA)
    return file, more


def _without(keys: Mapping[Any, object], wrong: Iterable[KeyPath]) -> dict[Any, object]:
    """All but the keys where these are: one of a section alone, and of a certificate what goes with it."""
    left = dict(keys)
    for top, *below in filter(None, wrong):
        section = left.get(top)
        if top == "cells":
            left[top] = _ANY_CELLS
        elif isinstance(section, dict) and below:
            pairs = [pair for pair in PAIRS if top == "tls" and below[0] in pair]
            gone = pairs[0] if pairs else below[:1]
            left[top] = {key: value for key, value in section.items() if key not in gone}
        else:
            left.pop(top, None)
    return left


def _checked(keys: Mapping[Any, object], whole: type[K], schema: Schema) -> tuple[K | None, list[Problem]]:
    try:
        return whole.model_validate(keys), []
    except ValidationError as error:
        return None, [each for one in error.errors(include_url=False) for each in explained(one, schema)]


def _shared_addresses(file: FileKeys) -> Iterator[Problem]:
    """Two places to listen on that are one. Port 0 is another one each time."""
    places = {"listen": file.listen, "admin": file.admin, "agent_check": file.agent_check}
    taken = [(key, place) for key, place in places.items() if place is not None and place.port]
    for (one, first), (other, second) in combinations(taken, 2):
        if first.port == second.port and (
            first.host == second.host or _ALL_ADDRESSES & {first.host, second.host}
        ):
            yield (other,), f"{second} is taken by {one} ({first}); choose another port"


# Duplicate names. This checks the file as written, because a bad value elsewhere must not hide them.


def _mappings(parent: object, key: str) -> list[tuple[int, dict[str, object]]]:
    """The mappings in the list under `key`, with their indexes; the schema minds all else."""
    items = parent.get(key) if isinstance(parent, dict) else None
    if not isinstance(items, list):
        return []
    return [(index, item) for index, item in enumerate(items) if isinstance(item, dict)]


def _repeated_names(keys: object) -> Iterator[Problem]:
    """Cells and units of the same name, units at the same URL, nodes of the same name in one unit."""
    cells = [(("cells", c), cell) for c, cell in _mappings(keys, "cells")]
    units = [
        ((*key_path, "units", u), unit) for key_path, cell in cells for u, unit in _mappings(cell, "units")
    ]
    yield from _repeated("name", cells)
    yield from _repeated("name", units)
    yield from _repeated("url", units)
    for key_path, unit in units:
        yield from _repeated(
            "name", [((*key_path, "nodes", n), node) for n, node in _mappings(unit, "nodes")]
        )


def _repeated(key: str, items: Iterable[tuple[KeyPath, dict[str, object]]]) -> Iterator[Problem]:
    seen: set[str] = set()
    for key_path, item in items:
        value = item.get(key)
        if isinstance(value, str) and value in seen:
            yield (*key_path, key), f"duplicate {key} {value!r}"
        elif isinstance(value, str):
            seen.add(value)


PROBLEMS_SHOWN = 3


class UnitsKeys(Keys):
    """A file of units, which a source follows."""

    units: list[UnitKeys]


_UNITS_SCHEMA: Schema = {
    "": UnitsKeys,
    "units[]": UnitKeys,
    "units[].nodes[]": NodeKeys,
    "units[].nodes[].probes[]": ProbeKeys,
}


def units_in(path: str, data: bytes, like: Unit) -> tuple[Unit, ...]:
    """The units of the file at `path` with this content. Raises ConfigError with one line."""
    try:
        found, problems, _ = yaml_file.parse(path, data, "units")
    except yaml_file.UnreadableError as error:
        raise ConfigError(["; ".join(error.problems)]) from None
    keys, misfits = _checked(found, UnitsKeys, _UNITS_SCHEMA)
    named = [(("units", index), unit) for index, unit in _mappings(found, "units")]
    problems += misfits or _repeated("name", named)
    if keys is None or problems:
        listed = (f"{dotted(at)}{unit_at(found, at)}: {text}" for at, text in problems[:PROBLEMS_SHOWN])
        shown = "; ".join(listed)
        more = f"; and {len(problems) - PROBLEMS_SHOWN} more" if len(problems) > PROBLEMS_SHOWN else ""
        raise ConfigError([f"{path}: {shown}{more}"])
    return tuple(unit_of(like.cell, unit, like.api_key) for unit in keys.units)


def main() -> None:
    """Answer the gate's process: see load_process.py. A gate that has ended meanwhile wants no answer."""
    with suppress(EOFError, BrokenPipeError):
        path, flags = pickle.load(sys.stdin.buffer)
        try:
            reported: Settings | list[str] = load(path, flags)
        except ConfigError as error:
            reported = list(error.problems)
        with open(sys.stdout.fileno(), "wb", closefd=False) as answer:
            pickle.dump(reported, answer)


if __name__ == "__main__":
    main()
