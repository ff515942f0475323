"""The operator's file: recovery, rolls, a load balancer's weight. Its keys, and what is made of them.

Imported where the configuration names such a file, and nowhere else.

In this order: `RecoveryKeys`, `AlbKeys`, `operated`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator

from cellgate.extras.operator.action_settings import (
    ACTION_PACKAGES,
    UNIT,
    AlbTarget,
    CallWebhook,
    LeasePlace,
    Remedy,
    ReplacePods,
    ReplaceTasks,
    RestartService,
    RollPolicy,
    RunCommand,
    SetImage,
    UnitAction,
)
from cellgate.proxy.config import checks
from cellgate.proxy.config.checks import InvalidValueError, word, words
from cellgate.proxy.config.extras import how_to_install
from cellgate.proxy.config.settings import SECRET_VARIABLE
from cellgate.proxy.config.units import Keys, all_but, section
from cellgate.proxy.config.yaml_file import Problem

_OPERATOR_LOOPBACK = re.compile(r"http://(127\.[\d.]+|localhost|\[::1\])[:/]")


class OperatorKeys(Keys):
    """The whole file."""

    recovery: Annotated[
        list[Annotated[tuple[str, Remedy], PlainValidator(remedy)]], AfterValidator(_each_cell_once)
    ] = Field([])
    roll: Annotated[RollPolicy | None, PlainValidator(roll_policy)] = None
    alb: Annotated[AlbTarget | None, PlainValidator(alb_target)] = None
    leases: Annotated[LeasePlace | None, PlainValidator(lease_place)] = None


def program(found: object) -> tuple[str, ...]:
    """A command as a list of words, the first of them a program that can be run now."""
    expected = "a command as a list of words, such as [/usr/local/bin/recover, --now]"
    if isinstance(found, str):
        raise InvalidValueError(expected, f"did you mean [{', '.join(found.split())}]? There is no shell")
    if not isinstance(found, list) or not found or not all(isinstance(word, str) for word in found):
        raise InvalidValueError(
            expected,
            "put each word that is not a string in quotes" if isinstance(found, list) and found else "",
        )
    if any("\0" in word for word in found) or shutil.which(found[0]) is None:
        raise InvalidValueError("an executable program", found=repr(found[0]))
    return tuple(found)


def webhook_url(found: object) -> str:
    """The URL of a webhook: https, or http on this machine."""
    url = checks.page(found)
    if url.startswith("https://") or _OPERATOR_LOOPBACK.match(url):
        return url
    raise InvalidValueError(
        "https://HOST/PATH, or http:// on this machine", f"did you mean 'https{url[4:]}'?"
    )


def run_command(found: object) -> RunCommand:
    """A command for a unit."""
    return RunCommand(program(found))


def call_webhook(found: object) -> CallWebhook:
    """A webhook whose secret is not known yet."""
    return CallWebhook(webhook_url(found))


def unit_selector(found: object) -> str:
    """Labels that choose the pods of one unit."""
    if isinstance(found, str) and UNIT in found and re.fullmatch(r"[!-~]{1,512}", found):
        return found
    raise InvalidValueError(f"labels with {UNIT} for the unit's name, such as app=llama,unit={UNIT}")


def systemd_service(found: object) -> RestartService:
    """A service of this machine, each unit its own."""
    if isinstance(found, str) and UNIT in found and re.fullmatch(r"[A-Za-z0-9:_.@\\{}-]{1,200}", found):
        if shutil.which("systemctl") is None:
            raise ValueError("requires systemctl, which is not on this machine")
        return RestartService(found)
    raise InvalidValueError(f"the name of a service with {UNIT} for the unit's name, such as vllm@{UNIT}")


def installed(key: str, kind: str) -> None:
    """Raises ValueError when the package for actions of this kind is not installed; `key` asks for it."""
    package, extra = ACTION_PACKAGES.get(kind, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        needed = f"requires a package that is not installed: {how_to_install(extra)}"
        raise ValueError(f"{key} {needed}")


class TasksKeys(Keys, of=ReplaceTasks):
    """Which tasks of Amazon ECS."""

    cluster: Annotated[str, PlainValidator(word("the name or ARN of a cluster"))]
    services: Annotated[tuple[str, ...], PlainValidator(words("a list of service names"))]
    region: Annotated[str, PlainValidator(word("the name of a region"))]


class ImageKeys(Keys, of=SetImage):
    """Which image the group of a LeaderWorkerSet gets, and which one back."""

    namespace: Annotated[str, PlainValidator(word("the name of a namespace"))]
    image: Annotated[str, PlainValidator(word("the name of an image"))]
    undo_image: Annotated[str, PlainValidator(word("the name of an image"))] = ""
    container: Annotated[str, PlainValidator(word("the name of a container"))]
    kubeconfig: Annotated[str, PlainValidator(checks.readable_file)]

    def images(self) -> tuple[SetImage, SetImage | None]:
        """The way there, and the way back, if there is one."""
        there = SetImage(self.image, self.namespace, self.container, self.kubeconfig)
        return there, dataclasses.replace(there, image=self.undo_image) if self.undo_image else None


class PodsKeys(Keys, of=ReplacePods):
    """Which pods of a unit go, and how."""

    namespace: Annotated[str, PlainValidator(word("the name of a namespace"))]
    selector: Annotated[str, PlainValidator(unit_selector)]
    evict: Annotated[bool, PlainValidator(checks.flag)]
    kubeconfig: Annotated[str, PlainValidator(checks.readable_file)]


ROLL_WAYS = ("command", "kubernetes", "ecs")
"""Keys of a roll of which there has to be exactly one."""


class RollKeys(Keys, of=RollPolicy):
    """How units get new software."""

    command: Annotated[RunCommand | None, PlainValidator(run_command)] = None
    kubernetes: Annotated[ImageKeys | None, PlainValidator(ImageKeys.model_validate)] = None
    ecs: Annotated[ReplaceTasks | None, section(ReplaceTasks, TasksKeys)] = None
    undo: Annotated[RunCommand | None, PlainValidator(run_command)] = None
    audit: Annotated[str, PlainValidator(checks.log_file)]
    timeout_s: Annotated[float, PlainValidator(checks.seconds)]
    parallel: Annotated[int, PlainValidator(checks.count)]
    max_unavailable: Annotated[int, PlainValidator(checks.count)]
    drain_s: Annotated[float, PlainValidator(checks.seconds)]
    start_s: Annotated[float, PlainValidator(checks.seconds)]
    soak_s: Annotated[float, PlainValidator(checks.seconds)]
    max_errors: Annotated[float, PlainValidator(checks.share)]
    max_degraded: Annotated[float, PlainValidator(checks.share)]


ACTION_WAYS = ("command", "webhook", "kubernetes", "ecs", "systemd")
"""Keys of a remedy of which there has to be exactly one."""


class LeaseKeys(Keys, of=LeasePlace):
    """Where gates without Redis agree on who acts."""

    namespace: Annotated[str, PlainValidator(word("the name of a namespace"))]
    kubeconfig: Annotated[str, PlainValidator(checks.readable_file)]


class RecoveryKeys(Keys, of=Remedy):
    """What is done about units of a cell that stay DOWN. `secret_file` is read here."""

    cell: Annotated[str, PlainValidator(checks.name)]
    command: Annotated[RunCommand | None, PlainValidator(run_command)] = None
    webhook: Annotated[CallWebhook | None, PlainValidator(call_webhook)] = None
    kubernetes: Annotated[ReplacePods | None, section(ReplacePods, PodsKeys)] = None
    ecs: Annotated[ReplaceTasks | None, section(ReplaceTasks, TasksKeys)] = None
    systemd: Annotated[RestartService | None, PlainValidator(systemd_service)] = None
    secret_file: Annotated[str | None, PlainValidator(checks.token_in_file)] = Field(None, repr=False)
    audit: Annotated[str, PlainValidator(checks.log_file)]
    after_s: Annotated[float, PlainValidator(checks.seconds)]
    timeout_s: Annotated[float, PlainValidator(checks.seconds)]
    max_parallel: Annotated[int, PlainValidator(checks.count)]
    max_share: Annotated[float, PlainValidator(checks.share)]
    attempts: Annotated[int, PlainValidator(checks.count)]
    backoff_s: Annotated[float, PlainValidator(checks.seconds)]
    dry_run: Annotated[bool, PlainValidator(checks.flag)]


def remedy(found: object) -> tuple[str, Remedy]:
    """The cell of a mapping, and the remedy that it makes: exactly one way to act."""
    keys = RecoveryKeys.model_validate(found)
    action: UnitAction = _only_one(keys, ACTION_WAYS)
    if keys.secret_file is not None:
        if not isinstance(action, CallWebhook):
            raise ValueError(f"secret_file signs webhooks: {action.kind} does not take it")
        action = replace(action, secret=keys.secret_file)
    installed(action.kind, action.kind)
    return keys.cell, Remedy(action=action, **all_but(keys, "cell", "secret_file", *ACTION_WAYS))


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
    return RollPolicy(action=action, undo=undo, **all_but(keys, "undo", *ROLL_WAYS))


def lease_place(found: object) -> LeasePlace:
    """Where Leases are."""
    keys = LeaseKeys.model_validate(found)
    installed("leases", "kubernetes")
    return LeasePlace(**dict(keys))


def _only_one(keys: Keys, ways: Sequence[str]) -> Any:
    given = {key: way for key in ways if (way := getattr(keys, key)) is not None}
    if len(given) != 1:
        raise InvalidValueError(f"one of {', '.join(ways)}", found=" and ".join(given) or "none")
    [way] = given.values()
    return way


# Keys about the weight of a target group at AWS's Application Load Balancer, and what they have to be.


WEIGHT_MAX = 999
"""The API's limit."""


