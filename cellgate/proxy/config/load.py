"""Configuration: a YAML file, flags and environment become Settings, or one line for every problem.

Flags win over the file. Tokens and keys come from the environment or from files of their own, never from the
configuration, so that the configuration may be shown to anyone.

In this order: `load`, `role_misfits`, `dotted`, `_line`, `_mappings`, `UnitsKeys`.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cellgate.extras import EXTRAS, part_of
from cellgate.proxy.config import yaml_file
from cellgate.proxy.config.checks import InvalidValueError, did_you_mean, token
from cellgate.proxy.config.key_file import KeyFileError, read_keys
from cellgate.proxy.config.load_process import ADMIN_TOKEN_VARIABLE, ConfigError, Overrides
from cellgate.proxy.config.schema import INGREDIENTS, SCHEMA, CellKeys, FileKeys
from cellgate.proxy.config.settings import SECRET_VARIABLE, HeaderNames, RedisAccess, Settings
from cellgate.proxy.config.sources import RedisSource, Source
from cellgate.proxy.config.units import Keys, NodeKeys, ProbeKeys, UnitKeys, all_but, unit_of
from cellgate.proxy.config.yaml_file import KeyPath, Problem
from cellgate.router.nouns import FIXED, Cell, Fleet, Unit

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
_ANYWHERE = {"0.0.0.0", "::"}
_FLAGS = {
    "workers": "--workers",
    "listen": "--listen",
    "admin": "--admin",
    "cells": "--unit",
    "redis": "--redis",
    "policy": "--policy",
    "access_log": "--access-log",
}


def load(path: str | None, overrides: Overrides, environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings that the file at `path` (if any), the flags and the environment make together.

    Raises ConfigError with every problem of all three; a file that holds no YAML mapping has that one only.
    """
    flags = overrides.keys()
    written, repeated = _read(path, environ)
    keys = {**overrides.defaults(), **written, **flags}
    file, misfits = _checked(keys, FileKeys, SCHEMA)
    path = yaml_file.title(path) if path else None
    problems = [_line(path, {}, *problem) for problem in repeated]
    problems += [_line(path, flags, *problem) for problem in (*_repeated_names(keys), *misfits)]
    secrets: dict[str, str] = {}
    for variable in _VARIABLES:
        try:
            secrets[variable] = token(environ[variable]) if environ.get(variable) else ""
        except InvalidValueError as error:
            problems.append(f"{variable}: {sentence(error)}")
    if file is not None:
        more = (*_shared_addresses(file), *role_misfits(file.cells))
        problems += [_line(path, flags, *problem) for problem in more]
        problems += _wrong_keys(file)
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
        written, misfits = _read(path, environ)
    except ConfigError as error:
        problems += error.problems
        return {}, ()
    checked, more = _checked(written, extra.OperatorKeys, extra.OPERATOR_SCHEMA)
    misfits += more
    secret = environ.get(SECRET_VARIABLE, "")
    if checked is not None:
        cells = [cell.name for cell in file.cells] if file is not None else []
        has_redis = file is not None and file.redis is not None
        misfits += extra.operator_misfits(checked, secret, cells, has_redis=has_redis)
    problems += [_line(path, {}, *problem) for problem in misfits]
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


def _read(path: str | None, environ: Mapping[str, str]) -> tuple[dict[object, object], list[Problem]]:
    if path is None:
        return {}, []
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
        "headers": HeaderNames(session=file.session_header),
        "admin_token": secrets[ADMIN_TOKEN_VARIABLE] or file.admin_token_file,
        "agent_token": secrets[AGENT_TOKEN_VARIABLE] or None,
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


# Which roles of units, and which transfer of their cell, go together. Pure.


_ENGINES = {"nixl": "vllm", "sglang": "sglang"}


def role_misfits(cells: Sequence[CellKeys]) -> Iterator[Problem]:
    """What cannot work, with its place."""
    for number, cell in enumerate(cells):
        place = ("cells", number)
        if cell.transfer == "none":
            for index, unit in enumerate(cell.units):
                if unit.role != "both":
                    reason = f"role: {unit.role} requires a transfer of its cell, such as transfer: nixl"
                    yield (*place, "units", index, "role"), reason
            continue
        engine = _ENGINES[cell.transfer]
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


