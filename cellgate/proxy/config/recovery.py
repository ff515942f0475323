"""What is configured about recovery and rolls: keys, what they have to be, and what is made of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import Field, PlainValidator

from cellgate.proxy.config import values
from cellgate.proxy.config.remedy import LeasePlace, Remedy
from cellgate.proxy.config.roll_policy import RollPolicy
from cellgate.proxy.config.unit_action_keys import (
    ImageKeys,
    PodsKeys,
    TasksKeys,
    call_webhook,
    installed,
    run_command,
    systemd_service,
)
from cellgate.proxy.config.unit_actions import (
    CallWebhook,
    ReplacePods,
    ReplaceTasks,
    RestartService,
    RunCommand,
    UnitAction,
)
from cellgate.proxy.config.units import Keys, section
from cellgate.proxy.config.values import MisfitError
from cellgate.proxy.config.word_values import word
from cellgate.proxy.config.yaml_file import Problem

SECRET_VARIABLE = "CELLGATE_WEBHOOK_SECRET"

_GIVEN = Remedy("", RunCommand(()))


def log_file(found: object) -> str:
    """The name of a file that can be appended to, or made."""
    if not isinstance(found, str) or not found:
        raise MisfitError("a file name")
    path = Path(found)
    is_other = path.exists() and not path.is_file()
    if is_other or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise MisfitError("a writable file in an existing directory", found=repr(found))
    return found


_LEASES = LeasePlace()
_ROLL = RollPolicy(RunCommand(()), audit="")
ROLL_WAYS = ("command", "kubernetes", "ecs")
"""Keys of a roll of which there has to be exactly one."""


class RollKeys(Keys):
    """How units get new software."""

    command: Annotated[RunCommand | None, PlainValidator(run_command)] = None
    kubernetes: Annotated[ImageKeys | None, PlainValidator(ImageKeys.model_validate)] = None
    ecs: Annotated[ReplaceTasks | None, section(ReplaceTasks, TasksKeys)] = None
    undo: Annotated[RunCommand | None, PlainValidator(run_command)] = None
    audit: Annotated[str, PlainValidator(log_file)]
    timeout_s: Annotated[float, PlainValidator(values.seconds)] = _ROLL.timeout_s
    parallel: Annotated[int, PlainValidator(values.count)] = _ROLL.parallel
    max_unavailable: Annotated[int, PlainValidator(values.count)] = _ROLL.max_unavailable
    drain_s: Annotated[float, PlainValidator(values.seconds)] = _ROLL.drain_s
    start_s: Annotated[float, PlainValidator(values.seconds)] = _ROLL.start_s
    soak_s: Annotated[float, PlainValidator(values.seconds)] = _ROLL.soak_s
    max_errors: Annotated[float, PlainValidator(values.share)] = _ROLL.max_errors
    max_degraded: Annotated[float, PlainValidator(values.share)] = _ROLL.max_degraded


WAYS = ("command", "webhook", "kubernetes", "ecs", "systemd")
"""Keys of a remedy of which there has to be exactly one."""


class LeaseKeys(Keys):
    """Where gates without Redis agree on who acts."""

    namespace: Annotated[str, PlainValidator(word("the name of a namespace"))] = _LEASES.namespace
    kubeconfig: Annotated[str, PlainValidator(values.readable_file)] = _LEASES.kubeconfig


class RecoveryKeys(Keys):
    """What is done about units of a cell that stay DOWN. `secret_file` is read here."""

    command: Annotated[RunCommand | None, PlainValidator(run_command)] = None
    webhook: Annotated[CallWebhook | None, PlainValidator(call_webhook)] = None
    kubernetes: Annotated[ReplacePods | None, section(ReplacePods, PodsKeys)] = None
    ecs: Annotated[ReplaceTasks | None, section(ReplaceTasks, TasksKeys)] = None
    systemd: Annotated[RestartService | None, PlainValidator(systemd_service)] = None
    secret_file: Annotated[str | None, PlainValidator(values.token_in_file)] = Field(None, repr=False)
    audit: Annotated[str, PlainValidator(log_file)]
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
    action: UnitAction = _only_one(keys, WAYS)
    if keys.secret_file is not None:
        if not isinstance(action, CallWebhook):
            raise ValueError(f"secret_file signs webhooks: {action.kind} does not take it")
        action = replace(action, secret=keys.secret_file)
    installed(action.kind, action.kind)
    return Remedy(action=action, **_without(keys, "secret_file", *WAYS))


def roll_policy(found: object) -> RollPolicy:
    """The policy that a mapping makes: exactly one way to act, and one back."""
    keys = RollKeys.model_validate(found)
    way = _only_one(keys, ROLL_WAYS)
    undo: UnitAction | None = keys.undo
    action: UnitAction = way
    if isinstance(way, ImageKeys):
        if undo is not None:
            raise ValueError("undo is a command: kubernetes takes undo_image instead")
        action, undo = way.images()
    elif isinstance(way, ReplaceTasks):
        action = replace(way, deploy=True)
    installed(action.kind, action.kind)
    return RollPolicy(action=action, undo=undo, **_without(keys, "undo", *ROLL_WAYS))


def lease_place(found: object) -> LeasePlace:
    """Where Leases are."""
    keys = LeaseKeys.model_validate(found)
    installed("leases", "kubernetes")
    return LeasePlace(**dict(keys))


def _only_one(keys: Keys, ways: Sequence[str]) -> Any:
    given = {key: way for key in ways if (way := getattr(keys, key)) is not None}
    if len(given) != 1:
        raise MisfitError(f"one of {', '.join(ways)}", found=" and ".join(given) or "none")
    [way] = given.values()
    return way


def _without(keys: Keys, *names: str) -> dict[str, Any]:
    return {key: value for key, value in keys if key not in names}


class _Cell(Protocol):
    """What is read of a cell here."""

    @property
    def name(self) -> str: ...
    @property
    def recovery(self) -> Remedy | None: ...


def remedies(cells: Sequence[_Cell], secret: str) -> dict[str, Remedy]:
    """Remedies by cell; webhooks without a secret of their own are signed with `secret`."""
    found = {cell.name: cell.recovery for cell in cells if cell.recovery is not None}
    return {cell: _signed(remedy, secret) for cell, remedy in found.items()}


def _signed(remedy: Remedy, secret: str) -> Remedy:
    match remedy.action:
        case CallWebhook(secret="") as unsigned:
            return replace(remedy, action=replace(unsigned, secret=secret))
    return remedy


def unsigned(cells: Sequence[_Cell], secret: str) -> Iterator[Problem]:
    """Webhooks without a secret, whose calls could be forged."""
    for index, cell in enumerate(cells):
        action = cell.recovery.action if cell.recovery is not None else None
        if isinstance(action, CallWebhook) and not (action.secret or secret):
            needed = f"webhook requires secret_file, or the variable {SECRET_VARIABLE}"
            yield ("cells", index, "recovery"), needed
