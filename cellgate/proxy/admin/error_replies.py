"""Errors of the admin port: one line of JSON, whose message says what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from http import HTTPStatus

import orjson
from aiohttp import web

from cellgate.proxy.admin.responses import reply
from cellgate.proxy.ingress.envoy_health import HeaderPairs

NAMES_SHOWN = 20


class NotHereError(Exception):
    """There is nothing of this name; the message lists the names."""


def unknown(noun: str, name: str, known: Iterable[str]) -> NotHereError:
    """No `noun` has this name: the error names one that is near, or what there is."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    some = ", ".join(names[:NAMES_SHOWN]) + (", …" if len(names) > NAMES_SHOWN else "")
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {some or 'none'}"
    return NotHereError(f"no {noun} is named {name!r}{hint}")


def error_reply(status: HTTPStatus, message: str, headers: HeaderPairs = ()) -> web.Response:
    """`{"error": {"code", "message"}}`."""
    error = {"error": {"code": status.name.lower(), "message": message}}
    return reply(orjson.dumps(error, option=orjson.OPT_APPEND_NEWLINE), status, headers=headers)
