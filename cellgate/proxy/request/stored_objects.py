"""What engines keep for a client: stored responses and, with `pass_unlisted`, conversations, files, batches
and the like. Which of them a path, or an answer, is about. Pure.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote_to_bytes

from cellgate.proxy.config.limits import LIMITS

_OBJECT_KINDS = (
    b"responses|conversations|files|batches|videos|vector_stores|assistants|threads|containers|evals|uploads"
)
_ONE = re.compile(rb"/(?:%b)/([^/]+)" % _OBJECT_KINDS)
_ALL = re.compile(rb"/(?:%b)/?$" % _OBJECT_KINDS)
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[^"\\]{1,200})"')
_ANY_ID = re.compile(rb'\s*\{\s*(?:"object"\s*:\s*"[^"\\]*"\s*,\s*)?"id"\s*:\s*"([^"\\]{1,200})"')
_OBJECT_NAMED = re.compile(rb'"((?:resp|conv|file|batch|video|vs|asst|thread)[_-][^"\\]{1,200})"')
_COLLECTIONS = {"conv": "conversations", "file": "files", "batch": "batches", "video": "videos"}


def named_object(path: bytes) -> str | None:
    """The id of the object that a path is about; None: it is about none, or about all of a kind."""
    found = _ONE.search(unquote_to_bytes(path) if b"%" in path else path)
    return None if found is None else found[1].decode("latin-1")[: LIMITS.name_chars]


def is_collection(path: bytes) -> bool:
    """Whether a path is about all objects of a kind: they are made there, and listed."""
    return _ALL.search(unquote_to_bytes(path) if b"%" in path else path) is not None


def objects_in(body: bytes) -> set[str]:
    """The ids of objects that a body names, or seems to."""
    return {found.decode("latin-1") for found in _OBJECT_NAMED.findall(body)}


def response_id(body: bytes) -> str:
    """The id of the stored response that begins like this; empty: it has none."""
    found = _RESPONSE_ID.search(body)
    return found[1].decode("latin-1") if found is not None else ""


def object_id(path: bytes, body: bytes) -> str:
    """The id of an object that was made at a path, by the answer; empty: none was."""
    found = _ANY_ID.match(body) if is_collection(path) else None
    return found[1].decode("latin-1") if found is not None else ""


def path_of(one: str) -> str:
    """Where an engine shows the object of an id."""
    return f"/v1/{_COLLECTIONS.get(re.split('[_-]', one)[0], 'responses')}/{quote(one, safe='')}"