def _bounded(weight: int) -> int:
    if weight > WEIGHT_MAX:
        raise ValueError(f"is {weight}, and a load balancer takes 1 to {WEIGHT_MAX}")
    return weight


class AlbKeys(Keys, of=AlbTarget):
    """Where the weight of this gate is set."""

    rule: Annotated[str, PlainValidator(word("the ARN of a rule or a listener"))]
    target_group: Annotated[str, PlainValidator(word("the ARN of a target group"))]
    weight: Annotated[int, PlainValidator(checks.count), AfterValidator(_bounded)]
    region: Annotated[str, PlainValidator(word("the name of a region"))]


def alb_target(found: object) -> AlbTarget:
    """The target that a mapping makes."""
    keys = AlbKeys.model_validate(found)
    if not re.match(r"arn:\S+:listener(-rule)?/app/", keys.rule):
        raise ValueError(f"rule is {keys.rule!r}, not the ARN of a rule or a listener of an ALB")
    if ":targetgroup/" not in keys.target_group:
        raise ValueError(f"target_group is {keys.target_group!r}, not the ARN of a target group")
    installed("alb", "ecs")
    return AlbTarget(**dict(keys))


# The file as a whole.


def _each_cell_once(found: list[tuple[str, Remedy]]) -> list[tuple[str, Remedy]]:
    names = [cell for cell, _ in found]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f"duplicate cell {twice!r}")
    return found


