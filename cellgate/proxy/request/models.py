"""Which model serves a request for a name. Pure.

In this order: `Naming`, `with_model`, `ModelNames`, `LocalEndpoints`, `ModelField`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import accumulate, islice
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import orjson
from xxhash import xxh3_64_intdigest

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.config.settings import Split
from cellgate.proxy.ingress.reports import lines, readiness, readyz_headers, unit_headers, unit_health
from cellgate.router.board import Board

_POINTS = 1 << 64


class ModelChoice:
    """The names of a configuration (see proxy/config/units.py)."""

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

    __slots__ = ("_choice", "_others", "_session", "asked", "name", "reported")

    def __init__(self, choice: ModelChoice, asked: str, session: str) -> None:
        self._choice = choice
        self._session = session
        self._others = choice.others(asked, self.served(asked))
        self.asked = self.name = asked
        self.reported = b""
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


# Writes another model into a body of JSON that was parsed before. Pure.
#
# Only the bytes of the name are replaced: to write the whole body would cost as much as the request, and
# might change what its prompt cache knows.


_MODEL_IN_BODY_MODEL = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*("[^"\\]*(?:\\.[^"\\]*)*")', re.DOTALL)
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)
_OPENS, _CLOSES = b"{[", b"}]"
_BACKSLASH = ord("\\")
_MENTIONS_MAX = 1000
"""So many models are looked at. A request has one; more are in what it quotes."""
_MODEL_IN_BODY_TOKENS_MAX = 20_000
"""So many strings and brackets are read to find the outermost one: about 5 ms."""

Span = tuple[int, int]


def with_model(body: bytes, old: str, new: str) -> bytes | None:
    """`body`, a JSON object, with the model `new` instead of `old`. None: it was not found, because it stands
    in the middle of a large body, behind too much else, or its key is written in an unusual way.
    """
    window = LIMITS.model_search_bytes
    spans, is_whole = _spans(body, 0, window, old)
    if len(spans) > 1 or not is_whole or len(body) > window:
        spans, is_read = _outermost(body, spans)
        is_whole = is_whole and is_read
    # What was not looked at may have it: then what stands at the end may be a mention of it.
    if not spans and is_whole and len(body) > window:
        spans, is_whole = _spans(body, max(window, len(body) - window), len(body), old)
        if len(spans) > 1 or not is_whole:
            return None
    if not spans:
        return None
    parts, at = [], 0
    for begin, end in spans:
        parts += [body[at:begin], orjson.dumps(new)]
        at = end
    return b"".join([*parts, body[at:]])


def _spans(body: bytes, begin: int, end: int, name: str) -> tuple[list[Span], bool]:
    """Where the name stands as the value of a key `model`, at any depth; and whether all were seen."""
    found: list[Span] = []
    seen = 0
    for match in islice(_MODEL_IN_BODY_MODEL.finditer(body, begin, end), _MENTIONS_MAX):
        seen += 1
        # After a backslash the quote is part of a string that ends in `model`.
        if body[match.start() - 1] != _BACKSLASH and orjson.loads(match[1]) == name:
            found.append(match.span(1))
    return found, seen < _MENTIONS_MAX


def _outermost(body: bytes, spans: Iterable[Span]) -> tuple[list[Span], bool]:
    """Those that belong to the outermost object, as far as the body is read: once, whatever stands in it.
    And whether it was read as far as the last of them.
    """
    found: list[Span] = []
    depth, at, left = 0, 0, _MODEL_IN_BODY_TOKENS_MAX
    for span in spans:
        for match in islice(_TOKEN.finditer(body, at, span[0]), left):
            mark = match[0]
            depth += (mark in _OPENS) - (mark in _CLOSES) if len(mark) == 1 else 0
            left -= 1
        if not left:
            return found, False
        at = span[0]
        if depth == 1:
            found.append(span)
    return found, True


class ModelNames:
    """The models of one board, sorted again only when a unit reports others: there may be thousands."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._reported: list[object] = []
        self._names: list[str] = []

    def names(self) -> list[str]:
        """All of them. The list is the same object as before when nothing has changed."""
        reported: list[object] = [(state.models, state.cards) for state in self._board]
        if reported != self._reported:
            models = [state.models for state in self._board]
            self._reported, self._names = reported, sorted(frozenset[str]().union(*models))
        return self._names

    def facts(self, name: str) -> dict[str, str | int]:
        """What units say of a model: where they differ, its smallest length, and else what the first says."""
        found: dict[str, str | int] = {}
        for state in self._board:
            said = state.cards.get(name, {})
            for key, value in said.items():
                known = found.setdefault(key, value)
                if key == "max_model_len":
                    found[key] = min(known, value, key=int)
        return found


