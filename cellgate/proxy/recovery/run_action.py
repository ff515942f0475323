"""Does what a remedy says: one table of the ways to act on a unit."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from cellgate.proxy.config.remedy import Remedy
from cellgate.proxy.config.unit_actions import (
    CallWebhook,
    ReplacePods,
    ReplaceTasks,
    RestartService,
    RunCommand,
    SetImage,
)
from cellgate.proxy.recovery import command
from cellgate.proxy.recovery.nouns import Act, Incident, RecoveryReport, RecoveryResult

_ORCHESTRATED: Mapping[type, str] = {
    ReplacePods: "kubernetes_pods",
    SetImage: "kubernetes_image",
    ReplaceTasks: "ecs_tasks",
}
"""Modules with `run(action, about)`, for the actions that an orchestrator carries out."""


def action_runner(tls: Callable[[], ssl.SSLContext]) -> Act:
    """Carries out remedies; `tls` creates the context that verifies webhooks."""

    async def act(remedy: Remedy, about: Incident) -> RecoveryReport:
        match remedy.action:
            case RunCommand():
                return await command.run(remedy.action, about, remedy.timeout_s)
            case RestartService():
                return await command.run(remedy.action.command(about["unit"]), about, remedy.timeout_s)
            case CallWebhook():
                webhook = await _module("webhook")
                report: RecoveryReport = await webhook.caller(tls())(remedy.action, about, remedy.timeout_s)
                return report
        module = await _module(_ORCHESTRATED[type(remedy.action)])
        try:
            async with asyncio.timeout(remedy.timeout_s):
                report = await module.run(remedy.action, about)
        except TimeoutError:
            detail = f"not finished within {remedy.timeout_s:g} s; a part may have been done"
            return RecoveryReport(RecoveryResult.TIMEOUT, detail)
        return report

    return act


async def _module(name: str) -> Any:
    # Imported late: HTTP clients take 10 MB, which most gates do not need.
    return await asyncio.to_thread(import_module, f"cellgate.proxy.recovery.{name}")