OPERATOR_SCHEMA: dict[str, type[Keys]] = {
    "": OperatorKeys,
    "recovery[]": RecoveryKeys,
    "recovery[].kubernetes": PodsKeys,
    "recovery[].ecs": TasksKeys,
    "roll": RollKeys,
    "roll.kubernetes": ImageKeys,
    "roll.ecs": TasksKeys,
    "alb": AlbKeys,
    "leases": LeaseKeys,
}
"""Every mapping of the file by its place, as in proxy/config/schema.py."""

OPERATOR_KINDS: dict[Callable[..., Any], dict[str, Any]] = {
    run_command: {"type": "array", "items": {"type": "string"}},
    call_webhook: {"type": "string", "description": "https://HOST/PATH, or http:// on this machine"},
    unit_selector: {
        "type": "string",
        "description": "labels, with {unit} for the unit's name",
        "pattern": r"\{unit\}|\$\{",
    },
    systemd_service: {"type": "string", "description": "a service with {unit}", "pattern": r"\{unit\}|\$\{"},
}
"""What its checks take, as in proxy/config/schema.py."""


def operated(keys: OperatorKeys, secret: str) -> dict[str, Any]:
    """The settings that the file makes; webhooks without a secret of their own are signed with `secret`."""
    remedies = {cell: _signed(each, secret) for cell, each in keys.recovery}
    return {"remedies": remedies, **all_but(keys, "recovery")}


def _signed(remedy: Remedy, secret: str) -> Remedy:
    match remedy.action:
        case CallWebhook(secret="") as unsigned:
            return replace(remedy, action=replace(unsigned, secret=secret))
    return remedy


def operator_misfits(
    keys: OperatorKeys, secret: str, cells: Collection[str], *, has_redis: bool
) -> Iterator[Problem]:
    """What does not go with the gate's own file: `cells` are the names there (none: not known)."""
    for index, (cell, remedy) in enumerate(keys.recovery):
        if cells and cell not in cells:
            yield ("recovery", index, "cell"), f"no cell has the name {cell!r}; there are: {', '.join(cells)}"
        if isinstance(remedy.action, CallWebhook) and not (remedy.action.secret or secret):
            needed = f"webhook requires secret_file, or the variable {SECRET_VARIABLE}"
            yield ("recovery", index), needed
    if keys.leases is not None and has_redis:
        yield ("leases",), "with redis, gates agree there on who acts: take one of them out"