# The text of a configuration problem: its place, what was expected, what was found.


Schema = Mapping[str, type[BaseModel]]
"""Every mapping of a file by its place, as in proxy/config/schema.py."""


def dotted(key_path: KeyPath) -> str:
    """`cells[0].units[1].url`; a key that is no plain word is quoted."""
    parts = (
        f"[{key}]"
        if isinstance(key, int)
        else f".{key if re.fullmatch('[A-Za-z0-9_-]+', key) else repr(key)}"
        for key in key_path
    )
    return "".join(parts).removeprefix(".")


def explained(error: ErrorDetails, schema: Schema) -> Problem:
    """Where an error of the schema is, and the sentence about it."""
    key_path, found = error["loc"], error["input"]
    match error["type"]:
        case "value_error":
            wrong = error["ctx"]["error"]
            return key_path, sentence(wrong, found) if isinstance(wrong, InvalidValueError) else str(wrong)
        case "missing":
            return key_path, "required key is missing"
        case "extra_forbidden":
            return key_path, _gone(key_path, schema) or f"unknown key; {_known_keys(key_path, schema)}"
        case "invalid_key":
            key = _shown(found)
            return (*key_path[:-1], key), f"expected a string as the key, found {key}; put it in quotes"
        case "list_type":
            return key_path, sentence(InvalidValueError("a list", "begin each item with '- '"), found)
        case _:
            return key_path, sentence(InvalidValueError("a mapping", _mapping_hint(key_path, found)), found)


def sentence(wrong: InvalidValueError, found: object = None) -> str:
    """What was expected, what was found, and what may help."""
    text = f"expected {wrong.expected}, found {wrong.found or _shown(found)}"
    return f"{text}; {wrong.hint}" if wrong.hint else text


def _mapping_hint(key_path: KeyPath, found: object) -> str:
    """What the item of a list probably means, where it is but a word: most have a name, units a URL."""
    if not isinstance(found, str) or not isinstance(key_path[-1], int):
        return ""
    return f"write {{name: …, url: {found!r}}}" if "://" in found else f"write {{name: {found}, …}}"


def _shown(found: object) -> str:
    """A value in few words, as YAML has it."""
    match found:
        case None:
            return "nothing"
        case bool():
            return str(found).lower()
        case dict():
            return "a mapping"
        case list():
            return "a list"
    text = repr(found) if isinstance(found, str) else str(found)
    return text if len(text) <= 80 else f"{text[:80]}…"


_TO_OPERATOR = "stands in a file of its own now: operator: FILE, and there {} (docs/operator.md)"
SUCCESSORS: Mapping[str, str] = {
    "cells[].recovery": _TO_OPERATOR.format("recovery: [{cell: NAME, …}]"),
    "roll": _TO_OPERATOR.format("roll: {…}"),
    "alb": _TO_OPERATOR.format("alb: {…}"),
    "leases": _TO_OPERATOR.format("leases: {…}"),
    "redis_username": "is gone: the environment says it, CELLGATE_REDIS_USERNAME",
    "headers": "is gone: session_header: NAME is what can still be chosen",
    "resume_s": "is gone: a client that loses its connection sends its request again",
    "pool_metrics": "is gone: the admin port always has them, at /metrics/engine (docs/ingress.md)",
    "per_unit_metrics": "is gone: each unit has count and sum, cells have histograms (docs/metrics.md)",
    "cells[].discover.period_s": "is gone: a file is read each second, other sources each 5 s",
    "cells[].units[].kv_tokens": "is gone: the engine reports it",
    "cells[].units[].prefill_tokens_s": "is gone: it is measured within seconds",
    "cells[].units[].nodes[].probes[].expect": "is gone: 200 to 299 are good",
    "cells[].units[].nodes[].probes[].period_s": "is gone: a probe runs each second, an exporter's each 5 s",
    "cells[].units[].nodes[].probes[].timeout_s": "is gone: a probe may take 3 s",
}
"""What became of keys that are not there any more."""


