"""What is configured about recovery: its keys, what they have to be, and the remedies that they make."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Field, PlainValidator

from cellgate.proxy.config import values
from cellgate.proxy.config.remedy import Remedy
from cellgate.proxy.config.units import Keys
from cellgate.proxy.config.values import MisfitError
from cellgate.proxy.config.yaml_file import Problem

SECRET_VARIABLE = "CELLGATE_WEBHOOK_SECRET"

_GIVEN = Remedy(audit="")
_LOOPBACK = re.compile(r"http://(127\.[\d.]+|localhost|\[::1\])[:/]")


def program(found: object) -> tuple[str, ...]:
    """A command as a list of words, the first of them a program that can be run now."""
    expected = "a command as a list of words, such as [/usr/local/bin/recover, --now]"
    if isinstance(found, str):
        raise MisfitError(expected, f"did you mean [{', '.join(found.split())}]? There is no shell")
    if not isinstance(found, list) or not found or not all(isinstance(word, str) for word in found):
        raise MisfitError(
            expected,
            "put each word that is not a string in quotes" if isinstance(found, list) and found else "",
        )
    if any("\0" in word for word in found) or shutil.which(found[0]) is None:
        raise MisfitError("an executable program", found=repr(found[0]))
    return tuple(found)


def webhook_url(found: object) -> str:
    """The URL of a webhook: https, or http on this machine."""
    url = values.page(found)
    if url.startswith("https://") or _LOOPBACK.match(url):
        return url
    raise MisfitError("https://HOST/PATH, or http:// on this machine", f"did you mean 'https{url[4:]}'?")


def audit_file(found: object) -> str:
    """The name of a file that can be appended to, or made."""
    if not isinstance(found, str) or not found:
        raise MisfitError("a file name")
    path = Path(found)
    is_other = path.exists() and not path.is_file()
    if is_other or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise MisfitError("a writable file in an existing directory", found=repr(found))
    return found


class RecoveryKeys(Keys):
    """What is done about units of a cell that stay DOWN. `secret_file` is read here."""

    command: Annotated[tuple[str, ...], PlainValidator(program)] = _GIVEN.command
    webhook: Annotated[str, PlainValidator(webhook_url)] = _GIVEN.webhook
    secret_file: Annotated[str | None, PlainValidator(values.token_in_file)] = Field(None, repr=False)
    audit: Annotated[str, PlainValidator(audit_file)]
    after_s: Annotated[float, PlainValidator(values.seconds)] = _GIVEN.after_s
    timeout_s: Annotated[float, PlainValidator(values.seconds)] = _GIVEN.timeout_s
    max_parallel: Annotated[int, PlainValidator(values.count)] = _GIVEN.max_parallel
    max_share: Annotated[float, PlainValidator(values.share)] = _GIVEN.max_share
    attempts: Annotated[int, PlainValidator(values.count)] = _GIVEN.attempts
    backoff_s: Annotated[float, PlainValidator(values.seconds)] = _GIVEN.backoff_s
    dry_run: Annotated[bool, PlainValidator(values.flag)] = _GIVEN.dry_run


def remedy(found: object) -> Remedy:
    """The remedy that a mapping makes: exactly one way to act."""
    keys = RecoveryKeys.model_validate(found)
    if bool(keys.command) == bool(keys.webhook):
        raise MisfitError("either command or webhook", found="both" if keys.command else "neither")
    if keys.command and keys.secret_file is not None:
        raise ValueError("secret_file signs webhooks: a command does not take it")
    given = {key: value for key, value in keys if key != "secret_file"}
    return Remedy(**given, secret=keys.secret_file or "")


class _Cell(Protocol):
    """What is read of a cell here."""

    @property
    def name(self) -> str: ...
    @property
    def recovery(self) -> Remedy | None: ...


def remedies(cells: Sequence[_Cell], secret: str) -> dict[str, Remedy]:
    """Remedies by cell; webhooks without a secret of their own are signed with `secret`."""
    found = {cell.name: cell.recovery for cell in cells if cell.recovery is not None}
    return {cell: replace(remedy, secret=remedy.secret or secret) for cell, remedy in found.items()}


def unsigned(cells: Sequence[_Cell], secret: str) -> Iterator[Problem]:
    """Webhooks without a secret, whose calls could be forged."""
    for index, cell in enumerate(cells):
        if cell.recovery is not None and cell.recovery.webhook and not (cell.recovery.secret or secret):
            needed = f"webhook requires secret_file, or the variable {SECRET_VARIABLE}"
            yield ("cells", index, "recovery"), needed