LATEST = ":latest"
"""What Ollama adds to the name of a model that is asked for without a tag."""


def models_meant(board: Board, name: str) -> frozenset[str]:
    """The models that a name may mean that no unit lists; none: it is unknown.

    `NAME:latest`; or all, where units list the same ones and the configuration names none: engines that
    ignore names (llama.cpp) serve it, and others say themselves that they do not.
    """
    if board.knows_model(name + LATEST):
        return frozenset({name + LATEST})
    listed = {state.models for state in board}
    is_reported = any(state.unit.models for state in board)
    return frozenset() if is_reported or len(listed) != 1 else next(iter(listed))


# What the gate answers itself on the data port: models, and health.


_MODEL_PATH = b"/v1/models/"
_UNIT_HEALTH = b"/healthz/unit/"


def unit_asked_about(path: bytes) -> str:
    """The unit whose health this path reports; empty for other paths."""
    if not path.startswith(_UNIT_HEALTH):
        return ""
    return unquote_to_bytes(path[len(_UNIT_HEALTH) :]).decode("utf-8", "replace")


def card(name: str) -> dict[str, object]:
    """A model as `/v1/models` shows it."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "cellgate"}


class LocalEndpoints:
    """Answers from memory."""

    def __init__(self, board: Board, choice: ModelChoice | None = None) -> None:
        self._board = board
        self._models = ModelNames(board)
        self._own_names = choice.names if choice is not None else ()
        self._names: list[str] | None = None
        self._listed = b""

    def answer(self, path: bytes, *, stopping: bool) -> tuple[int, bytes, bytes]:
        """Status, JSON body and header lines for an own path."""
        if path == b"/v1/models":
            return 200, self._list(), b""
        if path == b"/livez":
            return 200, b'{"alive":true}', b""
        if name := unit_asked_about(path):
            status, _ = unit_health(self._board, name)
            headers = unit_headers(self._board, name)
            return status, orjson.dumps({"unit": name, "usable": status == 200}), lines(headers)
        ready, detail = readiness(self._board, stopping)
        # The state of each unit is on the admin port only: clients of the API must not learn addresses.
        del detail["units"]
        headers = readyz_headers(self._board, stopping=stopping)
        return (200 if ready else 503), orjson.dumps(detail), lines(headers)

    def model(self, path: bytes) -> bytes | None:
        """What `/v1/models/NAME` shows of a name of the gate's own; None: units know it, or nobody."""
        name = unquote_to_bytes(path.removeprefix(_MODEL_PATH)).decode("utf-8", "replace")
        return orjson.dumps(self._card(name)) if name in self._own_names else None

    def _card(self, name: str) -> dict[str, object]:
        """A model, with what units say of it. A name of the gate's own is made by the gate."""
        return card(name) | self._models.facts(name)

    def known(self, name: str | None) -> str | None:
        """The model that a path names; None if no unit is known for it: any of them says so itself."""
        return name if name in self._own_names or name in self._models.names() else None

    def _list(self) -> bytes:
        names = self._models.names()
        if names is not self._names:
            cards = [self._card(name) for name in dict.fromkeys((*names, *self._own_names))]
            self._names, self._listed = names, orjson.dumps({"object": "list", "data": cards})
        return self._listed


# The model in a form (multipart/form-data, RFC 7578), and another one in its place. Pure.
#
# Its delimiters are searched for, and what stands between them is not looked at, so the audio in a form costs
# next to nothing. A form that programs may read differently (two models, a name that is written in an unusual
# way) has no model here: any unit may get it, but not for a key that is for some models only.