def _gone(key_path: KeyPath, schema: Schema) -> str:
    """What the gate does instead of a key that was a setting once; empty: it never was one."""
    place = f"{_level(key_path)}.{key_path[-1]}".lstrip(".")
    if place in SUCCESSORS and schema is SCHEMA:
        return SUCCESSORS[place]
    noun = getattr(schema[_level(key_path)], "became", None)
    for each in dataclasses.fields(noun) if noun is not None else ():
        if each.name == key_path[-1] and each.metadata == FIXED:
            _, _, unit = each.name.rpartition("_")
            unit = f" {unit}" if unit in ("s", "bytes", "tokens") else ""
            return f"is no setting any more: the gate uses {each.default:.9g}{unit}"
    return ""


def _level(key_path: KeyPath) -> str:
    """The place of a key in the schema."""
    return dotted(tuple(0 if isinstance(key, int) else key for key in key_path[:-1])).replace("[0]", "[]")


def _known_keys(key_path: KeyPath, schema: Schema) -> str:
    """The hint for an unknown key: the nearest here, the same elsewhere, or all that there are here."""
    level = _level(key_path)
    here, key = schema[level].model_fields, str(key_path[-1])
    elsewhere = [f"{other}.{key}" for other, keys in schema.items() if key in keys.model_fields]
    near = did_you_mean(key, here) or did_you_mean(".".join(elsewhere[:1]), elsewhere)
    return near or f"known here: {', '.join(here)}"


# What is wrong, and how it is said.


def _line(path: str | None, flags: Mapping[object, object], key_path: KeyPath, text: str) -> str:
    """The problem `text` at `place`, after the flag or the file that it comes from."""
    if key_path and (path is None or key_path[0] in flags):
        return f"{_FLAGS[str(key_path[0])]}: {text}"
    return f"{path}: {dotted(key_path)}: {text}"


def _checked(keys: Mapping[Any, object], whole: type[K], schema: Schema) -> tuple[K | None, list[Problem]]:
    try:
        return whole.model_validate(keys), []
    except ValidationError as error:
        return None, [explained(detail, schema) for detail in error.errors(include_url=False)]


def _shared_addresses(file: FileKeys) -> Iterator[Problem]:
    """Two places to listen on that are one. Port 0 is another one each time."""
    places = {"listen": file.listen, "admin": file.admin, "agent_check": file.agent_check}
    taken = [(key, place) for key, place in places.items() if place is not None and place.port]
    for (one, first), (other, second) in combinations(taken, 2):
        if first.port == second.port and (first.host == second.host or _ANYWHERE & {first.host, second.host}):
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


# Files of units, which a source follows.


PROBLEMS_SHOWN = 3


class UnitsKeys(Keys):
    """Such a file."""

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
        found, problems = yaml_file.parse(path, data, "units")
    except yaml_file.UnreadableError as error:
        raise ConfigError(["; ".join(error.problems)]) from None
    keys, misfits = _checked(found, UnitsKeys, _UNITS_SCHEMA)
    named = [(("units", index), unit) for index, unit in _mappings(found, "units")]
    problems += misfits or _repeated("name", named)
    if keys is None or problems:
        shown = "; ".join(f"{dotted(key_path)}: {text}" for key_path, text in problems[:PROBLEMS_SHOWN])
        more = f"; and {len(problems) - PROBLEMS_SHOWN} more" if len(problems) > PROBLEMS_SHOWN else ""
        raise ConfigError([f"{path}: {shown}{more}"])
    return tuple(unit_of(like.cell, unit, like.api_key) for unit in keys.units)


def main() -> None:
    """Answer the gate's process: see load_process.py. A gate that has ended meanwhile wants no answer."""
    with suppress(EOFError, BrokenPipeError):
        path, flags = pickle.load(sys.stdin.buffer)
        try:
            told: Settings | list[str] = load(path, flags)
        except ConfigError as error:
            told = list(error.problems)
        with open(sys.stdout.fileno(), "wb", closefd=False) as answer:
            pickle.dump(told, answer)


if __name__ == "__main__":
    main()
