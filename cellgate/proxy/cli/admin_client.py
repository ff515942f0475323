"""What commands ask of the admin port (units, status, events ...): bounded requests, and what to do when one
fails.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote, urlencode

from cellgate.proxy.cli.terminal import ADMIN_VARIABLE, CommandError
from cellgate.proxy.config.load_process import ADMIN_TOKEN_VARIABLE, ConfigError
from cellgate.proxy.config.settings import HASHED, Address

TIMEOUT_S = 5.0
_SET = f"--admin HOST:PORT, or in {ADMIN_VARIABLE}"
CALL_SILENT_S = 30.0
"""Three times what a gate's live stream is silent for at most."""
RELOAD_TIMEOUT_S = 60.0
"""A configuration of a thousand units takes seconds to read."""
ADMIN_CA_VARIABLE = "CELLGATE_ADMIN_CA"
"""A file with the authority that signs the certificate of the admin port; with it, TLS is spoken."""
ADMIN_CERT_VARIABLE = "CELLGATE_ADMIN_CERT"
"""A file with a certificate and its key, to be shown there."""
ENGINE_CONTROL_TIMEOUT_S = 3600.0
"""An engine may finish its requests first, for as long as the gate allows (`timeouts.drain_s`)."""


def units(admin: Address) -> list[dict[str, Any]]:
    """All units of the gate as its `GET /units` shows them. Raises CommandError."""
    found = call(admin, "GET", "/units")
    if not isinstance(found, list):
        raise stranger(admin)
    return found


def status(admin: Address) -> dict[str, Any]:
    """The fleet at a glance, as `GET /status` shows it. Raises CommandError."""
    found = call(admin, "GET", "/status")
    if not isinstance(found, dict) or "units" not in found:
        raise stranger(admin)
    return found


def events(admin: Address) -> list[dict[str, Any]]:
    """The last flips and actions, oldest first. Raises CommandError."""
    found = call(admin, "GET", "/events")
    if not isinstance(found, list):
        raise stranger(admin)
    return found


@contextmanager
def followed(admin: Address) -> Iterator[Iterator[dict[str, Any]]]:
    """What happens from now on, until the gate ends the stream or goes silent. Raises CommandError."""
    with _opened(admin, "GET", "/events?follow=1", CALL_SILENT_S) as reply:
        if reply.headers.get_content_type() != "text/event-stream":
            raise stranger(admin)
        yield _events_of(reply)