_CONTENT_TYPE = b"content-type: "
_MODEL_IN_BODY_FORM = re.compile(rb"multipart/form-data[ \t]*;", re.IGNORECASE)
_MODEL_IN_BODY_BOUNDARY = re.compile(
    rb';[ \t]*boundary=(?:"([^"\\]{1,70})"|([^";, \t]{1,70}))', re.IGNORECASE
)
_DISPOSITION = re.compile(rb"content-disposition[ \t]*:[ \t]*form-data[ \t]*(.*)", re.IGNORECASE)
_PARAMETER = re.compile(rb';[ \t]*([^=;"\s]+)[ \t]*=[ \t]*("(?:[^"\\]|\\.)*"|[^;"]*)')
_MODEL_IN_BODY_LENGTH = re.compile(rb"(?<=\r\n)content-length:[^\r\n]*\r\n", re.IGNORECASE)
_MODEL_IN_BODY_HEAD_BYTES = 8192
"""No longer head of a part is read."""
_ODD = b"?"
"""The name of a part that is written in an unusual way."""


class ModelField(NamedTuple):
    """The model of a form: its name, where the head of its part begins, and where the name stands."""

    name: str
    head_at: int
    begin: int
    end: int


def content_type(lines: list[bytes]) -> bytes:
    """What the head of a request says of its body; empty: nothing, or more than one thing."""
    said = [line[len(_CONTENT_TYPE) :].strip() for line in lines if line.startswith(_CONTENT_TYPE)]
    return said[0] if len(said) == 1 else b""


def find_model(lines: list[bytes], body: bytes) -> ModelField | None:
    """The model of the form that a request is. None: it is no form, has no model, or is not sure."""
    kind = content_type(lines)
    boundary = _MODEL_IN_BODY_BOUNDARY.search(kind) if _MODEL_IN_BODY_FORM.match(kind) else None
    if boundary is None:
        return None
    mark = b"--" + (boundary[1] or boundary[2])
    at = 0 if body.startswith(mark) else body.find(b"\r\n" + mark) + 2
    if not body.startswith(mark, at):
        return None
    found: ModelField | None = None
    for _ in range(LIMITS.form_parts):
        line_end = body.find(b"\r\n", at)
        rest = body[at + len(mark) : line_end]
        if body.startswith(b"--", at + len(mark)):
            return found
        head_end = body.find(b"\r\n\r\n", line_end, line_end + _MODEL_IN_BODY_HEAD_BYTES)
        name = _name(body[line_end + 2 : head_end]) if head_end >= 0 and not rest.strip(b" \t") else _ODD
        if name == _ODD:
            return None
        end = body.find(b"\r\n" + mark, head_end + 2)
        if name == b"model":
            value = _text(body[head_end + 4 : end]) if end >= 0 else None
            if value is None or (found is not None and found.name != value):
                return None
            found = found or ModelField(value, line_end + 2, head_end + 4, end)
        if end < 0:
            return found
        at = end + 2
    reached("form_parts")
    return None


def with_form_model(lines: list[bytes], body: bytes, new: str) -> bytes | None:
    """The form with the model `new`. None: its model was not found."""
    field = find_model(lines, body)
    if field is None:
        return None
    # A part may declare its own length, which is of no use to anybody.
    head = _MODEL_IN_BODY_LENGTH.sub(b"", b"\r\n" + body[field.head_at : field.begin])[2:]
    return b"".join((body[: field.head_at], head, new.encode(), body[field.end :]))


def _name(head: bytes) -> bytes:
    """The name of a part; empty: it has none, _ODD: it is not sure."""
    names: list[bytes] = []
    lines = head.split(b"\r\n")
    if head.count(b"\n") >= len(lines) or any(line.startswith((b" ", b"\t")) for line in lines):
        return _ODD
    for line in lines:
        if (said := _DISPOSITION.fullmatch(line)) is None:
            continue
        for parameter, value in _PARAMETER.findall(said[1]):
            if parameter.lower() == b"name":
                is_quoted = value.startswith(b'"')
                names.append(re.sub(rb"\\(.)", rb"\1", value[1:-1]) if is_quoted else value.strip())
            elif parameter.lower().startswith(b"name*"):
                # As in mails (RFC 2231), which RFC 7578 forbids and some programs read.
                return _ODD
    return (names[0] if len(names) == 1 else _ODD) if names else b""


def _text(value: bytes) -> str | None:
    """A name as text; None: it cannot be one."""
    try:
        name = value.decode()
    except UnicodeDecodeError:
        return None
    return name if len(name) <= LIMITS.name_chars else None
