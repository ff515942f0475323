"""What may be configured about actions on units: keys, and the checks of their values."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
from typing import Annotated

from pydantic import PlainValidator

from cellgate.proxy.config import values
from cellgate.proxy.config.unit_actions import (
    ACTION_PACKAGES,
    UNIT,
    CallWebhook,
    ReplacePods,
    ReplaceTasks,
    RestartService,
    RunCommand,
    SetImage,
)
from cellgate.proxy.config.units import Keys
from cellgate.proxy.config.values import MisfitError
from cellgate.proxy.config.word_values import word, words

_LOOPBACK = re.compile(r"http://(127\.[\d.]+|localhost|\[::1\])[:/]")
_IMAGE = SetImage("")
_PODS = ReplacePods()
_TASKS = ReplaceTasks("")


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
    raise MisfitError(f"labels with {UNIT} for the unit's name, such as app=llama,unit={UNIT}")


def systemd_service(found: object) -> RestartService:
    """A service of this machine, each unit its own."""
    if isinstance(found, str) and UNIT in found and re.fullmatch(r"[A-Za-z0-9:_.@\\{}-]{1,200}", found):
        if shutil.which("systemctl") is None:
            raise ValueError("requires systemctl, which is not on this machine")
        return RestartService(found)
    raise MisfitError(f"the name of a service with {UNIT} for the unit's name, such as vllm@{UNIT}")


def installed(key: str, kind: str) -> None:
    """Raises ValueError when the package for actions of this kind is not installed; `key` asks for it."""
    package, extra = ACTION_PACKAGES.get(kind, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        needed = f"requires a package that is not installed: pip install 'cellgate[{extra}]'"
        raise ValueError(f"{key} {needed}")


class TasksKeys(Keys):
    """Which tasks of Amazon ECS."""

    cluster: Annotated[str, PlainValidator(word("the name or ARN of a cluster"))]
    services: Annotated[tuple[str, ...], PlainValidator(words("a list of service names"))] = _TASKS.services
    region: Annotated[str, PlainValidator(word("the name of a region"))] = _TASKS.region


class ImageKeys(Keys):
    """Which image the group of a LeaderWorkerSet gets, and which one back."""

    namespace: Annotated[str, PlainValidator(word("the name of a namespace"))] = _IMAGE.namespace
    image: Annotated[str, PlainValidator(word("the name of an image"))]
    undo_image: Annotated[str, PlainValidator(word("the name of an image"))] = ""
    container: Annotated[str, PlainValidator(word("the name of a container"))] = _IMAGE.container
    kubeconfig: Annotated[str, PlainValidator(values.readable_file)] = _IMAGE.kubeconfig

    def images(self) -> tuple[SetImage, SetImage | None]:
        """The way there, and the way back, if there is one."""
        there = SetImage(self.image, self.namespace, self.container, self.kubeconfig)
        return there, dataclasses.replace(there, image=self.undo_image) if self.undo_image else None


class PodsKeys(Keys):
    """Which pods of a unit go, and how."""

    namespace: Annotated[str, PlainValidator(word("the name of a namespace"))] = _PODS.namespace
    selector: Annotated[str, PlainValidator(unit_selector)] = _PODS.selector
    evict: Annotated[bool, PlainValidator(values.flag)] = _PODS.evict
    kubeconfig: Annotated[str, PlainValidator(values.readable_file)] = _PODS.kubeconfig
