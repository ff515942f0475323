"""How a configuration problem is explained: its place, what was expected, what was found.

In this order: `explained`, `dotted`, `sentence`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from cellgate.proxy.config.checks import InvalidValueError, MisfitsError, did_you_mean
from cellgate.proxy.config.yaml_file import KeyPath, Problem

Schema = Mapping[str, type[BaseModel]]
"""Every mapping of a file by its place, as in proxy/config/schema.py."""


def explained(error: ErrorDetails, schema: Schema) -> list[Problem]:
    """Where an error of the schema is, and the sentence about it; of a list each item that is wrong."""
    wrong = error["ctx"]["error"] if error["type"] == "value_error" else None
    if isinstance(wrong, MisfitsError):
        return [((*error["loc"], *at), _said(each, found)) for at, each, found in wrong.problems]
    return [_explained(error, schema)]


def _said(wrong: ValueError, found: object) -> str:
    return sentence(wrong, found) if isinstance(wrong, InvalidValueError) else str(wrong)


def _explained(error: ErrorDetails, schema: Schema) -> Problem:
    key_path, found = error["loc"], error["input"]
    match error["type"]:
        case "value_error":
            return key_path, _said(error["ctx"]["error"], found)
        case "missing":
            return key_path, "required key is missing"
        case "extra_forbidden":
            return key_path, f"unknown key; {_known_keys(key_path, schema)}"
        case "invalid_key":
            key = _shown(found)
            return (*key_path[:-1], key), f"expected a string as the key, found {key}; put it in quotes"
        case "list_type":
            return key_path, sentence(InvalidValueError("a list", "begin each item with '- '"), found)
        case _:
            return key_path, sentence(InvalidValueError("a mapping", _mapping_hint(key_path, found)), found)


def dotted(key_path: KeyPath) -> str:
    """`cells[0].units[1].url`; a key that is no plain word is quoted."""
    parts = (
        f"[{key}]"
        if isinstance(key, int)
        else f".{key if re.fullmatch('[A-Za-z0-9_-]+', key) else repr(key)}"
        for key in key_path
    )
    return "".join(parts).removeprefix(".")


def unit_at(keys: object, key_path: KeyPath) -> str:
    """` of unit NAME` for what is within a unit that says its name; else nothing."""
    name = ""
    for above, part in zip((None, *key_path), key_path, strict=False):
        if isinstance(keys, dict):
            keys = keys.get(part)
        elif isinstance(keys, list) and isinstance(part, int) and part < len(keys):
            keys = keys[part]
            if above == "units" and isinstance(keys, dict) and isinstance(keys.get("name"), str):
                name = keys["name"]
        else:
            break
    return f" of unit {name[:128]}" if name and key_path[-1] not in ("name", name) else ""


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


def _level(key_path: KeyPath) -> str:
    """The place of a key in the schema."""
    return dotted(tuple(0 if isinstance(key, int) else key for key in key_path[:-1])).replace("[0]", "[]")


def _known_keys(key_path: KeyPath, schema: Schema) -> str:
    """The hint for an unknown key: the nearest here, the same elsewhere, or all that there are here."""
    level = _level(key_path)
    here, key = schema[level].model_fields, str(key_path[-1])
    other_places = [f"{other}.{key}" for other, keys in schema.items() if key in keys.model_fields]
    near = did_you_mean(key, here) or did_you_mean(".".join(other_places[:1]), other_places)
    return near or f"known here: {', '.join(here)}"