def _events_of(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    with suppress(OSError, http.client.HTTPException):
        for line in reply:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def why(admin: Address, unit: str) -> dict[str, Any]:
    """All that is known of a unit, in lines (`why`). Raises CommandError, with a similar name if unknown."""
    found = call(admin, "GET", _path(unit))
    if not isinstance(found, dict) or not isinstance(found.get("why"), list):
        raise stranger(admin)
    return found


def why_model(admin: Address, model: str) -> dict[str, Any] | None:
    """How many units serve a model, explained in lines (`why`). None: no such model. Raises CommandError."""
    found = call(admin, "GET", "/models")
    if not isinstance(found, list):
        raise stranger(admin)
    return next((each for each in found if each.get("name") == model), None)


def link_of(unit: Mapping[str, Any], prefiller: str, decoder: str) -> dict[str, Any]:
    """Of what is known of a unit: why requests are, or are not, split between it and another one (`why`)."""
    for link in unit.get("links", ()):
        if (link["prefiller"], link["decoder"]) == (prefiller, decoder):
            return dict(link)
    line = f"No request was considered for {prefiller} and {decoder} yet: prefiller first, then decoder."
    return {"prefiller": prefiller, "decoder": decoder, "why": [line]}


def set_drain(admin: Address, unit: str, *, drained: bool) -> None:
    """Takes a unit out of rotation or puts it back. Raises CommandError."""
    call(admin, "POST", f"{_path(unit)}/{'drain' if drained else 'undrain'}")


def set_cell_drain(admin: Address, cell: str, *, drained: bool) -> list[str]:
    """The same for all units of a cell, which are returned. Raises CommandError."""
    found = call(admin, "POST", f"/cells/{quote(cell, safe='')}/{'drain' if drained else 'undrain'}")
    try:
        return [str(unit["name"]) for unit in found["units"]]
    except (LookupError, TypeError):
        raise stranger(admin) from None


def drain_least_valued(admin: Address, model: str | None) -> str:
    """Drains the unit whose prefix cache is missed least; returns its name. Raises CommandError."""
    query = f"?{urlencode({'model': model})}" if model else ""
    found = call(admin, "POST", f"/scaling/drain{query}")
    if not isinstance(found, dict) or "name" not in found:
        raise stranger(admin)
    return str(found["name"])


def act_on_engine(admin: Address, unit: str, action: str, mode: str | None) -> str:
    """Pauses, resumes, puts to sleep or wakes the engine of a unit; returns the mode. Raises CommandError.

    The gate answers when the engine has done it.
    """
    query = f"?{urlencode({'mode': mode})}" if mode else ""
    found = call(admin, "POST", f"{_path(unit)}/{action}{query}", timeout_s=ENGINE_CONTROL_TIMEOUT_S)
    if not isinstance(found, dict) or "mode" not in found:
        raise stranger(admin)
    return str(found["mode"])


def reload(admin: Address) -> str:
    """Has the configuration read again; returns what changed.

    Raises ConfigError with every mistake in it, CommandError.
    """
    found = call(admin, "POST", "/reload", timeout_s=RELOAD_TIMEOUT_S)
    if not isinstance(found, dict) or "changed" not in found:
        raise stranger(admin)
    return str(found["changed"])


def explain(admin: Address, asked: Mapping[str, str]) -> dict[str, Any]:
    """Where such a request would go now, as `GET /explain` tells. Raises CommandError."""
    found = call(admin, "GET", f"/explain?{urlencode(asked)}")
    if not isinstance(found, dict) or "units" not in found:
        raise stranger(admin)
    return found


def poison(admin: Address) -> dict[str, Any]:
    """The prompts that are refused, as `GET /poison` shows them. Raises CommandError."""
    found = call(admin, "GET", "/poison")
    if not isinstance(found, dict) or not isinstance(found.get("bans"), list):
        raise stranger(admin)
    return found


def clear_poison(admin: Address, fingerprint: str | None) -> list[str]:
    """Allows a prompt again, or all of them; returns these. Raises CommandError."""
    path = f"/poison/{quote(fingerprint, safe='')}/clear" if fingerprint else "/poison/clear"
    found = call(admin, "POST", path)
    if not isinstance(found, dict) or not isinstance(found.get("cleared"), list):
        raise stranger(admin)
    return [str(name) for name in found["cleared"]]


def _path(unit: str) -> str:
    return f"/units/{quote(unit, safe='')}"


def call(admin: Address, method: str, path: str, timeout_s: float = TIMEOUT_S) -> Any:
    """The gate's reply, from JSON. Raises CommandError, ConfigError."""
    with _opened(admin, method, path, timeout_s) as reply:
        return json.load(reply)


@contextmanager
def _opened(admin: Address, method: str, path: str, timeout_s: float) -> Iterator[http.client.HTTPResponse]:
    """The gate's reply. Raises CommandError, also for what its reader meets."""
    token = os.environ.get(ADMIN_TOKEN_VARIABLE, "")
    # Where the gate has only its hash, so has who works beside it.
    headers = {"Authorization": f"Bearer {token}"} if token and not token.startswith(HASHED) else {}
    tls = _tls()
    scheme = "http" if tls is None else "https"
    request = urllib.request.Request(f"{scheme}://{admin}{path}", method=method, headers=headers)
    # Not through a proxy of the environment: the gate is near, and trusts this machine only without one.
    handlers = [] if tls is None else [urllib.request.HTTPSHandler(context=tls)]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)
    try:
        with opener.open(request, timeout=timeout_s) as reply:
            yield reply
    except urllib.error.HTTPError as error:
        raise _refusal(admin, error) from None
    except (http.client.HTTPException, ValueError):
        raise stranger(admin) from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise CommandError(
            f"no gate answers at {admin} ({getattr(reason, 'strerror', None) or reason}): is it running? "
            f"Set its admin address with {_SET}"
        ) from None


def _tls() -> ssl.SSLContext | None:
    """How to speak to an admin port with TLS; None: plain HTTP. Raises CommandError."""
    if not (ca := os.environ.get(ADMIN_CA_VARIABLE)):
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert := os.environ.get(ADMIN_CERT_VARIABLE):
            context.load_cert_chain(cert)
    except (OSError, ValueError) as error:
        raise CommandError(f"{ADMIN_CA_VARIABLE} or {ADMIN_CERT_VARIABLE}: {error}") from None
    return context


def _refusal(admin: Address, error: urllib.error.HTTPError) -> CommandError | ConfigError:
    """What the gate says of a request it does not grant, and the flag or variable that helps."""
    with error:
        try:
            document = json.load(error)
            if "problems" in document:
                return ConfigError([str(problem) for problem in document["problems"]])
            message = str(document["error"]["message"])
            if error.headers.get("x-request-id"):
                # Only requests of clients have a number.
                return CommandError(f"{admin} is the gate's port for clients: set its admin port with {_SET}")
        except (http.client.HTTPException, OSError, ValueError, LookupError, TypeError):
            return stranger(admin)
    hint = f" (this command sends the token in {ADMIN_TOKEN_VARIABLE})" if error.code in (401, 403) else ""
    return CommandError(f"{message}{hint}")


def stranger(admin: Address) -> CommandError:
    """What is there answers, and not as a gate does."""
    return CommandError(f"the server at {admin} is not a gate's admin port: set that with {_SET}")
